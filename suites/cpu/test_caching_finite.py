"""A value that is not finite ends the request at the call where it is first seen, which is named, at any step."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.evidence.ranks import RankPool
from suites.cached import BASE, LAYOUTS, CachedRun, cache_for, check_fired, run_cached, run_mounted
from suites.support import load_engine
from wanref.caching.base import StackCall
from wanref.caching.error import CacheError
from wanref.caching.spec import CacheSpec
from wanref.liveness import RankFailure
from wanref.observe import Event, StepEvent
from wanref.pipeline import WanReference

pytestmark = pytest.mark.cpu

REQUEST = replace(BASE, flow_shift=5.0)  # three steps for each expert
# Among them those under which a step compares nothing: warm-up, masks, caps, thresholds of 0 and 1.
CACHES = {
    "vllm-omni": "teacache:dialect=vllm-omni,coefficients=1/0,threshold=0.2",
    "vllm-omni, late": "teacache:dialect=vllm-omni,coefficients=1/0,threshold=0.2,first=5",
    "cache-dit": "cache-dit:threshold=0.5,max_warmup_steps=1",
    "cache-dit, warm-up": "cache-dit:threshold=0.5,max_warmup_steps=3",
    "cache-dit, static mask": "cache-dit:threshold=0.5,max_warmup_steps=1,mask=100,mask_policy=static",
    "cache-dit, dynamic mask": "cache-dit:threshold=0.5,max_warmup_steps=1,mask=110",
    "cache-dit, cap": "cache-dit:threshold=0.5,max_warmup_steps=1,max_cached_steps=0",
    "cache-dit, 0": "cache-dit:threshold=0,max_warmup_steps=1",
    "cache-dit, 1": "cache-dit:threshold=1,max_warmup_steps=1",
}


def spoil(engine: WanReference, step: int, branch: str, value: float) -> None:
    """One of the hidden values that the cache is given there."""
    assert engine._mounted is not None
    run = engine._mounted[1].run

    def spoiled(call: StackCall) -> Any:
        if (call.where.step.index, call.where.branch) == (step, branch):
            call.hidden = call.hidden.clone()
            call.hidden[0, 3, 5] = value
        return run(call)

    engine._mounted[1].run = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_a_live_rule_names_the_step_branch_and_stage_whatever_the_step(
    tiny: Callable[..., Path], cache: str, forced: bool
) -> None:
    """Steps 0 and 3 are the first of an expert, 2 and 5 the last."""
    engine = load_engine(tiny(layout="dual"))
    for step, expert in enumerate(["high"] * 3 + ["low"] * 3):
        for branch, value in (("cond", float("nan")), ("uncond", float("inf"))):
            engine.mount(cache_for(CACHES[cache], "dual", 1, forced))
            spoil(engine, step, branch, value)
            where = f"at step {step}, {branch}, stage 0, {expert}-noise expert"
            with pytest.raises(CacheError, match=rf"(is nan|is inf|is not finite) {where}"):
                engine(REQUEST)
            engine.unmount()


def spoiled_on_rank(folder: Path, cache: CacheSpec) -> str:
    """For ranks: what the request came to, with a NaN in what stage 1 is given for the negative branch at step 0."""
    engine = load_engine(folder, "pp2cfg1", cache=cache)
    if engine.place.stage == 1:
        spoil(engine, 0, "uncond", float("nan"))
    try:
        engine(REQUEST)
    except RankFailure as failure:
        return str(failure)
    return "nothing"


@pytest.mark.parametrize("cache", ["vllm-omni", "cache-dit"])
def test_every_rank_says_which_stage_it_was(ranks: RankPool, tiny: Callable[..., Path], cache: str) -> None:
    for said in ranks.run(2, spoiled_on_rank, tiny(), cache_for(CACHES[cache], "single", 2)):
        assert re.search("rank 1 failed: CacheError: .* at step 0, uncond, stage 1, high-noise expert", said)


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("signal", ["timestep_embedding", "timestep_projection"])
def test_a_timestep_signal_is_found_before_the_loop_at_any_step(
    tiny: Callable[..., Path], signal: str, layout: str, steps: int
) -> None:
    started: list[Event] = []
    engine = load_engine(tiny(layout=layout), **LAYOUTS[layout])
    request = replace(REQUEST, steps=steps)
    schedule = engine(request).schedule
    engine.observer = lambda event: started.append(event) if isinstance(event, StepEvent) else None
    cache = f"teacache:signal={signal},coefficients=1/0,threshold=0.6"
    for step in schedule:
        stage = engine.stages[step.expert]
        embed = stage.time_embedding

        def spoiled(timestep: torch.Tensor, dtype: torch.dtype, embed: Any = embed, at: float = step.timestep) -> Any:
            found = embed(timestep, dtype)
            return tuple(each * float("nan") for each in found) if float(timestep[0]) == at else found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage, "time_embedding", spoiled)
            engine.mount(cache_for(cache, layout, 1))
            with pytest.raises(CacheError, match=rf"{signal} signal is .*at step {step.index}, .*{step.expert}-noise"):
                engine(request)
            engine.unmount()
    assert started == []


def refused_on_rank(folder: Path) -> tuple[str, list[Event], CachedRun, CachedRun]:
    """For ranks: what was said of a timestep signal that is NaN on stage 1 alone, the steps that ran, and what next."""
    cache = cache_for("teacache:coefficients=1/0,threshold=0.6,first=1", "single", 2)
    engine = load_engine(folder, "pp2cfg1", cache=cache)
    steps: list[Event] = []
    engine.observer = lambda event: steps.append(event) if isinstance(event, StepEvent) else None
    embed = engine.stages["high"].time_embedding
    said = "nothing"
    with pytest.MonkeyPatch.context() as patch:
        if engine.place.stage == 1:
            spoiled = lambda *given: tuple(each * float("nan") for each in embed(*given))  # noqa: E731
            patch.setattr(engine.stages["high"], "time_embedding", spoiled)
        try:
            engine(REQUEST)
        except ValueError as error:
            said = str(error)
    return said, steps, run_mounted(engine, REQUEST), run_cached(load_engine(folder, "pp2cfg1"), REQUEST, cache)


def test_what_one_stage_refuses_is_refused_on_all_before_any_step_and_the_engine_goes_on(
    ranks: RankPool, tiny: Callable[..., Path]
) -> None:
    for rank, (said, steps, after, fresh) in enumerate(ranks.run(2, refused_on_rank, tiny())):
        assert "timestep_projection signal is not finite at step 0" in said
        assert said.startswith("rank 1 refuses the request: ") == (rank == 0)
        assert steps == []
        check_fired([after])
        assert (after.verdicts(), after.run.result) == (fresh.verdicts(), fresh.run.result)
