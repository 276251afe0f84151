"""A cache made of a rule, which judges each call, and a store of residuals, which carries the verdict out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from wanref.caching.base import Begin, Decision, Judgement, StackCall
from wanref.caching.residual import ResidualStore, Reuse
from wanref.caching.state import digest_of
from wanref.checkpoint import Expert
from wanref.topology import BRANCHES, Branch

Plan = Mapping[tuple[int, Branch], Mapping[int, Judgement]]
"""(stage, branch) to the judgement of each step at which the branch runs."""


class Rule(Protocol):
    """Judges calls of one request on one rank; its state is advanced by its own judgements, never by what was done."""

    @property
    def plan(self) -> Plan | None:
        """What every stage will judge, if that is known before the first step."""
        ...

    def judge(self, call: StackCall) -> Judgement: ...

    def state(self, expert: Expert, branch: Branch) -> Any:
        """What it knows of one (expert, branch): numbers and tensors."""
        ...


class RuleMaker(Protocol):
    """Makes a fresh rule for a request; raises CacheError for what it cannot honour."""

    def __call__(self, begin: Begin) -> Rule: ...


@dataclass(frozen=True, slots=True)
class PlannedRule:
    """A rule that is known in full before the first step, on every stage alike."""

    plan: Plan

    def judge(self, call: StackCall) -> Judgement:
        where = call.where
        return self.plan[where.place.stage, where.branch][where.step.index]

    def state(self, expert: Expert, branch: Branch) -> Any:
        """The plan, which never changes."""
        return {stage: steps for (stage, planned), steps in self.plan.items() if planned == branch}


class RuleCache:
    """Mounts a rule on a rank. `forced` computes every call: the rule is evaluated and recorded, then overridden."""

    def __init__(self, make_rule: RuleMaker, reuse: Reuse = "plain", forced: bool = False) -> None:
        self._make_rule = make_rule
        self._reuse = reuse
        self._forced = forced
        self._rule: Rule | None = None
        self._store = ResidualStore(reuse)
        self._plan: Plan | None = None
        self._experts: tuple[Expert, ...] = ()

    def begin(self, begin: Begin) -> None:
        self._store = ResidualStore(self._reuse)
        self._rule = self._make_rule(begin)
        self._plan = None if self._forced else self._rule.plan
        self._experts = tuple(expert for expert, steps in begin.schedule.split.items() if steps)

    def order(self, step: int, branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
        """The order in which a chain had better run `branches` at a step; their given order where nothing is known.

        All stages of a chain must agree, since what one sends the next receives: the plan is the same on all of them.
        """
        if self._plan is None or len(branches) < 2:
            return branches
        stages = sorted({stage for stage, _ in self._plan})
        costs = {
            branch: [self._plan[stage, branch][step].verdict == "compute" for stage in stages] for branch in BRANCHES
        }
        return min((branches, branches[::-1]), key=lambda order: _makespan([costs[branch] for branch in order]))

    def run(self, call: StackCall) -> tuple[torch.Tensor, Decision]:
        assert self._rule is not None, "run is called between begin and end"
        judgement = self._rule.judge(call)
        if judgement.verdict == "reuse" and not self._forced:
            output, origins = self._store.apply(call.where, call.hidden)
            return output, call.decided(judgement, self._forced, origins)
        output = call.compute()
        if not self._forced:
            self._store.keep(call.where, call.hidden, output)
        return output, call.decided(judgement, self._forced)

    def state(self) -> dict[str, str]:
        rule = self._rule
        if rule is None:
            return {}
        return {
            f"{expert}.{branch}": digest_of((rule.state(expert, branch), self._store.state(expert, branch)))
            for expert in self._experts
            for branch in BRANCHES
        }

    def end(self) -> None:
        self._rule = None
        self._plan = None
        self._experts = ()
        self._store = ResidualStore(self._reuse)


def _makespan(jobs: list[list[bool]]) -> int:
    """Time until the last stage is done with the last branch, each computed stage taking 1: a flow shop."""
    done = [0] * len(jobs[0])
    for costs in jobs:
        ready = 0
        for stage, cost in enumerate(costs):
            ready = done[stage] = max(ready, done[stage]) + cost
    return done[-1]
