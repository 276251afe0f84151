"""The two branches of guidance, mixed up."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from oracle.faults.fault import Fault, Points
from oracle.faults.plant import HERE, around, together
from oracle.faults.scenario import FIXED, LIVE, REQUEST, Run, Scenario, cached, rerun, topology, twin
from wanref import denoise
from wanref.caching import residual
from wanref.caching.residual import ResidualStore
from wanref.caching.rule import RuleCache
from wanref.caching.teacache import LiveRule
from wanref.exchange import Exchange
from wanref.pipeline import WanReference
from wanref.topology import BRANCHES

Planted = AbstractContextManager[None]


def _slots_by_parity() -> Planted:
    calls: list[int] = []

    def judge(original: Any, rule: Any, call: Any) -> Any:
        where = call.where
        call.where = replace(where, branch=BRANCHES[len(calls) % 2])
        calls.append(1)
        judgement = original(rule, call)
        call.where = where
        return judgement

    return around(LiveRule, "judge", judge)


def _one_slot_for_both() -> Planted:
    def keep(original: Any, store: Any, where: Any, *tensors: Any) -> None:
        original(store, where, *tensors)
        store._kept[where.step.expert, "cond"] = store._kept[where.step.expert, where.branch]

    return together(around(ResidualStore, "keep", keep), around(residual, "check_provenance", lambda *_: None))


def _gather_swapped() -> Planted:
    def gather(original: Any, exchange: Any, *args: Any) -> Any:
        cond, uncond = original(exchange, *args)
        return (uncond, cond) if HERE.at(rank=1, step=2) else (cond, uncond)

    return around(Exchange, "gather_branches", gather)


def _negative_is_the_prompt() -> Planted:
    return around(
        WanReference, "_encode", lambda original, engine, request, texts: original(engine, request, request.prompts)
    )


def _empty_negative_replaced() -> Planted:
    def encode(original: Any, engine: Any, request: Any, texts: Any) -> Any:
        return original(engine, request, tuple(text or "green dots" for text in texts))

    return around(WanReference, "_encode", encode)


def _guidance_from_the_wrong_side() -> Planted:
    def combine(original: Any, job: Any, step: Any, predictions: Any, shape: Any) -> Any:
        if HERE.at(step=3):
            cond, uncond = predictions["cond"], predictions["uncond"]
            return cond + step.guidance_scale * (uncond - cond)
        return original(job, step, predictions, shape)

    return around(denoise, "_combine", combine)


def _another_expression_of_guidance() -> Planted:
    parts: list[Any] = []

    def gather(original: Any, exchange: Any, *args: Any) -> Any:
        parts[:] = original(exchange, *args)
        return tuple(parts)

    def combine(original: Any, job: Any, step: Any, *args: Any) -> Any:
        combined = original(job, step, *args)
        if not HERE.at(rank=1):
            return combined
        return step.guidance_scale * parts[0] + (1 - step.guidance_scale) * parts[1]

    return together(around(Exchange, "gather_branches", gather), around(denoise, "_combine", combine))


def _stages_disagree_on_order() -> Planted:
    def order(original: Any, cache: Any, step: int, branches: Any) -> Any:
        return branches[::-1] if HERE.at(rank=1) else branches

    return around(RuleCache, "order", order)


def _idle_chain_has_no_prediction() -> Planted:
    def share(original: Any, exchange: Any, *args: Any) -> Any:
        shared = original(exchange, *args)
        return torch.zeros_like(shared) if HERE.at(rank=1) else shared

    return around(Exchange, "share_prediction", share)


UNGUIDED = replace(REQUEST, guidance_scale=1.0)
HALF_GUIDED = replace(REQUEST, guidance_scale_2=1.0)
NATIVE = Run(topology="pp2cfg1", request=REQUEST)

FAULTS = (
    Fault(
        "branch-slot-by-call-parity",
        "branches",
        "C1: DiCache#8",
        "slots alternate with each call, though without guidance there is one call a step",
        rerun(cached("pp1cfg1", LIVE, request=UNGUIDED)),
        Points("decision", rank=0, step=1, branch="cond"),
        _slots_by_parity,
        caught_by="test_cases_caching.py",
    ),
    Fault(
        "branch-one-slot-for-both",
        "branches",
        "C2: omni#3756, omni#2860",
        "both branches share one residual: cond reuses what uncond computed",
        twin(cached("pp1cfg1", FIXED)),
        Points("provenance", rank=0, step=2, branch="cond"),
        _one_slot_for_both,
        caught_by="test_cases_caching.py",
    ),
    Fault(
        "branch-gather-swapped",
        "branches",
        "T7: sgl#16532",
        "the uncond chain takes the gathered predictions for each other, at one step",
        topology("pp1cfg2"),
        Points("exchange", rank=1, step=2, branch="cond", block="project"),
        _gather_swapped,
        caught_by="test_topologies.py",
    ),
    Fault(
        "branch-negative-is-the-prompt",
        "branches",
        "C9: mstar#165",
        "the negative branch reads the prompt",
        topology("pp2cfg2"),
        Points("arithmetic", rank=2, step=0, branch="uncond", block=0),
        _negative_is_the_prompt,
        caught_by="test_stock.py",
    ),
    Fault(
        "branch-empty-negative-replaced",
        "branches",
        "C9: wan22 text2video.py",
        "an empty negative prompt is replaced by a default one",
        topology("pp2cfg1"),
        Points("arithmetic", rank=0, step=0, branch="uncond", block=0),
        _empty_negative_replaced,
        caught_by="test_stock.py",
    ),
    Fault(
        "branch-guidance-from-the-wrong-side",
        "branches",
        "E6: wan22 text2video.py vs dfs pipeline_wan.py",
        "guidance is applied from cond towards uncond, at one step",
        topology("pp2cfg1"),
        Points("arithmetic", rank=1, step=3, block="combine"),
        _guidance_from_the_wrong_side,
        caught_by="test_topologies.py",
    ),
    Fault(
        "branch-another-expression-of-guidance",
        "branches",
        "D3: omni#3956",
        "one rank combines by s*c + (1-s)*u, which rounds otherwise: the chains drift apart",
        topology("pp1cfg2"),
        Points("arithmetic", rank=1, step=0, block="combine"),
        _another_expression_of_guidance,
        caught_by="test_topologies.py",
    ),
    Fault(
        "branch-stages-disagree-on-order",
        "branches",
        "C2: omni#3756",
        "stage 1 takes the branches in another order than stage 0 sends them",
        Scenario("forced", NATIVE, replace(NATIVE, cache=FIXED, forced=True)),
        Points("exchange", rank=1, step=0, branch="cond", block=2),
        _stages_disagree_on_order,
        caught_by="test_caching_topologies.py",
    ),
    Fault(
        "branch-idle-chain-has-no-prediction",
        "branches",
        "C8: sgl#23198, trt#16384",
        "where only one expert is guided, the idle chain goes on without the other's prediction",
        topology("pp1cfg2", "dual", request=HALF_GUIDED),
        Points("exchange", rank=1, step=2, branch="cond", block="project"),
        _idle_chain_has_no_prediction,
        caught_by="test_topologies.py",
    ),
)
