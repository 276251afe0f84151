"""Public bug reports on caches: state between requests, branches, experts, ranks, dtypes. Named after their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oracle.evidence.ranks import RankPool
from suites.cached import BASE, CachedRun, check_fired, key_of, run_all, run_cached, run_mounted
from suites.support import defaults, load_engine
from wanref.caching.base import BlockCache, Decision
from wanref.caching.error import CacheError
from wanref.caching.spec import CacheSpec, parse_cache
from wanref.pipeline import WanReference
from wanref.request import Request

pytestmark = pytest.mark.cpu

LIVE = "teacache:dialect=vllm-omni,coefficients=1/0,coefficients_low=1/0,threshold=0.2"
DIT = "cache-dit:threshold=0.5,max_warmup_steps=1,low_threshold=0.5,low_max_warmup_steps=1"
BOTH = pytest.mark.parametrize("cache", [LIVE, DIT])
MASK = "cache-dit:threshold=0.5,max_warmup_steps=1,mask=100110,mask_policy=static"


@pytest.fixture(scope="module")
def dual(tiny: Callable[..., Path]) -> Path:
    return tiny(layout="dual")


def fresh(folder: Path, request: Request, cache: str) -> CachedRun:
    return run_cached(load_engine(folder), request, cache)


def same(one: CachedRun, other: CachedRun) -> bool:
    return one.run.tensors == other.run.tensors and one.verdicts() == other.verdicts()


def verdicts_of(run: CachedRun, branch: str, expert: str | None = None) -> list[str]:
    found = [d for d in run.decisions if d.where.branch == branch and expert in (None, d.where.step.expert)]
    return [d.verdict for d in found]


# L: state between requests.


def two_requests(folder: Path, cache: CacheSpec) -> list[CachedRun]:
    """For ranks: A, B with other prompts, and B on a new engine."""
    a, b = BASE, replace(BASE, prompt="a blue circle", negative_prompt="dots")
    engine = load_engine(folder, "pp1cfg2", cache=cache)
    outputs = [engine(a), engine(b)]
    assert outputs[1].decisions[0].origins == ()
    return [CachedRun(None, outputs[1].decisions), run_cached(load_engine(folder, "pp1cfg2"), b, cache)]  # type: ignore[arg-type]


@BOTH
def test_L2_a_rank_that_runs_only_the_negative_branch_starts_each_request_anew(
    ranks: RankPool, dual: Path, cache: str
) -> None:
    """sglang#35054, #35136."""
    for rank, (second, alone) in enumerate(ranks.run(2, two_requests, dual, parse_cache(cache))):
        check_fired([second])
        assert {d.where.branch for d in second.decisions} == {("cond", "uncond")[rank]}
        assert (second.decisions[0].verdict, second.decisions[0].judgement.accumulated_before) == ("compute", 0.0)
        assert second.verdicts() == alone.verdicts()


def test_L3_each_request_has_its_own_step_count_and_the_same_mask(tiny: Callable[..., Path]) -> None:
    """vllm-omni#2194, #2240, cache-dit#540, #542, sglang#29631. The default step count is the engine's."""
    for cache, counts in ((DIT.split(",low")[0], (8, None, 4)), (MASK, (6, None, 6))):
        engine = load_engine(tiny(), defaults=defaults(steps=6), cache=cache)
        for steps in counts:
            ran = run_mounted(engine, replace(BASE, steps=steps))
            check_fired([ran])
            assert len(ran.decisions) == 2 * (steps or 6)
            assert same(ran, fresh(tiny(), replace(BASE, steps=steps or 6), cache))
            if cache == MASK:
                expected = ["compute" if digit == "1" else "reuse" for digit in "100110"]
                assert verdicts_of(ran, "cond") == verdicts_of(ran, "uncond") == expected


@BOTH
def test_L4_another_size_and_frame_count_is_as_on_a_fresh_engine(dual: Path, cache: str) -> None:
    """sglang#17140."""
    engine = load_engine(dual, cache=cache)
    for request in (BASE, replace(BASE, width=48), replace(BASE, frames=5), replace(BASE, frames=9), BASE):
        ran = run_mounted(engine, request)
        check_fired([ran])
        assert same(ran, fresh(dual, request, cache))


def mounted(engine: WanReference) -> BlockCache:
    assert engine._mounted is not None
    return engine._mounted[1]


