"""Every planted fault, by kind: those that bytes give away, and those that only a bound can."""

from __future__ import annotations

from oracle.faults import (
    branches,
    cache_arithmetic,
    configuration,
    dtype,
    experts,
    measurement,
    no_ops,
    numerics,
    scheduler,
    state_leaks,
    topology,
)
from oracle.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *state_leaks.FAULTS,
    *branches.FAULTS,
    *experts.FAULTS,
    *scheduler.FAULTS,
    *topology.FAULTS,
    *dtype.FAULTS,
    *configuration.FAULTS,
    *measurement.FAULTS,
    *no_ops.FAULTS,
    *cache_arithmetic.FAULTS,
)
BOUNDED_FAULTS: tuple[Fault, ...] = numerics.FAULTS
