"""A bounded contract over traces: T1 at every key of two runs that were locked on a third.

`precise` is the float32 run of the same weights and request; `base`, which is native, and `candidate` are in bf16 or
fp16, under its `module` lock. So each module reads the precise run's values, rounded, and what it makes of them, which
is recorded before the lock replaces it, is its own:

- what a module, a block, the projection, guidance or the decoder computed is measured by T1;
- latents are the solver's, elementwise in float32 from the same values: where device and libraries are the same, the
  base's bytes are claimed (T0), since a limit for bf16 would let pass latents that were rounded to bf16;
- what was received is what the lock gave its sender: the precise value, rounded, to the byte.

What it cannot see is what is no larger than the base's own rounding is, at one key. Measured on the micro checkpoint in
bf16, under calibrated limits (rho 1.43), each at 8 places of one block, step and branch: a gain of attention of .5 %,
noise of 1 % on it, a bias of .3 % of a block's rms, and a gain of 1 % of one token were found and pointed at 8 times of
8; a gain of .2 %, noise of .3 % and a bias of .1 % never. u is .4 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.evidence.identity import identity_of
from oracle.evidence.reader import Trace
from oracle.evidence.trace import TraceError
from oracle.verdict.align import Aligned, Replica, align, layer_of, same_value, spot_of
from oracle.verdict.configuration import check_configuration
from oracle.verdict.contracts import CONTRACTS, Contract
from oracle.verdict.coverage import check_coverage
from oracle.verdict.finding import Finding, Spot
from oracle.verdict.tolerance import (
    FEWEST_VARIANTS,
    T1Limits,
    T1Measure,
    ToleranceError,
    calibrate_t1,
    judge_t1,
    measure_t1,
    start_limits,
    unit_roundoff,
)
from wanref.observe import TensorKey

KERNELS = CONTRACTS["kernels"]
PRECISE = Contract("precise", "the same in float32", "bounded", "verdicts", ("dtype", *KERNELS.may_differ))
"""What precise and base must agree on."""

_WORDS = {"rho": "rho", "token_rho": "rho of one token", "beta": "gain error", "mu": "bias"}


@dataclass(frozen=True, slots=True)
class Measured:
    """T1 at each key that could be measured, and what is wrong whatever the limits are."""

    measures: tuple[tuple[TensorKey, T1Measure], ...]
    wrong: tuple[Finding, ...]


def check_runs(precise: Aligned, one: Aligned, other: Aligned) -> None:
    """Raises ToleranceError for dtypes that have no T1 or are not precise, TraceError for runs without tensors."""
    for aligned in (one, other):
        unit_roundoff(aligned.manifest["dtype"])
    if precise.manifest["dtype"] != "float32":
        raise ToleranceError(
            f"precise={str(precise.trace.folder)!r} is of dtype {precise.manifest['dtype']!r}: give a float32 run."
        )
    for aligned in (precise, one, other):
        if aligned.manifest["level"] != "tensor":
            raise TraceError(
                f"{aligned.trace.folder}: recorded at level {aligned.manifest['level']!r}; T1 measures tensors: record "
                "at level 'tensor'."
            )


def check_bounded(precise: Aligned, one: Aligned, other: Aligned, limits: T1Limits | None) -> Iterator[Finding]:
    """The candidate `other` held against the base `one`, within `limits` or else `start_limits`."""
    limits = limits or start_limits(unit_roundoff(one.manifest["dtype"]))
    measured = measure_run(precise, one, other)
    yield from measured.wrong
    for key, measure in measured.measures:
        if over := judge_t1(measure, limits):
            says = ", ".join(
                f"{_WORDS[name]} {value:.3g} of at most {getattr(limits, name):.3g}" for name, value in over
            )
            yield _finding(key, other, says)


def check_locked_coverage(one: Aligned, other: Aligned, contract: Contract) -> Iterator[Finding]:
    """The evidence that a bitwise contract asks for. What was received is held against precise by `check_bounded`:
    under the lock it is not what its sender recorded."""
    return check_coverage(_without_received(one), _without_received(other), replace(contract, tensors="bitwise"))


def calibrate(precise: Trace, base: Trace, variants: Sequence[Trace]) -> T1Limits:
    """Limits from traces of benign variants, locked as the base is: `calibrate_t1` of each one's worst over all keys.

    Raises ToleranceError for fewer than 5 variants, one with a finding that no limit explains, and whatever
    `calibrate_t1` refuses. Variants that calibrate must not be those that are then judged.
    """
    if len(variants) < FEWEST_VARIANTS:
        raise ToleranceError(f"{len(variants)} benign variants: a calibration needs at least {FEWEST_VARIANTS}.")
    exact, one = align(precise), align(base)
    worst = []
    for number, variant in enumerate(variants):
        other = align(variant)
        check_runs(exact, one, other)
        measured = measure_run(exact, one, other)
        wrong = [
            *check_configuration(one, other, KERNELS),
            *check_locked_coverage(one, other, KERNELS),
            *measured.wrong,
        ]
        if wrong:
            raise ToleranceError(f"variant {number} ({variant.folder}) calibrates nothing: {wrong[0]}.")
        worst.append(_worst([measure for _, measure in measured.measures]))
    return calibrate_t1(worst)


def measure_run(precise: Aligned, one: Aligned, other: Aligned) -> Measured:
    """T1 at every key that all three have. Nothing is measured of runs that were not locked."""
    unlocked = [*_unlocked(precise, one, "reference: "), *_unlocked(precise, other, "")]
    if unlocked:
        return Measured((), tuple(unlocked))
    measures, wrong = [], [*_precise(precise, one), *_received(precise, one, "reference: ")]
    wrong += _received(precise, other, "")
    u = unit_roundoff(one.manifest["dtype"])
    repeats = all(one.manifest.get(name) == other.manifest.get(name) for name in ("device", "libraries"))
    for key in other.ordered:
        r, b, c = precise.owner(key), one.owner(_own(key, one, other)), other.owner(key)
        if r is None or b is None or c is None or c.record.nan or c.record.inf:
            continue  # what is missing, and what is not finite, is a finding of its own
        if b.record.dtype != c.record.dtype:
            wrong.append(_finding(key, other, f"its dtype is {c.record.dtype}, and {b.record.dtype} in the reference"))
        elif key.block == "scheduler" and repeats:
            if not same_value(b, c):
                wrong.append(_finding(key, other, "other bytes than the reference, from the same values, in float32"))
        else:
            try:
                pairs = (precise, r), (one, b), (other, c)
                arrays = [run.array(value.record.key, value.rank).astype(np.float32) for run, value in pairs]
                measures.append((key, _of_its_size(measure_t1(arrays[0], arrays[1], arrays[2], u))))
            except (TraceError, ToleranceError) as error:
                wrong.append(Finding("coverage", "missing evidence", spot_of(key, other), str(error)))
    return Measured(tuple(measures), tuple(wrong))


def _own(key: TensorKey, one: Aligned, other: Aligned) -> TensorKey:
    """The base's key of what the candidate computed at `key`: on one chain both branches share what was embedded, which
    the lock has written when it comes to uncond; on two chains each has its own."""
    shared = key.block == "embed" and key.branch == "uncond" and one.topology.cfg < other.topology.cfg
    return replace(key, branch="cond") if shared else key


def _finding(key: TensorKey, other: Aligned, says: str) -> Finding:
    port = "" if key.port == "output" else f"`{key.port}`: "
    return Finding(layer_of(key, other), "arithmetic", spot_of(key, other), port + says)


def _unlocked(precise: Aligned, aligned: Aligned, name: str) -> Iterator[Finding]:
    lock = aligned.manifest.get("lock")
    if lock != {"name": "module", "of": identity_of(precise.trace)}:
        under = "no lock" if lock is None else f"the {lock.get('name')} lock on {str(lock.get('of'))[:8]}"
        says = f"{name}recorded under {under}: the module lock on {precise.trace.folder} is needed"
        yield Finding("coverage", "missing evidence", Spot(), says)
    elif not any(key.port != "output" for key in aligned.tensors):
        says = f"{name}no module's output was recorded: the module lock needs the modules' ports"
        yield Finding("coverage", "missing evidence", Spot(), says)


def _precise(precise: Aligned, one: Aligned) -> Iterator[Finding]:
    """Whether the precise run is the base's in all but its dtype. What it lacks was neither locked nor is measured."""
    for finding in check_configuration(one, precise, PRECISE):
        yield replace(finding, says=f"precise: {finding.says}")
    for hole in precise.holes:
        spot = Spot(rank=hole.rank) if hole.key is None else spot_of(hole.key, precise)
        yield Finding("coverage", "missing evidence", spot, f"precise: {hole.what}")
    for key in one.ordered:
        if key not in precise.tensors:
            says = f"precise: nothing is recorded at `{key.port}`"
            yield Finding("coverage", "missing evidence", spot_of(key, one), says)
    for place in sorted(precise.decisions.keys() | one.decisions.keys()):
        a, b = precise.decisions.get(place), one.decisions.get(place)
        if a is None or b is None or a.verdict != b.verdict:
            request, step, branch, stage = place
            spot = Spot(request, step, None, branch, stage=stage, rank=one.rank_of(stage, branch))
            says = f"precise: {a and a.verdict}, and {b and b.verdict} in the reference: replay one schedule in both"
            yield Finding("decisions", "decision", spot, says)


