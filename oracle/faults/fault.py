"""A planted fault: where it comes from, what it breaks, and where the oracle must point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oracle.faults.plant import Plant
from oracle.faults.scenario import Scenario
from oracle.verdict.finding import Cause, Spot, Verdict

Kind = Literal[
    "state leaks",
    "branches",
    "experts",
    "scheduler",
    "topology",
    "dtype",
    "configuration",
    "measurement",
    "no-ops",
    "cache arithmetic",
    "numerics",
]


@dataclass(frozen=True, slots=True)
class Points:
    """Where the oracle must point. None where a fault has no such place: a whole request, a step of both branches."""

    cause: Cause
    rank: int | None = None
    step: int | None = None
    branch: str | None = None
    block: int | str | None = None

    def met_by(self, spot: Spot, cause: Cause) -> bool:
        """Exactly: what has no place here must not be given one there, but for the block, which may be finer."""
        placed = (self.rank, self.step, self.branch) == (spot.rank, spot.step, spot.branch)
        return placed and cause == self.cause and self.block in (None, spot.block)


@dataclass(frozen=True, slots=True)
class Fault:
    """`source`: the public reports, by their rows in `cases/public-reports.md`. `caught_by`: the file of `suites/cpu`
    that would have caught it without the oracle, None if none would."""

    id: str
    kind: Kind
    source: str
    breaks: str
    scenario: Scenario
    points: Points
    plant: Plant
    caught_by: str | None = None

    @property
    def needs_oracle(self) -> bool:
        return self.caught_by is None

    def pointed(self, verdict: Verdict) -> bool:
        first = verdict.first
        return first is not None and self.points.met_by(first.spot, first.cause)
