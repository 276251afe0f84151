"""What an engine logged of its caches, against the schedule that it ran: budgets and branches that do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oracle.evidence.context_line import ContextFacts
from oracle.verdict.finding import Finding, Spot


def check_contexts(
    facts: Sequence[ContextFacts], schedule: Sequence[Mapping[str, Any]], layers: int, chains: int
) -> Iterator[Finding]:
    """Each expert's cache, as logged, against its own steps.

    facts: one an expert in the order in which the experts run, or one for all. schedule: the steps, each with expert
    and guidance_scale. layers: blocks of the stack that is cached. chains: 2 where the branches run on ranks of their
    own, else 1. Raises ValueError where nobody can say which line is which expert's.
    """
    experts = list(dict.fromkeys(str(step["expert"]) for step in schedule))
    if len(facts) not in (1, len(experts)):
        raise ValueError(
            f"{len(facts)} context lines are not accepted for {len(experts)} experts ({', '.join(experts)}): give the "
            "lines of one request, one an expert in the order in which they run, or one for all."
        )
    for index, expert in enumerate(experts):
        steps = [step for step in schedule if step["expert"] == expert]
        each = facts[index] if len(facts) > 1 else facts[0]
        for says in _wrong(each, steps, layers, chains):
            spot = Spot(step=int(steps[0]["index"]), expert=expert)
            yield Finding("configuration", "configuration", spot, f"{each.text}: {says}")


def _wrong(facts: ContextFacts, steps: Sequence[Mapping[str, Any]], layers: int, chains: int) -> Iterator[str]:
    count = len(steps)
    if facts.steps is not None and facts.steps != count:
        yield f"its budget is {facts.steps} steps, and the schedule gives this expert {count}"
    if facts.mask is not None and len(facts.mask) != count:
        yield f"its mask is for {len(facts.mask)} steps, and the schedule gives this expert {count}"
    guided = any(step["guidance_scale"] > 1 for step in steps)
    branches = 2 if guided and chains == 1 else 1
    if facts.separate_cfg is True and branches == 1:
        yield "it counts two branches, and this rank runs one: every other step is taken for the other's"
    if facts.separate_cfg is not True and branches == 2:
        yield "it counts one branch, and this rank runs two: each reuses what is the other's"
    if facts.fn + facts.bn > layers:
        yield f"{facts.fn} + {facts.bn} blocks are always computed, and the stack has {layers}: some would run twice"
    elif facts.fn + facts.bn == layers:
        yield f"all {layers} blocks are always computed: a hit saves no work"
    if facts.mask is None and facts.interval == 1 and facts.warmup >= count:
        yield f"{facts.warmup} steps of warm-up, and the schedule gives this expert {count}: it can never reuse"
    if facts.threshold == 0 and not facts.static:
        yield "its threshold is 0: it can never reuse"
