"""Tries candidates on calibration pairs, and drops one as soon as a gate can no longer be met.

Pairs come in rounds. What a round is made of is handed to `evaluate` at once: its items are independent of each other.
All decisions depend on rows alone, in the order of pairs, so that no order of work can change a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oracle.campaign.candidate import CONTROL, Candidate, check_names
from oracle.campaign.gates import GATES, Gate, Outcome, hopeless, judge, passed, quality_gates
from oracle.campaign.pair import Pair, Row
from oracle.campaign.refusal import CampaignError

Standing = Literal["passed", "failed", "dropped", "refused", "control"]
"""dropped: before all pairs were seen, since a gate was out of reach. refused: no evidence, for instance not a hit."""


@dataclass(frozen=True, slots=True)
class Work:
    """Some pairs to be rendered by one candidate."""

    candidate: Candidate
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a candidate could not be rendered: the message of what it raised."""

    reason: str


Evaluate = Callable[[Sequence[Work]], Sequence[Sequence[Row] | Failure]]
"""The rows of each piece of work, in order of its pairs, or why there are none."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a candidate. rows: of the pairs that it was tried on. outcomes: of the gates of quality."""

    candidate: Candidate
    standing: Standing
    reason: str
    rows: tuple[Row, ...] = field(repr=False)
    outcomes: Mapping[str, Outcome]

    @property
    def blocks(self) -> int:
        """Block calls that ran in all its rows."""
        return sum(row.blocks for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Without the rows, which are many; with how many there are."""
        return {
            "candidate": self.candidate.as_json(),
            "standing": self.standing,
            "reason": self.reason,
            "pairs": len(self.rows),
            "blocks": self.blocks,
            "outcomes": {name: outcome.as_json() for name, outcome in self.outcomes.items()},
        }


@dataclass(frozen=True, slots=True)
class Searched:
    """Every candidate, in the order given, and the best of them: of those that passed, the one of the fewest blocks."""

    tried: tuple[Tried, ...]
    selected: Tried | None


def search(
    candidates: Sequence[Candidate],
    pairs: Sequence[Pair],
    evaluate: Evaluate,
    gates: Sequence[Gate] = GATES,
    round_size: int = 4,
    drop: bool = True,
) -> Searched:
    """Try all candidates on all pairs, `round_size` pairs at a time; the control on every pair, whatever it shows.

    drop: False tries every candidate to the end. It finds the same one. Raises CampaignError for an empty search, or
    for rows that are not those of the work.
    """
    check_names(candidates)
    if not pairs or round_size < 1:
        raise CampaignError(f"search: {len(pairs)} pairs, round_size={round_size}: give at least one of each.")
    rows: dict[str, list[Row]] = {candidate.name: [] for candidate in candidates}
    ended: dict[str, tuple[Standing, str]] = {}
    for start in range(0, len(pairs), round_size):
        chunk = tuple(pairs[start : start + round_size])
        work = [Work(candidate, chunk) for candidate in candidates if candidate.name not in ended]
        for item, found in zip(work, evaluate(work), strict=True):
            name = item.candidate.name
            if isinstance(found, Failure):
                ended[name] = "refused", found.reason
                continue
            if tuple(row.pair for row in found) != chunk:
                raise CampaignError(f"search: the rows of {name!r} are not those of its pairs.")
            rows[name].extend(found)
            if item.candidate.method == CONTROL or not drop or len(rows[name]) == len(pairs):
                continue
            lost = hopeless(rows[name], len(pairs), gates)
            if lost is not None:
                ended[name] = "dropped", f"{lost.name} is out of reach after {len(rows[name])} of {len(pairs)} pairs"
    tried = tuple(_conclude(each, rows[each.name], ended.get(each.name), pairs, gates) for each in candidates)
    return Searched(tried, select(tried))


def select(tried: Sequence[Tried]) -> Tried | None:
    """The candidate that passed with the fewest block calls; of several, the one closest to native, then by name."""
    qualified = [each for each in tried if each.standing == "passed"]
    return min(qualified, key=lambda each: (each.blocks, _distance(each.rows), each.candidate.name), default=None)


def _distance(rows: Sequence[Row]) -> float:
    return sum(row.metrics.latent_error for row in rows)


def _conclude(
    candidate: Candidate,
    rows: Sequence[Row],
    ended: tuple[Standing, str] | None,
    pairs: Sequence[Pair],
    gates: Sequence[Gate],
) -> Tried:
    if ended is not None:
        return Tried(candidate, *ended, tuple(rows), {})
    if candidate.method == CONTROL:
        return Tried(candidate, "control", "", tuple(rows), judge(rows, pairs, None, gates, reuse=False))
    try:
        outcomes = judge(rows, pairs, None, gates)
    except CampaignError as refusal:
        return Tried(candidate, "refused", str(refusal), tuple(rows), {})
    if passed(outcomes, quality_gates(gates)):
        return Tried(candidate, "passed", "", tuple(rows), outcomes)
    failed = ", ".join(name for name, outcome in outcomes.items() if not outcome.passed)
    return Tried(candidate, "failed", f"{failed} failed", tuple(rows), outcomes)