def _received(precise: Aligned, aligned: Aligned, name: str) -> Iterator[Finding]:
    for key in aligned.ordered:
        given = precise.owner(key)
        for replica in aligned.tensors[key]:
            if given is None or replica.record.source != "received":
                continue
            wanted = _rounded(precise.array(key, given.rank), replica.record.dtype)
            if not np.array_equal(aligned.array(key, replica.rank), wanted):
                spot = replace(spot_of(key, aligned), rank=replica.rank)
                says = f"{name}is not what the lock gave its sender: it was changed or mixed up on its way"
                yield Finding("coverage", "exchange", spot, says)


def _without_received(aligned: Aligned) -> Aligned:
    def own(replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        return tuple(each for each in replicas if each.record.source != "received")

    return replace(aligned, tensors={key: kept for key, each in aligned.tensors.items() if (kept := own(each))})


def _rounded(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """float32 in another dtype, to nearest and ties to even; bfloat16 as the float32 that the reader widens it to."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    words = values.view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _of_its_size(measure: T1Measure) -> T1Measure:
    """A bias counts as far as the error does: what is a thousandth of the base's own may well have a mean."""
    return replace(measure, mu=measure.mu * min(measure.rho, 1.0))


def _worst(measures: Sequence[T1Measure]) -> T1Measure:
    if not measures:
        raise ToleranceError("not one key was measured: nothing can be calibrated.")
    # NumPy's, as Python's max() loses a NaN that is not the first.
    return T1Measure(*(float(np.max([getattr(m, f.name) for m in measures])) for f in fields(T1Measure)))
