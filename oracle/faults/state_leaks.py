"""State of one request that is still there in the next one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from oracle.faults.fault import Fault, Points
from oracle.faults.plant import around, together
from oracle.faults.scenario import FIXED, LIVE, OTHER, REQUEST, Past, Run, cached, used
from oracle.verdict.finding import Cause
from wanref import pipeline
from wanref.caching import residual
from wanref.caching.rule import RuleCache
from wanref.caching.teacache import LiveRule, TeaCache
from wanref.pipeline import WanReference
from wanref.stage import Stage

Planted = AbstractContextManager[None]


def _left_over(wanted: Any, carry: Any) -> Planted:
    """At a request's end the cache's rule and store are put aside; `carry(cache, rule, store)` brings some back."""
    kept: dict[int, Any] = {}

    def end(original: Any, cache: Any) -> None:
        if cache._rule is not None:
            kept[id(cache)] = cache._rule, cache._store
        original(cache)

    def begin(original: Any, cache: Any, begin: Any) -> None:
        original(cache, begin)
        if id(cache) in kept and wanted(begin.place):
            carry(cache, *kept[id(cache)])

    return together(around(RuleCache, "end", end), around(RuleCache, "begin", begin))


def _uncond_not_reset() -> Planted:
    def carry(cache: Any, rule: Any, store: Any) -> None:
        cache._rule.states.update(rule.states)
        cache._store._kept.update(store._kept)

    return together(
        _left_over(lambda place: place.chain == 1, carry), around(residual, "check_provenance", lambda *_: None)
    )


def _position_not_reset() -> Planted:
    def carry(cache: Any, rule: Any, store: Any) -> None:
        for key, state in rule.states.items():
            cache._rule.states[key] = type(state)(position=state.position)

    return _left_over(lambda place: place.stage == 1, carry)


def _sized_by_first_request() -> Planted:
    first: list[Any] = []

    def make(original: Any, maker: Any, begin: Any) -> LiveRule:
        rule: LiveRule = original(maker, begin)
        first.append(rule.counts)
        rule.counts = first[0]
        return rule

    return around(TeaCache, "__call__", make)


def _rotary_of_first_request() -> Planted:
    first: dict[int, Any] = {}
    return around(
        Stage, "prepare_rotary", lambda original, stage, latents: first.setdefault(id(stage), original(stage, latents))
    )


def _prompt_of_first_request() -> Planted:
    first: list[Any] = []

    def encode(original: Any, engine: Any, request: Any, texts: Any) -> Any:
        embeds = original(engine, request, texts)
        if texts != request.prompts:
            return embeds
        first.append(embeds)
        return first[0]

    return around(WanReference, "_encode", encode)


def _abort_not_cleared() -> Planted:
    def build(original: Any, engine: Any, *args: Any) -> None:
        original(engine, *args)
        engine._abort.clear = lambda: None

    return around(WanReference, "__init__", build)


def _solver_history() -> Planted:
    solvers: list[Any] = []

    def make(original: Any, *args: Any) -> Any:
        solver = original(*args)
        if solvers:
            solver.model_outputs = list(solvers[-1].model_outputs)
            solver.last_sample, solver.this_order = solvers[-1].last_sample, solvers[-1].this_order
            solver.lower_order_nums = solvers[-1].lower_order_nums
        solvers.append(solver)
        return solver

    return around(pipeline, "make_solver", make)


def _second_mount_does_nothing() -> Planted:
    mounted: list[Any] = []

    def mount(original: Any, engine: Any, cache: Any) -> None:
        if not mounted:
            original(engine, cache)
        mounted.append(cache)

    return around(WanReference, "mount", mount)


def _residuals_outlive_the_request() -> Planted:
    return around(RuleCache, "end", lambda original, cache: None)


LEFT: Cause = "state left over"
WIDE, TALL = (replace(r, height=h, width=w) for r, h, w in ((OTHER, 32, 64), (REQUEST, 64, 32)))

FAULTS = (
    Fault(
        "leak-uncond-rank-never-resets",
        "state leaks",
        "L2: sgl#35054, sgl#35136",
        "a rank that only ever runs the negative branch keeps its signal, counters and residual",
        used(cached("pp1cfg2", LIVE), Past(OTHER)),
        Points(LEFT, rank=1, step=0, branch="uncond"),
        _uncond_not_reset,
        caught_by="test_cases_caching.py",
    ),
    Fault(
        "leak-reset-forgets-a-counter",
        "state leaks",
        "L6: omni#1287, MagCache-Comfy#19",
        "the reset of stage 1 forgets the position in the schedule",
        used(cached("pp2cfg1", LIVE + ",first=3"), Past(OTHER)),
        Points(LEFT, rank=1, step=1, branch="cond"),
        _position_not_reset,
        caught_by="test_caching_lifecycle.py",
    ),
    Fault(
        "leak-step-count-of-first-request",
        "state leaks",
        "L3: omni#2194, omni#2240, cdit#540",
        "the cache stays sized by the step count of the engine's first request",
        used(cached("pp1cfg1", LIVE + ",last=1"), Past(replace(OTHER, steps=4))),
        Points(LEFT, rank=0, step=3, branch="cond"),
        _sized_by_first_request,
        caught_by="test_cases_caching_arithmetic.py",
    ),
    Fault(
        "leak-rotary-of-another-size",
        "state leaks",
        "L4: sgl#17140",
        "rotary tables are kept from a request of another size with as many tokens",
        used(Run(request=TALL), Past(WIDE)),
        Points(LEFT, rank=0, step=0, branch="cond", block=0),
        _rotary_of_first_request,
        caught_by="test_sequences.py",
    ),
    Fault(
        "leak-prompt-of-aborted-request",
        "state leaks",
        "L7: omni#3167, omni#1156",
        "what an aborted request encoded serves the next one",
        used(Run(topology="pp2cfg1", request=REQUEST), Past(OTHER, "aborted")),
        Points(LEFT, rank=0, step=0, branch="cond", block=0),
        _prompt_of_first_request,
        caught_by="test_sequences.py",
    ),
    Fault(
        "leak-abort-flag",
        "state leaks",
        "L7: omni#1769, comfy#10308",
        "the abort flag is not cleared: the next request aborts, too",
        used(Run(request=REQUEST), Past(OTHER, "aborted")),
        Points("missing evidence", rank=0, step=0, branch="cond", block="embed"),
        _abort_not_cleared,
        caught_by="test_sequences.py",
    ),
    Fault(
        "leak-solver-history",
        "state leaks",
        "L9: sgl#23716, omni#6324",
        "a multistep solver goes on from the previous request's predictions",
        used(Run(request=REQUEST), Past(OTHER)),
        # The first step has no earlier sigma to take the old prediction from: the second is the first that it changes.
        Points(LEFT, rank=0, step=1, block="scheduler"),
        _solver_history,
        caught_by="test_sequences.py",
    ),
    Fault(
        "leak-second-mount-is-a-no-op",
        "state leaks",
        "L8: dfs#14037, dfs#14093",
        "a cache that is mounted again after an uncached run is silently not there",
        used(cached("pp1cfg1", LIVE), Past(OTHER, "unmounted")),
        Points("configuration"),
        _second_mount_does_nothing,
        caught_by="test_cases_caching.py",
    ),
    Fault(
        "leak-residuals-outlive-the-request",
        "state leaks",
        "L7: omni#7844, omni#1156",
        "the cache is not emptied when a request ends: its residuals stay in memory",
        used(cached("pp1cfg1", FIXED), Past(OTHER)),
        Points(LEFT, rank=0),
        _residuals_outlive_the_request,
        caught_by="test_caching_lifecycle.py",
    ),
)
