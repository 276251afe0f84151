"""The place where a run first went wrong, in one sentence that a person can act on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oracle.evidence.reader import Trace
from oracle.verdict.align import Aligned, align, same_value, spot_of
from oracle.verdict.compare import compare
from oracle.verdict.contracts import Contract
from oracle.verdict.finding import Cause, Spot, Verdict
from wanref.observe import TensorKey

LADDER = ("step", "block", "module")
"""The locks that are tried after the free run, coarse to fine."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where and why. `difference`: the first value that differs, where one does; `equal_until`: the last step whose
    latents are equal, None if the first step's are not. `lock`: the finest lock under which it still differs."""

    spot: Spot
    cause: Cause
    says: str
    difference: Spot | None = None
    equal_until: int | None = None
    lock: str | None = None

    @property
    def sentence(self) -> str:
        spot = self.spot
        places = [
            f"rank {spot.rank}" if spot.rank is not None else "",
            f"stage {spot.stage}" if spot.stage is not None else "",
            f"step {spot.step}" if spot.step is not None else "",
            spot.branch or "",
        ]
        parts = [f"{', '.join(filter(None, places)) or 'the whole run'}: {self.says}"]
        if self.difference is not None:
            block = self.difference.block
            named = f"block {block}" if isinstance(block, int) else f"`{block}`"
            step = "" if self.difference.step == spot.step else f" of step {self.difference.step}"
            parts.append(f"first differs at {named}{step}")
            if self.equal_until is not None:
                parts.append(f"latents equal until step {self.equal_until}")
            elif self.difference.step:
                parts.append("latents differ from the first step on")
        if self.lock is not None:
            parts.append(f"still there {'when free' if self.lock == 'free' else f'{self.lock}-locked'}")
        return f"{'; '.join(parts)} ({self.cause})"


def locate(reference: Trace, candidate: Trace, verdict: Verdict) -> Location | None:
    """What the verdict's first finding and the first differing value say together. None if the verdict holds."""
    finding = verdict.first
    if finding is None:
        return None
    one, other = align(reference), align(candidate)
    key = first_difference(one, other)
    difference = None if key is None else spot_of(key, other)
    spot = finding.spot
    return Location(spot, finding.cause, finding.says, difference, _equal_until(one, other, spot.request))


def first_difference(one: Aligned, other: Aligned) -> TensorKey | None:
    """The first key, in the order of execution, at which the two have different values."""
    for key in other.ordered:
        a, b = one.owner(key), other.owner(key)
        if a is not None and b is not None and not same_value(a, b):
            return key
    return None


def _equal_until(one: Aligned, other: Aligned, request: int) -> int | None:
    last = None
    for key in other.ordered:
        if key.block == "scheduler" and key.request == request:
            a, b = one.owner(key), other.owner(key)
            if a is None or b is None or not same_value(a, b):
                return last
            last = key.step
    return last


def climb(
    reference: Trace, free: Trace, contract: Contract | str, record: Callable[[str, int], Trace]
) -> Location | None:
    """Locate, then run the candidate again under each lock, until nothing differs: how it arises at this place.

    `record(lock, steps)` runs the candidate's first `steps` steps under the lock and returns the trace; no step behind
    the first difference is computed again. The reference needs level `tensor`, and modules' ports for the last lock.
    """
    verdict = compare(reference, free, contract)
    location = locate(reference, free, verdict)
    if location is None or location.difference is None:
        return location
    step, finest, difference = location.difference.step or 0, "free", location.difference
    one = align(reference)
    for lock in LADDER:
        other = align(record(lock, step + 1))
        key = first_difference(one, other)
        if key is None or key.step > step:
            break
        finest, difference = lock, spot_of(key, other)
    return Location(location.spot, location.cause, location.says, difference, location.equal_until, finest)
