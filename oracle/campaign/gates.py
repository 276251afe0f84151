"""The gates, as one table, and what is refused before any of them is looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from oracle.campaign.pair import Pair, Row, total_calls
from oracle.campaign.refusal import CampaignError

if TYPE_CHECKING:
    from oracle.campaign.timing import Timing


@dataclass(frozen=True, slots=True)
class Gate:
    """A limit. of: which value is held against it, always over all pairs; sense: from which side."""

    name: str
    of: Literal["mean", "worst", "latency"]
    metric: Literal["ssim", "temporal_error", "ratio"]
    sense: Literal[">=", "<="]
    limit: float

    def passes(self, value: float) -> bool:
        """Whether the value is on the right side. The limit itself passes; what is not a number does not."""
        return value >= self.limit if self.sense == ">=" else value <= self.limit


GATES = (
    Gate("mean_ssim", "mean", "ssim", ">=", 0.95),
    Gate("worst_ssim", "worst", "ssim", ">=", 0.90),
    Gate("temporal_error", "mean", "temporal_error", "<=", 0.10),
    Gate("latency", "latency", "ratio", "<=", 0.90),
)
"""Latency is the upper end of a bootstrap interval of cached over native: see `timing.py`."""

PERFECT: Mapping[str, float] = {"ssim": 1.0, "temporal_error": 0.0}
"""The best that a video can still turn out."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A gate's value, its limit, and whether it passed."""

    value: float
    limit: float
    passed: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def quality_gates(gates: Sequence[Gate] = GATES) -> tuple[Gate, ...]:
    """Those that are about videos, and so are the same on every machine."""
    return tuple(gate for gate in gates if gate.of != "latency")


def judge(
    rows: Sequence[Row],
    pairs: Sequence[Pair],
    timing: Timing | None,
    gates: Sequence[Gate] = GATES,
    reuse: bool = True,
) -> dict[str, Outcome]:
    """Every gate by name; without a timing, those of quality alone. reuse: see `check_rows`.

    Raises CampaignError for evidence that no gate can be held against: see `check_rows` and `check_timing`.
    """
    check_rows(rows, pairs, reuse)
    if timing is not None:
        check_timing(timing)
    outcomes = {}
    for gate in gates:
        if gate.of == "latency":
            if timing is None:
                continue
            value = timing.high
        else:
            value = value_of(gate, [getattr(row.metrics, gate.metric) for row in rows])
        outcomes[gate.name] = Outcome(value, gate.limit, gate.passes(value))
    return outcomes


def value_of(gate: Gate, values: Sequence[float]) -> float:
    """What a gate of quality is held against. The sum is exact before it is rounded, so that order has no part in it,
    and a better video can never make a worse mean."""
    if gate.of == "mean":
        return math.fsum(values) / len(values)
    return min(values) if gate.sense == ">=" else max(values)


def hopeless(rows: Sequence[Row], total: int, gates: Sequence[Gate] = GATES) -> Gate | None:
    """The first gate that these rows have failed already, even if all others of `total` pairs turn out perfect."""
    for gate in quality_gates(gates):
        seen = [getattr(row.metrics, gate.metric) for row in rows]
        best = value_of(gate, seen + [PERFECT[gate.metric]] * (total - len(seen)))
        if not gate.passes(best):
            return gate
    return None


def check_rows(rows: Sequence[Row], pairs: Sequence[Pair], reuse: bool = True) -> None:
    """Raise CampaignError unless there is one row for each pair, all finite, all from a cache that was reset and fired.

    reuse: False for the control, which has no cache.
    """
    found = [row.pair for row in rows]
    missing, extra = [p for p in pairs if p not in found], [p for p in found if p not in pairs]
    if missing:
        raise CampaignError(f"evidence: {len(missing)} of {len(pairs)} pairs are missing, the first {missing[0]}.")
    if extra:
        raise CampaignError(f"evidence: {extra[0]} is not one of the pairs.")
    if len(found) != len(pairs):
        twice = next(pair for pair in found if found.count(pair) > 1)
        raise CampaignError(f"evidence: {twice} is there twice.")
    for row in rows:
        for field in fields(row.metrics):
            value = getattr(row.metrics, field.name)
            if not math.isfinite(value):
                raise CampaignError(f"evidence: {field.name}={value} of {row.pair} is not finite.")
    if not reuse:
        return
    totals = total_calls(rows)
    if not totals:
        raise CampaignError("evidence: no call of a cache was recorded.")
    for calls in totals:
        if calls.reused == 0:
            raise CampaignError(f"evidence: no hit at {calls.place}, of {calls.computed} calls.")
    for row in rows:
        if (row.begun, row.ended) != (rows[0].begun, rows[0].ended):
            raise CampaignError(
                f"evidence: before or behind {row.pair} the cache remembered something else than at {rows[0].pair}: "
                "it was not reset."
            )


def check_timing(timing: Timing) -> None:
    """Raise CampaignError for a timing that was taken with recording on, or that is not one."""
    if timing.recording:
        raise CampaignError("timing: recording=True is not accepted: an observer was mounted. Take it without.")
    if not math.isfinite(timing.high) or timing.high <= 0:
        raise CampaignError(f"timing: high={timing.high} is not accepted: a ratio is finite and above 0.")


def passed(outcomes: Mapping[str, Outcome], gates: Sequence[Gate] = GATES) -> bool:
    """Whether every one of `gates` is there and has passed, by its own limit and value, not by what is written."""
    return all(
        gate.name in outcomes and outcomes[gate.name].limit == gate.limit and gate.passes(outcomes[gate.name].value)
        for gate in gates
    )
