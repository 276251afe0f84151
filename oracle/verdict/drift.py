"""T2 over traces: how far a run that is free drifts, against how far one rounding of its initial latents drifts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oracle.evidence.reader import Trace
from oracle.evidence.trace import TraceError
from oracle.verdict.align import Aligned, align, layer_of, spot_of
from oracle.verdict.finding import Finding
from oracle.verdict.tolerance import ToleranceError, drift_limits, judge_t2, relative_distance


def check_drift(base: Trace, candidate: Trace, perturbed: Sequence[Trace], kappa: float = 2.0) -> Finding | None:
    """The first step after which the candidate's latents are further from the base's than T2 allows, or None.

    perturbed: at least 3 runs of the base whose initial latents were shifted by +-u (`oracle.evidence.start`, with
    `perturbation`). All run free, at level `tensor`. T2 is weak on purpose, and never stands alone: what grows less
    than one rounding of the latents does, such as a stale residual, passes. It is for what T1 under a lock cannot show:
    that the candidate as it really runs, every module fed by its own, does not run away.

    Raises ToleranceError for a locked run and whatever `drift_limits` refuses, TraceError for one without latents.
    """
    one, other = _open(base), _open(candidate)
    limits = drift_limits([_distances(one, _open(run)) for run in perturbed], kappa)
    distances = _distances(one, other)
    step = judge_t2(distances, limits)
    if step is None:
        return None
    key = next(key for key in other.ordered if (key.block, key.step) == ("scheduler", step))
    says = f"the latents are {distances[step]:.3g} from the reference's, of at most {limits[step]:.3g} (T2, relative)"
    return Finding(layer_of(key, other), "arithmetic", spot_of(key, other), says)


def _open(trace: Trace) -> Aligned:
    aligned = align(trace)
    if aligned.manifest.get("lock") is not None:
        raise ToleranceError(f"{trace.folder} was recorded under a lock: what is locked does not drift. Run it free.")
    if aligned.holes:
        raise TraceError(f"{trace.folder}: {aligned.holes[0]}; a run with holes is no evidence.")
    if aligned.manifest["level"] != "tensor":
        raise TraceError(f"{trace.folder}: recorded at level {aligned.manifest['level']!r}; T2 needs 'tensor'.")
    return aligned


def _distances(one: Aligned, other: Aligned) -> list[float]:
    """|c - b| / |b| of the latents after each step; infinite where the candidate's are not finite."""
    distances = []
    for key in (key for key in one.ordered if key.block == "scheduler"):
        a, b = one.owner(key), other.owner(key)
        if a is None or b is None:
            raise TraceError(f"{other.trace.folder} has no latents at {key}: T2 compares runs of the same steps.")
        finite = not b.record.nan and not b.record.inf
        arrays = one.array(key, a.rank), other.array(key, b.rank)
        distances.append(relative_distance(*arrays) if finite else math.inf)
    return distances
