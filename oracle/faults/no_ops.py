"""Caches that are asked for and do nothing, or nothing of what they say."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from oracle.faults.fault import Fault, Points
from oracle.faults.plant import around
from oracle.faults.scenario import DBCACHE, FIXED, LIVE, REQUEST, Run, Scenario, cached, rerun, twin
from wanref.caching import cache_dit, teacache
from wanref.caching.rule import RuleCache
from wanref.caching.teacache import LiveRule
from wanref.pipeline import WanReference

Planted = AbstractContextManager[None]


def _option_dropped(**values: Any) -> Planted:
    return around(
        cache_dit,
        "_make_slot",
        lambda original, options, *args: original(replace(options, **values), *args),
    )


def _all_warm_up() -> Planted:
    return _option_dropped(max_warmup_steps=99)


def _cap_dropped() -> Planted:
    return _option_dropped(max_continuous_cached_steps=-1)


def _calibrator_dropped() -> Planted:
    def make(original: Any, options: Any, *args: Any) -> Any:
        slot = original(replace(options, taylorseer_order=0), *args)
        slot.options = options
        return slot

    return around(cache_dit, "_make_slot", make)


def _reuse_saves_nothing() -> Planted:
    def run(original: Any, cache: Any, call: Any) -> Any:
        tap, call.tap = call.tap, None
        call.compute()
        call.tap = tap
        return original(cache, call)

    return around(RuleCache, "run", run)


def _mount_does_nothing() -> Planted:
    return around(WanReference, "mount", lambda *_: None)


def _change_swallowed() -> Planted:
    return around(teacache, "_relative_change", lambda *_: torch.zeros(()))


def _signal_from_time_alone() -> Planted:
    def judge(original: Any, rule: Any, call: Any) -> Any:
        hidden, call.hidden = call.hidden, torch.zeros_like(call.hidden)
        judgement = original(rule, call)
        call.hidden = hidden
        return judgement

    return around(LiveRule, "judge", judge)


NATIVE = Run(request=REQUEST)

FAULTS = (
    Fault(
        "no-op-context-all-warm-up",
        "no-ops",
        "P1: omni#7335, sgl#16490",
        "Cache-DiT's context does not know the request's steps: all count as warm-up, and it never hits",
        twin(cached("pp1cfg1", DBCACHE)),
        Points("missing evidence"),
        _all_warm_up,
        caught_by="test_cache_dit.py",
    ),
    Fault(
        "no-op-cap-dropped",
        "no-ops",
        "P3: omni#4632, omni#4667",
        "a cap on successive hits is accepted and dropped",
        rerun(cached("pp1cfg1", "cache-dit:threshold=5,max_warmup_steps=1,max_continuous_cached_steps=1")),
        Points("decision", rank=0, step=2, branch="cond"),
        _cap_dropped,
        caught_by="test_cache_dit_replay.py",
    ),
    Fault(
        "no-op-calibrator-dropped",
        "no-ops",
        "P3: omni#4667, Teacache-xDiT#3",
        "the calibrator's config is not passed on: plain reuse in its place",
        rerun(cached("pp1cfg1", "cache-dit:max_warmup_steps=4,mask=111101,mask_policy=static,taylorseer_order=1")),
        Points("configuration", rank=0),
        _calibrator_dropped,
        caught_by="test_cache_dit.py",
    ),
    Fault(
        "no-op-reuse-saves-nothing",
        "no-ops",
        "P4: omni#5840, mold#939",
        "a reuse computes all blocks and throws them away",
        twin(cached("pp1cfg1", FIXED)),
        Points("missing evidence", rank=0, step=0, branch="cond"),
        _reuse_saves_nothing,
        caught_by="test_caching_topologies.py",
    ),
    Fault(
        "no-op-mount",
        "no-ops",
        "P3: Teacache-xDiT#3",
        "the cache is mounted on something that is never called: a forced run proves nothing",
        Scenario("forced", NATIVE, replace(NATIVE, cache=LIVE, forced=True)),
        Points("missing evidence"),
        _mount_does_nothing,
        caught_by="test_caching_lifecycle.py",
    ),
    Fault(
        "no-op-change-swallowed",
        "no-ops",
        "P5: trt#11868",
        "the extractor of the signal fails, and the failure reads as no change",
        rerun(cached("pp1cfg1", LIVE)),
        Points("decision", rank=0, step=1, branch="cond"),
        _change_swallowed,
        caught_by="test_cases_caching_arithmetic.py",
    ),
    Fault(
        "no-op-signal-from-time-alone",
        "no-ops",
        "P5: omni#2682",
        "the signal does not depend on the hidden states",
        rerun(cached("pp1cfg1", LIVE)),
        Points("decision", rank=0, step=1, branch="cond"),
        _signal_from_time_alone,
        caught_by="test_teacache_engine.py",
    ),
)
