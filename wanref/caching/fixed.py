"""A given schedule of reuse: which steps reuse, per stage and branch. Also what replays a recorded one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wanref.caching.base import Begin, Judgement
from wanref.caching.error import CacheError
from wanref.caching.rule import PlannedRule
from wanref.checkpoint import Expert
from wanref.topology import BRANCHES, Branch

ReuseSteps = Mapping[tuple[int, Branch], frozenset[int]]
"""(stage, branch) to the steps that reuse."""


@dataclass(frozen=True, slots=True)
class FixedSchedule:
    """Makes the rule, once the given steps have been held against the request's schedule."""

    steps: ReuseSteps

    def __call__(self, begin: Begin) -> PlannedRule:
        """Raises CacheError for a stage, step or branch that is not there, or a reuse with nothing to reuse."""
        for stage, branch in self.steps:
            if stage >= begin.place.topology.pp:
                raise CacheError(f"fixed: stage {stage} ({branch}) is not in topology {begin.place.topology}.")
        stages = range(begin.place.topology.pp)
        return PlannedRule({(s, b): self._judgements(begin, s, b) for s in stages for b in BRANCHES})

    def _judgements(self, begin: Begin, stage: int, branch: Branch) -> dict[int, Judgement]:
        left = set(self.steps.get((stage, branch), ()))
        computed: set[Expert] = set()
        judgements: dict[int, Judgement] = {}
        for step in begin.schedule:
            if branch == "uncond" and not step.guided:
                continue
            reuse = step.index in left
            left.discard(step.index)
            if reuse and step.expert not in computed:
                raise CacheError(
                    f"fixed: stage {stage}, {branch} is to reuse at step {step.index}, before the {step.expert}-noise "
                    "expert has computed there."
                )
            if not reuse:
                computed.add(step.expert)
            judgements[step.index] = Judgement("reuse" if reuse else "compute", "schedule")
        if left:
            raise CacheError(
                f"fixed: stage {stage}, {branch} does not run at steps {sorted(left)}, which are to reuse."
            )
        return judgements


def parse_reuse_steps(text: str, stages: int) -> ReuseSteps:
    """Parse "0.cond=3-5+8/1.uncond=4": STAGE.BRANCH=STEPS, joined by "/"; "*" is every stage, or both branches."""
    steps: dict[tuple[int, Branch], frozenset[int]] = {}
    for entry in text.split("/"):
        target, equals, listed = entry.partition("=")
        stage, dot, branch = target.partition(".")
        if not equals or not dot or (stage != "*" and not stage.isdecimal()) or branch not in ("*", *BRANCHES):
            raise CacheError(f"fixed: {entry!r} is not STAGE.BRANCH=STEPS, for instance '0.cond=3-5+8' or '*.*=2+4'.")
        for each_stage in range(stages) if stage == "*" else (int(stage),):
            for each_branch in BRANCHES:
                if branch in ("*", each_branch):
                    if (each_stage, each_branch) in steps:
                        raise CacheError(f"fixed: {entry!r} gives stage {each_stage}, {each_branch} a second time.")
                    steps[each_stage, each_branch] = _parse_steps(entry, listed)
    return steps


def _parse_steps(entry: str, listed: str) -> frozenset[int]:
    steps: set[int] = set()
    for part in listed.split("+"):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
            raise CacheError(f"fixed: {part!r} in {entry!r} is neither a step nor a range of steps such as 3-5.")
        steps.update(range(int(first), int(last) + 1))
    return frozenset(steps)
