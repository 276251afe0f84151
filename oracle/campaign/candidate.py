"""What a campaign tries, as data: a cache by method and options, or the control, which is fewer steps and no cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oracle.campaign.refusal import CampaignError
from oracle.campaign.schedule_search import ReuseSchedule
from wanref.caching.residual import Reuse
from wanref.caching.spec import METHODS, CacheSpec
from wanref.topology import Branch

CONTROL = "control"
CONTROL_STEPS = (5, 8, 12, 16, 20, 25, 30, 40, 49)
"""Of 50."""


@dataclass(frozen=True)
class Candidate:
    """name: what reports call it. method, options: a cache's, or `control` with its `steps`."""

    name: str
    method: str
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.method not in (*METHODS, CONTROL):
            raise CampaignError(
                f"method={self.method!r} is not accepted: give one of {', '.join((*METHODS, CONTROL))}."
            )
        if self.method == CONTROL and (self.options.keys() != {"steps"} or type(self.options["steps"]) is not int):
            raise CampaignError(f"control: options={dict(self.options)!r} is not accepted: give steps, an integer.")

    @property
    def cache(self) -> CacheSpec | None:
        """What to mount; nothing for the control."""
        return None if self.method == CONTROL else CacheSpec(self.method, self.options)

    @property
    def steps(self) -> int | None:
        """How many steps the control takes; None for a cache, which takes the request's."""
        return int(self.options["steps"]) if self.method == CONTROL else None

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "method": self.method, "options": json.loads(json.dumps(self.options))}


def candidate_of(content: object) -> Candidate:
    """From `as_json`. Raises CampaignError for anything else."""
    if not isinstance(content, Mapping) or content.keys() != {"name", "method", "options"}:
        raise CampaignError(f"candidate: {content!r} is not an object of name, method and options.")
    if not isinstance(content["options"], Mapping):
        raise CampaignError(f"candidate: options={content['options']!r} is not an object.")
    return Candidate(str(content["name"]), str(content["method"]), content["options"])


def check_names(candidates: Sequence[Candidate]) -> None:
    """Raise CampaignError unless there is one, and each has a name of its own."""
    names = [candidate.name for candidate in candidates]
    if not names or len(set(names)) < len(names):
        raise CampaignError(f"candidates={names} is not accepted: give at least one, each with a name of its own.")


def controls(steps: int) -> tuple[Candidate, ...]:
    """The control's step counts, scaled from 50 to `steps`, each below it and once."""
    counts = sorted({max(1, round(count * steps / 50)) for count in CONTROL_STEPS} - {steps})
    return tuple(Candidate(f"{count} of {steps} steps", CONTROL, {"steps": count}) for count in counts)


def fixed_candidate(name: str, schedules: Mapping[tuple[int, Branch], ReuseSchedule], reuse: Reuse) -> Candidate:
    """A fixed schedule by (stage, branch). Raises CampaignError where nothing would be reused."""
    entries = [
        f"{stage}.{branch}={_ranges(schedule.reused)}"
        for (stage, branch), schedule in sorted(schedules.items())
        if schedule.reused
    ]
    if not entries:
        raise CampaignError(f"candidate {name!r}: the schedule reuses nothing.")
    return Candidate(name, "fixed", {"steps": "/".join(entries), "reuse": reuse})


def _ranges(steps: Sequence[int]) -> str:
    """Steps as a cache's option has them: 3-5+8."""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