def state(value: Any) -> Any:
    """What an object holds, deep; tensors and modules by their type alone."""
    if isinstance(value, dict):
        return {str(key): state(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [state(each) for each in value]
    if hasattr(value, "__dict__") and type(value).__module__.startswith("wanref.caching"):
        return {name: state(each) for name, each in vars(value).items()}
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__


@BOTH
@pytest.mark.parametrize("forced", [False, True])
def test_L6_after_end_every_field_of_a_cache_is_that_of_a_new_one(dual: Path, cache: str, forced: bool) -> None:
    """vllm-omni#1287, MagCache-Comfy#19. No list of fields to reset: begin makes them, end drops them."""
    used, new = (load_engine(dual, cache=parse_cache(cache, forced)) for _ in range(2))
    during: list[Any] = []
    used.observer = lambda event: during.append(state(mounted(used))) if isinstance(event, Decision) else None
    check_fired([CachedRun(None, used(BASE).decisions)])  # type: ignore[arg-type]
    assert during[-1] != state(mounted(new))
    assert state(mounted(used)) == state(mounted(new))


@BOTH
def test_L8_off_on_off_is_native_cached_native(dual: Path, cache: str) -> None:
    """diffusers#14037, #14093, #12012, #12013."""
    engine = load_engine(dual)
    off, on, again = (run_cached(engine, BASE, each) for each in (None, cache, None))
    check_fired([on])
    assert same(on, fresh(dual, BASE, cache))
    assert again.run.tensors == off.run.tensors
    assert on.run.latents != off.run.latents


# C: branches.


@BOTH
def test_C1_without_guidance_there_is_one_slot_and_each_step_follows_the_last(
    tiny: Callable[..., Path], cache: str
) -> None:
    """DiCache#8. Two slots would compare step i with i - 2, and the second call would find nothing to compare with."""
    cache = cache.split(",low")[0].replace(",coefficients_low=1/0", "")
    ran = fresh(tiny(), replace(BASE, guidance_scale=1.0), cache)
    check_fired([ran])
    assert [key_of(d)[::2] for d in ran.decisions] == [(step, "cond") for step in range(6)]
    assert [d.judgement.signal is None for d in ran.decisions] == [True] + [False] * 5
    computed = [d.where.step.index for d in ran.decisions if d.verdict == "compute"]
    for decision in ran.decisions:
        if decision.verdict == "reuse":
            step = decision.where.step.index
            assert [o.step for o in decision.origins] == [max(each for each in computed if each < step)]


@BOTH
def test_C2_no_branch_consumes_the_others_residual(dual: Path, cache: str) -> None:
    """vllm-omni#3756, #2860. There is no flag to set wrongly: a branch is what the call says it is."""
    ran = fresh(dual, BASE, cache)
    check_fired([ran])
    for decision in ran.decisions:
        assert {o.branch for o in decision.origins} <= {decision.where.branch}
    with pytest.raises(CacheError, match="option 'separate_cfg' is not known"):
        load_engine(dual, cache="cache-dit:separate_cfg=0")


# E: experts.


@pytest.mark.parametrize("steps", [6, 8])
def test_E1_each_expert_counts_its_own_steps_and_warms_up_as_declared(dual: Path, steps: int) -> None:
    """diffusers#14025, #14027, xllm#2226, cache-dit#210."""
    cache = DIT.replace("max_warmup_steps=1", "max_warmup_steps=2", 1)
    ran = fresh(dual, replace(BASE, steps=steps, flow_shift=5.0), cache)
    check_fired([ran])
    for branch in ("cond", "uncond"):
        high, low = verdicts_of(ran, branch, "high"), verdicts_of(ran, branch, "low")
        assert len(high) + len(low) == steps
        assert high == ["compute"] * 2 + ["reuse"] * (len(high) - 2)
        assert low == ["compute"] + ["reuse"] * (len(low) - 1)


@pytest.mark.parametrize("cache", [LIVE.replace("=0.2", "=1e9"), DIT.replace("=0.5", "=9.0")])
def test_E2_the_first_forward_of_each_branch_of_each_expert_is_a_miss(dual: Path, cache: str) -> None:
    """vllm-omni#5223, maxdiffusion#433, LightX2V#738. Though the threshold lets everything else hit."""
    engine = load_engine(dual)
    run_cached(engine, BASE, cache)
    engine.mount(cache)
    decisions = engine(BASE).decisions
    check_fired([CachedRun(None, decisions)])  # type: ignore[arg-type]
    seen: set[tuple[str, str]] = set()
    for d in decisions:
        where = d.where.step.expert, d.where.branch
        assert d.verdict == ("reuse" if where in seen else "compute"), d
        assert {(o.request, o.expert, o.branch) for o in d.origins} <= {(1, *where)}
        seen.add(where)
    assert len(seen) == 4


# T: ranks that disagree.


@BOTH
def test_T1_ranks_may_decide_otherwise_at_one_step_and_nothing_hangs(
    ranks: RankPool, tiny: Callable[..., Path], cache: str
) -> None:
    """vllm-omni#6228, #6180, DiCache#8, sglang#35623. Stages hold their own residuals, so each decides for itself."""
    cache = cache.split(",low")[0].replace(",coefficients_low=1/0", "")
    place = tiny(), "pp2cfg1", "float32", "single"
    reusing = [ran for (ran,) in ranks.run(2, run_all, *place, [(BASE, parse_cache(cache))])]
    assert [verdicts_of(ran, "cond")[1] for ran in reusing] == ["reuse", "reuse"]
    changes = [ran.decisions[2].judgement.signal for ran in reusing]  # of cond at its second step
    between = f"threshold={sum(changes) / 2}"
    spec = parse_cache(cache.replace("threshold=0.2", between).replace("threshold=0.5", between))
    runs = [ran for (ran,) in ranks.run(4, run_all, place[0], "pp2cfg2", *place[2:], [(BASE, spec)])]
    check_fired(runs)
    low, high = (0, 1) if changes[0] < changes[1] else (1, 0)
    assert (verdicts_of(runs[low], "cond")[1], verdicts_of(runs[high], "cond")[1]) == ("reuse", "compute")
    assert len({ran.run.latents for ran in runs}) == 1


# D: dtypes.


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_D3_a_hit_returns_the_dtype_and_shape_of_a_miss(
    dual: Path, monkeypatch: pytest.MonkeyPatch, cache: str, dtype: str
) -> None:
    """vllm-omni#3956, TensorRT-LLM#11964. The check before each exchange is in test_topologies."""
    engine = load_engine(dual, dtype=dtype, cache=cache)
    run, seen = mounted(engine).run, []

    def noting(call: Any) -> Any:
        output, decision = run(call)
        seen.append((decision.verdict, str(output.dtype), output.shape == call.hidden.shape))
        return output, decision

    monkeypatch.setattr(mounted(engine), "run", noting)
    engine(BASE)
    assert set(seen) == {(verdict, f"torch.{dtype}", True) for verdict in ("compute", "reuse")}
