"""Cache-DiT: every option changes the trace, every expert has its own steps, and every decision replays equal."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from suites.cached import MICRO, MICRO_DUAL, groups, hits_and_misses, output_of
from suites.support import defaults, fingerprint, load_engine
from wanref.caching.base import Decision
from wanref.caching.cache_dit import CacheDiT
from wanref.caching.error import CacheError
from wanref.caching.registry import build_cache
from wanref.caching.spec import CacheSpec
from wanref.checkpoint import open_checkpoint
from wanref.observe import Event, StepEvent
from wanref.pipeline import WanReference
from wanref.request import Request
from wanref.topology import Topology

pytestmark = pytest.mark.cpu

REQUEST = Request(prompt="a red circle moving left over dots", steps=16, seed=3, output_type="latent")
BASE = {"fn": 1, "threshold": 0.25, "max_warmup_steps": 4}


@pytest.fixture(scope="module")
def micro() -> WanReference:
    return load_engine(MICRO, defaults=defaults())


@pytest.fixture(scope="module")
def dual() -> WanReference:
    return load_engine(MICRO_DUAL, defaults=defaults())


def spec(forced: bool = False, **options: Any) -> CacheSpec:
    return CacheSpec("cache-dit", options, forced=forced)


def fitted(options: dict[str, Any], steps: int) -> dict[str, Any]:
    """The options, a mask among them as long as the expert's steps."""
    return {**options, "mask": (options["mask"] + "1" * steps)[:steps]} if "mask" in options else options


def trace(decisions: Sequence[Decision]) -> list[tuple[object, ...]]:
    return [
        (d.where.step.index, d.where.branch, d.verdict, d.judgement.reason, d.judgement.signal, d.computed_blocks)
        for d in decisions
    ]


OPTIONS = [
    {"fn": 2},
    {"bn": 1},
    {"threshold": 0.15},
    {"max_warmup_steps": 6},
    {"max_cached_steps": 1},
    {"max_continuous_cached_steps": 1},
    {"mask": "11110110011010"},
    {"mask": "11110110011010", "mask_policy": "static"},
    {"taylorseer_order": 1},
    {"taylorseer_order": 2},
]


def test_every_option_changes_the_trace_and_no_two_alike(micro: WanReference) -> None:
    traces = {}
    for options in ({}, *OPTIONS):
        decisions = output_of(micro, REQUEST, spec(**{**BASE, **fitted(options, 16)})).decisions
        assert min(hits_and_misses(decisions)) > 0, options
        traces[str(options)] = trace(decisions)
    for name, one in traces.items():
        assert [other for other, value in traces.items() if value == one] == [name]


LOW = {"low_fn": 1, "low_threshold": 0.25, "low_max_warmup_steps": 4, "low_max_cached_steps": -1}


def test_every_option_of_the_low_noise_expert_changes_its_trace_alone(dual: WanReference) -> None:
    traces = {}
    steps = dual(REQUEST).schedule.split["low"]
    for options in ({}, *OPTIONS):
        own = {f"low_{name}": value for name, value in fitted(options, steps).items()}
        output = output_of(dual, REQUEST, spec(**{**BASE, **LOW, **own}))
        by_group = groups(output.decisions)
        low = [*by_group["low", "cond", 0], *by_group["low", "uncond", 0]]
        assert min(hits_and_misses(low)) > 0, options
        traces[str(options)] = trace(low)
        high = trace([*by_group["high", "cond", 0], *by_group["high", "uncond", 0]])
        assert traces.setdefault("high", high) == high, "the high-noise expert runs first and knows of none of it"
    for name, one in traces.items():
        assert [other for other, value in traces.items() if value == one] == [name]


def test_the_low_noise_expert_has_defaults_of_its_own_two_warm_up_steps_and_twenty_reuses(dual: WanReference) -> None:
    request = Request(prompt="dots", steps=27, guidance_scale=1, seed=3, boundary_ratio=1.0, output_type="latent")
    decisions = output_of(dual, request, spec(threshold=1, low_threshold=1)).decisions
    assert [d.judgement.reason for d in decisions] == ["warmup"] * 2 + ["threshold"] * 20 + ["cap"] * 5
    assert [d.verdict for d in decisions] == ["compute"] * 2 + ["reuse"] * 20 + ["compute"] * 5
    high = Request(prompt="dots", steps=27, guidance_scale=1, seed=3, boundary_ratio=0.0, output_type="latent")
    decisions = output_of(dual, high, spec(threshold=1, low_threshold=1)).decisions
    assert [d.verdict for d in decisions] == ["compute"] * 8 + ["reuse"] * 19


