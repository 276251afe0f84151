"""Cache-DiT's decisions: against an independent replay, stock cache-dit and diffusers' FirstBlockCache."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cache_dit
import pytest
import torch
from cache_dit import DBCacheConfig, ParamsModifier, TaylorSeerCalibratorConfig
from cache_dit.caching.cache_blocks import pattern_base
from cache_dit.caching.cache_contexts import cache_manager
from diffusers import FirstBlockCacheConfig, WanPipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.verdict.decisions import DBCacheTerms, replay_dbcache
from suites.cached import MICRO, MICRO_DUAL, groups, hits_and_misses, output_of, rulings, signals
from suites.stock import run_stock, stock_pipeline
from suites.support import defaults, fingerprint, load_engine
from wanref.caching.base import Decision
from wanref.caching.spec import CacheSpec
from wanref.pipeline import WanReference
from wanref.request import Request

pytestmark = pytest.mark.cpu

REQUEST = Request(
    prompt="a red circle moving left over dots", height=32, width=32, frames=5, steps=12, seed=3, output_type="latent"
)
BASE = {"fn": 1, "threshold": 0.25, "max_warmup_steps": 4}


@pytest.fixture(scope="module")
def micro() -> WanReference:
    return load_engine(MICRO, defaults=defaults())


@pytest.fixture(scope="module")
def micro_bf16() -> WanReference:
    return load_engine(MICRO, dtype="bfloat16", defaults=defaults())


def spec(forced: bool = False, **options: Any) -> CacheSpec:
    return CacheSpec("cache-dit", options, forced=forced)


def expert_options(blocks: int, steps: int) -> st.SearchStrategy[dict[str, Any]]:
    masks = st.lists(st.sampled_from("01"), min_size=steps - 1, max_size=steps - 1).map(lambda d: "1" + "".join(d))
    first, last = st.integers(1, 2), st.integers(0, blocks - 3)
    return st.fixed_dictionaries(
        {
            "fn": first,
            "bn": last,
            "threshold": st.sampled_from([0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]),
            "max_warmup_steps": st.integers(0, 4),
            "max_cached_steps": st.sampled_from([-1, 0, 1, 3]),
            "max_continuous_cached_steps": st.sampled_from([-1, 0, 1, 2]),
            "mask": st.just("") | masks,
            "mask_policy": st.sampled_from(["dynamic", "static"]),
            "taylorseer_order": st.sampled_from([0, 0, 1, 2]),
        }
    )


def test_decisions_equal_the_independent_replay_over_all_options(tiny: Callable[..., Path]) -> None:
    engine = load_engine(tiny(layout="dual"), defaults=defaults())
    seen = set()

    @settings(max_examples=40, deadline=None)
    @given(expert_options(4, 5), expert_options(4, 5), st.booleans(), st.sampled_from([(5.0, 1), (1, 5.0), (5.0, 3.0)]))
    def check(high: dict[str, Any], low: dict[str, Any], forced: bool, scales: tuple[float, float]) -> None:
        request = Request(
            prompt="dots",
            steps=10,
            flow_shift=6.0,
            guidance_scale=scales[0],
            guidance_scale_2=scales[1],
            seed=1,
            output_type="latent",
        )
        options = {**high, **{f"low_{name}": value for name, value in low.items()}}
        output = output_of(engine, request, spec(forced=forced, **options))
        assert output.schedule.split == {"high": 5, "low": 5}
        for (expert, branch, _), group in groups(output.decisions).items():
            assert branch == "cond" or scales[expert == "low"] > 1
            own = high if expert == "high" else low
            terms = DBCacheTerms(
                own["threshold"],
                own["max_warmup_steps"],
                own["max_cached_steps"],
                own["max_continuous_cached_steps"],
                tuple(map(int, own["mask"])),
                own["mask_policy"] == "static",
            )
            assert rulings(group) == replay_dbcache(terms, signals(group))
            seen.update((d.judgement.reason, d.judgement.verdict) for d in group)

    check()
    reuses = {("threshold", "reuse"), ("mask", "reuse")}
    computes = {(reason, "compute") for reason in ("first", "warmup", "mask", "cap", "threshold")}
    assert seen == reuses | computes


def test_no_decision_is_shared_over_a_process_group(micro: WanReference, monkeypatch: pytest.MonkeyPatch) -> None:
    def collective(*_: object, **__: object) -> None:
        raise AssertionError("a decision went over a collective")

    # What the library would see in a world of two ranks.
    world = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda *_: 2,
        all_reduce=collective,
        ReduceOp=SimpleNamespace(AVG="avg"),
    )
    monkeypatch.setattr(cache_manager, "dist", world)
    monkeypatch.setattr(pattern_base, "dist", world)
    assert min(hits_and_misses(output_of(micro, REQUEST, spec(**BASE)).decisions)) > 0


# Stock cache-dit, on stock diffusers.


@pytest.fixture
def stock(request: pytest.FixtureRequest) -> Iterator[WanPipeline]:
    """A stock pipeline of a class of its own: cache-dit patches the class."""
    folder, dtype = request.param
    pipe = stock_pipeline(folder, dtype)
    pipe.__class__ = type("WanPipeline", (WanPipeline,), {})
    yield pipe
    cache_dit.disable_cache(pipe)


def config(**options: Any) -> DBCacheConfig:
    names = {"fn": "Fn_compute_blocks", "bn": "Bn_compute_blocks", "threshold": "residual_diff_threshold"}
    plain = {names.get(name, name): value for name, value in options.items() if name != "taylorseer_order"}
    return DBCacheConfig(enable_separate_cfg=True, **plain)


STOCK_OPTIONS = [
    BASE,
    {**BASE, "fn": 2, "bn": 1, "threshold": 0.3},
    {**BASE, "max_cached_steps": 2},
    {**BASE, "max_continuous_cached_steps": 1, "threshold": 0.5},
    {**BASE, "taylorseer_order": 1},
]


def check_statistics(transformer: torch.nn.Module, expert: str, decisions: Sequence[Decision]) -> None:
    """What stock cache-dit says of a transformer, once for the module and once for its blocks, is what we decided."""
    by_group = groups(decisions)
    for stats in cache_dit.summary(transformer, logging=False):
        for branch, steps, diffs in (
            ("cond", stats.cached_steps, stats.residual_diffs),
            ("uncond", stats.cfg_cached_steps, stats.cfg_residual_diffs),
        ):
            group = by_group[expert, branch, 0]
            assert min(hits_and_misses(group)) > 0
            assert [i for i, d in enumerate(group) if d.verdict == "reuse"] == steps
            assert {str(i): change for i, change in enumerate(signals(group)) if change is not None} == diffs


@pytest.mark.parametrize("options", STOCK_OPTIONS)
@pytest.mark.parametrize(
    "stock", [(MICRO, torch.float32), (MICRO, torch.bfloat16)], ids=["fp32", "bf16"], indirect=True
)
def test_equals_stock_cache_dit_in_steps_differences_and_latents(
    micro: WanReference, micro_bf16: WanReference, stock: WanPipeline, options: dict[str, Any]
) -> None:
    engine = micro if stock.transformer.dtype == torch.float32 else micro_bf16
    order = options.get("taylorseer_order", 0)
    calibrator = TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
    cache_dit.enable_cache(stock, cache_config=config(**options), calibrator_config=calibrator)
    theirs = run_stock(stock, REQUEST, engine.checkpoint)
    output = output_of(engine, REQUEST, spec(**options))
    check_statistics(stock.transformer, "high", output.decisions)
    assert fingerprint(output.latents) == fingerprint(theirs.latents[-1])


@pytest.mark.parametrize("stock", [(MICRO_DUAL, torch.float32)], indirect=True)
def test_equals_stock_cache_dit_on_both_experts(stock: WanPipeline) -> None:
    engine = load_engine(MICRO_DUAL, defaults=defaults())
    high = {"fn": 1, "threshold": 0.3, "max_warmup_steps": 1}
    low = {"fn": 2, "threshold": 0.3, "max_warmup_steps": 2, "max_cached_steps": 3}
    cache_dit.enable_cache(
        stock,
        cache_config=config(**high),
        params_modifiers=[ParamsModifier(cache_config=config(**each)) for each in (high, low)],
    )
    theirs = run_stock(stock, REQUEST, engine.checkpoint)
    output = output_of(engine, REQUEST, spec(**high, **{f"low_{name}": value for name, value in low.items()}))
    check_statistics(stock.transformer, "high", output.decisions)
    check_statistics(stock.transformer_2, "low", output.decisions)
    assert fingerprint(output.latents) == fingerprint(theirs.latents[-1])


@pytest.mark.parametrize("threshold", [0.2, 0.25, 0.3])
@pytest.mark.parametrize("stock", [(MICRO, torch.float32)], indirect=True)
def test_equals_diffusers_first_block_cache_with_one_first_block_and_no_warm_up(
    micro: WanReference, stock: WanPipeline, threshold: float
) -> None:
    stock.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    calls = []
    stock.transformer.blocks[-1].attn1.register_forward_hook(lambda *_: calls.append(1))
    theirs = run_stock(stock, REQUEST, micro.checkpoint)
    output = output_of(micro, REQUEST, spec(fn=1, threshold=threshold, max_warmup_steps=0))
    hits, misses = hits_and_misses(output.decisions)
    assert min(hits, misses) > 0
    assert len(calls) == misses
    assert fingerprint(output.latents) == fingerprint(theirs.latents[-1])
