"""How far a cached run's latents have gone from its forced twin's, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oracle.evidence.trace import Level, TraceError
from oracle.verdict.align import Aligned, Replica, same_value
from oracle.verdict.tolerance import ToleranceError, relative_distance
from wanref.observe import TensorKey

Measure = Literal["distance", "rms", "digest"]
"""distance: |c - f| / |f|, Euclidean. rms: the difference of the two rms over the twin's, which is never more than the
distance. digest: 0 where the bytes are the same, and no number where they are not."""

_MEASURES: dict[Level, Measure] = {"tensor": "distance", "stats": "rms", "digest": "digest"}


@dataclass(frozen=True, slots=True)
class Divergence:
    """values: one a step, None where there is no number: nothing recorded, not finite, or bytes that differ and were
    not kept. differs: whether the bytes do, a step; False where one side lacks them."""

    measure: Measure
    values: tuple[float | None, ...]
    differs: tuple[bool, ...]

    @property
    def first(self) -> int | None:
        """The first step after which the latents differ."""
        return self.differs.index(True) if True in self.differs else None


def measure_divergence(forced: Aligned, cached: Aligned, request: int = 0) -> Divergence | None:
    """By what both traces recorded: their tensors, or else their statistics, or else their digests; None without any.

    The steps are those of the twin's schedule.
    """
    levels = [_MEASURES.get(each.manifest["level"]) for each in (forced, cached)]
    begun = forced.requests.get(request)
    if None in levels or begun is None or not begun.schedule:
        return None
    measure: Measure = "digest" if "digest" in levels else "rms" if "rms" in levels else "distance"
    pairs = [_latents(forced, cached, request, step) for step in begun.schedule]
    values = tuple(None if pair is None else _value(forced, cached, pair, measure) for pair in pairs)
    return Divergence(measure, values, tuple(pair is not None and not same_value(*pair) for pair in pairs))


def _latents(forced: Aligned, cached: Aligned, request: int, step: Mapping[str, Any]) -> tuple[Replica, Replica] | None:
    key = TensorKey(request, step["index"], step["expert"], None, "scheduler")
    one, other = forced.owner(key), cached.owner(key)
    return None if one is None or other is None else (one, other)


def _value(forced: Aligned, cached: Aligned, pair: tuple[Replica, Replica], measure: Measure) -> float | None:
    one, other = pair
    if same_value(one, other):
        return 0.0
    a, b = one.record, other.record
    if measure == "rms" and a.rms and b.rms is not None and not (a.nan or a.inf or b.nan or b.inf):
        return abs(b.rms - a.rms) / a.rms
    if measure == "distance":
        try:
            return relative_distance(forced.array(a.key, one.rank), cached.array(b.key, other.rank))
        except (ToleranceError, TraceError):  # not finite, other shapes, or lost: a finding elsewhere, and no distance
            return None
    return None