@pytest.mark.parametrize(
    ("layout", "options", "match"),
    [
        ("single", {"Fn_compute_blocks": 1}, "'Fn_compute_blocks' is not known"),
        ("single", {"warmup_interval": 2}, "'warmup_interval' is not known"),
        ("single", {"max_accumulated_residual_diff_threshold": 1}, "'max_accumulated.*' is not known"),
        ("single", {"enable_separate_cfg": False}, "'enable_separate_cfg' is not known"),
        ("single", {"low_fn": 1}, "'low_fn' is not known"),
        ("high only", {"low_threshold": 1}, "'low_threshold' is not known"),
        ("low only", {"threshold": 1}, "'threshold' is not known"),
        ("single", {"fn": 4}, "fn=4 and bn=0 .high. leave none of this stage's 4 blocks"),
        ("single", {"fn": 2, "bn": 2}, "fn=2 and bn=2 .high. leave none"),
        ("dual", {"low_fn": 3, "low_bn": 1}, "fn=3 and bn=1 .low. leave none"),
        ("single", {"fn": 0}, "fn=0.*is not accepted"),
        ("single", {"bn": -1}, "bn=-1.*is not accepted"),
        ("single", {"mask_policy": "both"}, "mask_policy='both' is not accepted"),
        ("single", {"fn": "1.5"}, "fn='1.5' is not int"),
        ("single", {"threshold": "inf"}, "threshold='inf' is not accepted"),
    ],
)
def test_what_cache_dit_cannot_honour_is_refused_by_name(
    tiny: Callable[..., Path], layout: str, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(CacheError, match=match):
        build_cache(spec(**options), open_checkpoint(tiny(layout=layout)), Topology())


def test_blocks_are_those_of_the_smallest_stage(tiny: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny(blocks=3))
    assert build_cache(spec(fn=1), checkpoint, Topology())
    with pytest.raises(CacheError, match="leave none of this stage's 1 blocks"):
        build_cache(spec(fn=1), checkpoint, Topology(pp=2))


@pytest.mark.parametrize("mask", ["11111", "1111111", "011111", "1x1111"])
def test_a_mask_that_is_not_one_digit_a_step_is_refused(tiny: Callable[..., Path], mask: str) -> None:
    request = Request(prompt="dots", steps=6, seed=1, output_type="latent")
    with pytest.raises(CacheError, match=f"mask='{mask}' .high. is not accepted: give 0 or 1 for each of the 6 steps"):
        output_of(load_engine(tiny(), defaults=defaults()), request, spec(mask=mask))


def test_a_static_mask_stays_while_requests_change_and_is_refused_where_it_does_not_fit(
    tiny: Callable[..., Path],
) -> None:
    """The mask is of the high-noise expert: it fits whatever the other one runs."""
    engine = load_engine(tiny(layout="dual"), defaults=defaults(steps=6))
    mask = "100"
    engine.mount(spec(threshold=1, max_warmup_steps=1, mask=mask, mask_policy="static", low_threshold=0))
    fitting = []
    for steps, shift in ((6, 5.0), (None, 5.0), (7, 4.0), (8, 5.0), (9, 2.5), (6, 5.0), (5, 7.0)):
        request = Request(prompt="dots", steps=steps, flow_shift=shift, seed=1, output_type="latent")
        plain = load_engine(tiny(layout="dual"), defaults=defaults(steps=6))(request)
        split = plain.schedule.split
        if split["high"] != len(mask):
            match = f"mask='{mask}' .high. is not accepted: give 0 or 1 for each of the {split['high']} steps"
            with pytest.raises(CacheError, match=match):
                engine(request)
            continue
        by_group = groups(engine(request).decisions)
        for branch in ("cond", "uncond"):
            verdicts = [d.verdict for d in by_group["high", branch, 0]]
            assert verdicts == ["compute" if digit == "1" else "reuse" for digit in mask], (steps, branch)
        fitting.append(sum(split.values()))
    assert len(set(fitting)) >= 2, fitting
    assert 2 < len(fitting) < 7, fitting


def test_each_expert_is_given_its_own_steps_of_this_request(tiny: Callable[..., Path]) -> None:
    contexts: dict[str, int] = {}

    def look(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step.index == 0:
            assert engine._mounted is not None
            cache = engine._mounted[1]
            assert isinstance(cache, CacheDiT)
            for (expert, _), slot in cache._slots.items():
                contexts[expert] = slot.manager.get_context("blocks").cache_config.num_inference_steps

    engine = load_engine(tiny(layout="dual"), defaults=defaults(), observer=look)
    engine.mount(spec(threshold=1, low_threshold=1, max_warmup_steps=1, low_max_warmup_steps=1))
    splits = []
    for shift, boundary in ((5, 0.875), (12, 0.875), (12, 0.95), (12, None), (12, 0.8), (5, 0.875)):
        contexts.clear()
        request = Request(
            prompt="dots", steps=40, flow_shift=shift, boundary_ratio=boundary, seed=1, output_type="latent"
        )
        output = engine(request)
        splits.append(tuple(output.schedule.split.values()))
        assert contexts == output.schedule.split
        for (expert, _, _), group in groups(output.decisions).items():
            assert len(group) == contexts[expert]
            assert [d.verdict for d in group[:2]] == ["compute", "reuse"], "each expert starts afresh"
    assert splits[:2] == [(17, 23), (26, 14)]
    assert splits[3] == splits[1], "without one, the checkpoint's own"
    assert splits[5] == splits[0]
    assert len({*splits}) == 4


@pytest.mark.parametrize("checkpoint", ["micro", "dual"])
@pytest.mark.parametrize("extra", [{}, {"bn": 1, "fn": 2}, {"taylorseer_order": 1}, {"mask_policy": "static"}])
def test_forced_is_bitwise_native_and_its_shadow_reuses(
    checkpoint: str, extra: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    engine: WanReference = request.getfixturevalue(checkpoint)
    native = engine(REQUEST)
    options = {}
    for expert in engine.checkpoint.experts:
        own = {**BASE, "threshold": 0.4, "max_warmup_steps": 2, **extra}
        if "mask_policy" in extra:
            own["mask"] = "110" + "1" * (native.schedule.split[expert] - 3)
        options.update({f"low_{name}" if expert == "low" else name: value for name, value in own.items()})
    output = output_of(engine, REQUEST, spec(forced=True, **options))
    assert fingerprint(output.latents) == fingerprint(native.latents)
    assert hits_and_misses(output.decisions)[0] == 0
    assert all(d.computed_blocks == 6 for d in output.decisions)
    assert all({d.judgement.verdict for d in g} == {"compute", "reuse"} for g in groups(output.decisions).values())
    cached = output_of(engine, REQUEST, spec(**options))
    assert fingerprint(cached.latents) != fingerprint(native.latents)
