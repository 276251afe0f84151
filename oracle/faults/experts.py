"""The switch between the two experts, done wrong."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from oracle.faults.fault import Fault, Points
from oracle.faults.plant import HERE, around, together
from oracle.faults.scenario import LIVE_DUAL, REQUEST, Run, cached, rerun, topology, twin
from wanref import parts, resolver, schedule
from wanref.caching import residual
from wanref.caching.residual import ResidualStore
from wanref.caching.teacache import LiveRule, TeaCache
from wanref.request import ResolvedRequest
from wanref.stage import Stage

Planted = AbstractContextManager[None]


def _told_all_steps() -> Planted:
    def make(original: Any, maker: Any, begin: Any) -> Any:
        rule = original(maker, begin)
        rule.counts = dict.fromkeys(rule.counts, len(begin.schedule))
        return rule

    return around(TeaCache, "__call__", make)


def _one_state_for_both() -> Planted:
    def as_high(where: Any) -> Any:
        return replace(where, step=replace(where.step, expert="high"))

    def judge(original: Any, rule: Any, call: Any) -> Any:
        where, call.where = call.where, as_high(call.where)
        rule.counts = {"high": 99}
        judgement = original(rule, call)
        call.where = where
        return judgement

    def apply(original: Any, store: Any, where: Any, hidden: Any) -> Any:
        return original(store, as_high(where), hidden)

    return together(
        around(LiveRule, "judge", judge),
        around(ResidualStore, "apply", apply),
        around(residual, "check_provenance", lambda *_: None),
    )


def _boundary_on_the_index() -> Planted:
    def experts(original: Any, request: Any, checkpoint: Any, solver: Any) -> list[str]:
        high = math.floor(request.boundary_ratio * len(solver.timesteps))
        return ["high" if index < high else "low" for index in range(len(solver.timesteps))]

    return around(schedule, "_experts", experts)


def _fallback_to_the_other() -> Planted:
    def load(original: Any, folder: Any, config: Any, blocks: Any, **options: Any) -> Any:
        low = folder.name == "transformer_2" and blocks.start
        return original(folder.with_name("transformer") if low else folder, config, blocks, **options)

    return around(parts, "load_transformer", load)


def _guidance_swapped() -> Planted:
    def guidance(original: Any, request: Any, expert: str) -> Any:
        return original(request, "low" if expert == "high" else "high")

    return around(ResolvedRequest, "guidance", guidance)


def _time_embedding_of_the_other() -> Planted:
    first: list[Any] = []

    def embed(original: Any, stage: Any, *args: Any) -> Any:
        first.append(stage)
        return original(first[0] if HERE.at(rank=1, expert="low") else stage, *args)

    return around(Stage, "time_embedding", embed)


def _second_scale_lost() -> Planted:
    def guidance(original: Any, *args: Any) -> Any:
        return original(*args)[0], 1.0

    return around(resolver, "_guidance", guidance)


DUAL = Run("dual", request=REQUEST)

FAULTS = (
    Fault(
        "expert-told-all-steps",
        "experts",
        "E1: dfs#14025, dfs#14027, xllm#2226",
        "each expert's window is sized by all steps, though it runs a part",
        rerun(cached("pp1cfg1", LIVE_DUAL + ",last=1", "dual")),
        Points("decision", rank=0, step=1, branch="cond"),
        _told_all_steps,
        caught_by="test_cases_caching_arithmetic.py",
    ),
    Fault(
        "expert-one-state-for-both",
        "experts",
        "E2: omni#5223, maxdiffusion#433",
        "the low-noise expert reuses the high-noise expert's residual",
        twin(cached("pp1cfg1", LIVE_DUAL.replace("0.25", "9"), "dual")),
        Points("provenance", rank=0, step=2, branch="cond"),
        _one_state_for_both,
        caught_by="test_cases_caching.py",
    ),
    Fault(
        "expert-boundary-on-the-index",
        "experts",
        "E4: MOVA#32, fv#1370",
        "the boundary is applied to the step's index, not to its timestep",
        rerun(DUAL),
        Points("configuration", step=2),
        _boundary_on_the_index,
        caught_by="test_cases_configuration.py",
    ),
    Fault(
        "expert-fallback-to-the-other",
        "experts",
        "E5: omni#1392, dfs#12024",
        "stage 1 loads the high-noise expert in the low-noise one's place",
        topology("pp2cfg1", "dual"),
        Points("arithmetic", rank=1, step=2, branch="cond", block=3),
        _fallback_to_the_other,
        caught_by="test_topologies.py",
    ),
    Fault(
        "expert-guidance-swapped",
        "experts",
        "E6: wan22 text2video.py vs dfs pipeline_wan.py",
        "the two experts' guidance scales are swapped",
        rerun(replace(DUAL, request=replace(REQUEST, guidance_scale=6.0, guidance_scale_2=2.0))),
        Points("configuration", step=0),
        _guidance_swapped,
        caught_by="test_stock_differences.py",
    ),
    Fault(
        "expert-time-embedding-of-the-other",
        "experts",
        "E2: lx2v#738",
        "one rank embeds the low-noise expert's timesteps by the high-noise expert",
        topology("pp1cfg2", "dual"),
        Points("arithmetic", rank=1, step=2, branch="uncond", block=0),
        _time_embedding_of_the_other,
        caught_by="test_topologies.py",
    ),
    Fault(
        "expert-second-scale-lost",
        "experts",
        "C5: omni#5615, omni#5415",
        "without its own scale the low-noise expert runs at 1, unguided",
        rerun(DUAL),
        Points("configuration"),
        _second_scale_lost,
        caught_by="test_request.py",
    ),
)
