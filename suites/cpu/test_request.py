"""`resolve`: every effective value and what decided it; whatever cannot be honoured is an error that says what can."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wanref import Checkpoint, EngineDefaults, Request, ResolvedRequest, open_checkpoint, resolve
from wanref.checkpoint import Size
from wanref.flow_shift import parse_flow_shift_by_steps

pytestmark = pytest.mark.cpu

NAN, INF = float("nan"), float("inf")
SINGLE, DUAL = "single", "dual"
Values = Mapping[str, Any]


@pytest.fixture(scope="module")
def opened(tiny: Callable[..., Path]) -> dict[str, Checkpoint]:
    """By layout: flow shift 3, boundary 0.9 where there is one, 32 x 32 x 5."""
    return {layout: open_checkpoint(tiny(layout=layout, boundary_ratio=0.9)) for layout in (SINGLE, DUAL, "low only")}


def decide(checkpoint: Checkpoint, request: Values, engine: Values) -> ResolvedRequest:
    return resolve(Request(**{"prompt": "a", **request}), EngineDefaults(**engine), checkpoint)


# Precedence.

BOUNDARIES = [
    (DUAL, {"boundary_ratio": 0.7}, {"boundary_ratio": 0.5}, 0.5, "engine"),
    (DUAL, {"boundary_ratio": 0.7}, {"boundary_ratio": 0}, 0.0, "engine"),
    (DUAL, {"boundary_ratio": 0.7}, {}, 0.7, "request"),
    (DUAL, {"boundary_ratio": 0}, {}, 0.0, "request"),
    (DUAL, {}, {}, 0.9, "checkpoint"),
]
FLOW_SHIFTS = [
    (SINGLE, {"flow_shift": 7}, {"flow_shift": 11, "flow_shift_by_steps": {50: 9}}, 7.0, "request"),
    (SINGLE, {}, {"flow_shift": 11, "flow_shift_by_steps": {50: 9}}, 9.0, "engine"),
    (SINGLE, {"steps": 8}, {"flow_shift": 11, "flow_shift_by_steps": "50:9, 8:6"}, 6.0, "engine"),
    (SINGLE, {}, {"flow_shift": 11}, 11.0, "engine"),
    (SINGLE, {}, {}, 3.0, "checkpoint"),
]
GUIDANCE = [
    (DUAL, {"guidance_scale": 0}, {"guidance_scale": 6}, 0.0, "request"),
    (DUAL, {"guidance_scale": 1}, {"guidance_scale": 6}, 1.0, "request"),
    (DUAL, {"guidance_scale_2": 2}, {"guidance_scale": 6}, 6.0, "engine"),
    (DUAL, {}, {}, 5.0, "engine"),
]
GUIDANCE_2 = [
    (DUAL, {"guidance_scale_2": 0, "guidance_scale": 4}, {"guidance_scale_2": 3}, 0.0, "request"),
    (DUAL, {"guidance_scale_2": 1}, {}, 1.0, "request"),
    (DUAL, {"guidance_scale": 4}, {"guidance_scale_2": 3}, 3.0, "engine"),
    (DUAL, {"guidance_scale": 4}, {"guidance_scale_2": 0}, 0.0, "engine"),
    (DUAL, {"guidance_scale": 4}, {"guidance_scale": 6}, 4.0, "request"),
    (DUAL, {}, {"guidance_scale": 6}, 6.0, "engine"),
]
OTHERS = [
    ("steps", SINGLE, {"steps": 8}, {"steps": 20}, 8, "request"),
    ("steps", SINGLE, {}, {"steps": 20}, 20, "engine"),
    ("steps", SINGLE, {}, {}, 50, "engine"),
    ("scheduler", SINGLE, {"scheduler": "euler"}, {"scheduler": "dpm++"}, "euler", "request"),
    ("scheduler", SINGLE, {}, {"scheduler": "dpm++"}, "dpm++", "engine"),
    ("scheduler", SINGLE, {}, {}, "unipc", "checkpoint"),
    ("max_sequence_length", SINGLE, {"max_sequence_length": 64}, {"max_sequence_length": 128}, 64, "request"),
    ("max_sequence_length", SINGLE, {}, {"max_sequence_length": 128}, 128, "engine"),
    ("max_sequence_length", SINGLE, {}, {}, 512, "engine"),
    *(("boundary_ratio", *row) for row in BOUNDARIES),
    *(("flow_shift", *row) for row in FLOW_SHIFTS),
    *(("guidance_scale", *row) for row in GUIDANCE),
    *(("guidance_scale_2", *row) for row in GUIDANCE_2),
]


@pytest.mark.parametrize(("option", "layout", "request_", "engine", "value", "source"), OTHERS)
def test_the_first_in_order_of_precedence_decides_and_is_recorded(
    opened: dict[str, Checkpoint],
    option: str,
    layout: str,
    request_: Values,
    engine: Values,
    value: object,
    source: str,
) -> None:
    resolved = decide(opened[layout], request_, engine)
    assert (getattr(resolved, option), resolved.sources[option]) == (value, source)
    assert type(getattr(resolved, option)) is type(value)


@pytest.mark.parametrize("layout", [DUAL, "low only"])
def test_a_checkpoint_that_names_no_boundary_gets_0_875(opened: dict[str, Checkpoint], layout: str) -> None:
    resolved = decide(replace(opened[layout], boundary_ratio=None), {}, {})
    assert (resolved.boundary_ratio, resolved.sources["boundary_ratio"]) == (0.875, "default")


def test_a_scheduler_config_that_names_no_shift_gets_1(opened: dict[str, Checkpoint]) -> None:
    unnamed = {key: value for key, value in opened[SINGLE].scheduler.items() if key not in ("flow_shift", "shift")}
    resolved = decide(replace(opened[SINGLE], scheduler=unnamed), {}, {})
    assert (resolved.flow_shift, resolved.sources["flow_shift"]) == (1.0, "default")


@pytest.mark.parametrize(
    ("option", "asked", "engine", "own", "fallback"),
    [("height", 64, 80, 32, 480), ("width", 64, 80, 32, 832), ("frames", 9, 13, 5, 81)],
)
def test_size_is_the_requests_then_the_engines_then_the_checkpoints_then_diffusers(
    opened: dict[str, Checkpoint], option: str, asked: int, engine: int, own: int, fallback: int
) -> None:
    sized, unsized = opened[SINGLE], replace(opened[SINGLE], size=None)
    assert sized.size == Size(height=32, width=32, frames=5)
    resolutions = [
        (decide(sized, {option: asked}, {option: engine}), asked, "request"),
        (decide(sized, {}, {option: engine}), engine, "engine"),
        (decide(sized, {}, {}), own, "checkpoint"),
        (decide(unsized, {}, {}), fallback, "default"),
    ]
    for resolved, value, source in resolutions:
        assert (getattr(resolved, option), resolved.sources[option]) == (value, source)


@pytest.mark.parametrize(
    ("asked", "forced", "overridden"),
    [(0.7, 0.5, ("boundary_ratio",)), (0.5, 0.5, ()), (None, 0.5, ()), (0.7, None, ())],
)
def test_a_boundary_over_which_the_engine_wins_is_reported(
    opened: dict[str, Checkpoint], asked: float | None, forced: float | None, overridden: tuple[str, ...]
) -> None:
    resolved = decide(opened[DUAL], {"boundary_ratio": asked}, {"boundary_ratio": forced})
    assert resolved.overridden == overridden


def test_every_value_that_more_than_the_request_can_decide_has_a_source(opened: dict[str, Checkpoint]) -> None:
    from_elsewhere = {f.name for f in fields(EngineDefaults)} - {"flow_shift_by_steps"} | {"seed", "negative_prompt"}
    assert decide(opened[DUAL], {}, {}).sources.keys() == from_elsewhere
    single = decide(opened[SINGLE], {}, {})
    assert single.sources.keys() == from_elsewhere - {"boundary_ratio", "guidance_scale_2"}
    assert single.boundary_ratio is None
    assert single.guidance_scale_2 is None
    assert single.guidance("high") == 5.0


@pytest.mark.parametrize(("negative", "source"), [(None, "absent"), ("", "empty"), (["", ""], "empty"), ("x", "text")])
def test_absent_empty_and_given_negative_prompts_are_told_apart(
    opened: dict[str, Checkpoint], negative: str | list[str] | None, source: str
) -> None:
    resolved = decide(opened[SINGLE], {"prompt": ["a", "b"], "negative_prompt": negative}, {})
    assert resolved.sources["negative_prompt"] == source
    assert resolved.negative_prompts == (("x", "x") if source == "text" else ("", ""))


def test_seeds_and_generators_are_taken_whole_or_one_a_video(opened: dict[str, Checkpoint]) -> None:
    def noise(**values: Any) -> list[tuple[int, Any]]:
        resolved = decide(opened[SINGLE], {"prompt": ["a", "b"], "videos_per_prompt": 2, **values}, {})
        return [(n.videos, n.seed if n.generator is None else n.generator) for n in resolved.noise]

    generators = [torch.Generator() for _ in range(4)]
    assert noise() == [(4, None)]
    assert noise(seed=0) == [(4, 0)]
    assert noise(seed=[4, 3, 2, 1]) == [(1, 4), (1, 3), (1, 2), (1, 1)]
    assert noise(generator=generators[0]) == [(4, generators[0])]
    assert noise(generator=generators) == [(1, generator) for generator in generators]


# Step counts bound to flow shifts.


@pytest.mark.parametrize("asked", [{"steps": 20}, {"steps": 20, "flow_shift": 12.0}])
def test_a_mapped_engine_refuses_an_unmapped_step_count_whoever_names_the_shift(
    opened: dict[str, Checkpoint], asked: Values
) -> None:
    with pytest.raises(ValueError, match=r"steps=20 .*not in this engine's flow_shift_by_steps: give one of 27, 40\."):
        decide(opened[SINGLE], asked, {"steps": 27, "flow_shift_by_steps": "40:5,27:12"})


def test_a_mapped_engine_must_map_its_own_default_step_count() -> None:
    with pytest.raises(ValueError, match=r"steps=50 \(its own default\) .* give one of 27, 40\."):
        EngineDefaults(flow_shift_by_steps={27: 12.0, 40: 5.0})


def test_text_and_mapping_give_the_same_map_which_the_caller_no_longer_holds() -> None:
    mapping = {27: 12, 50: 5.5}
    defaults = EngineDefaults(flow_shift_by_steps=mapping)
    assert EngineDefaults(flow_shift_by_steps=" 27:12, 50 : 5.5") == defaults
    mapping[50] = 1
    assert defaults.shift_map == {27: 12.0, 50: 5.5}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        *(("27:12,27:5", "27 steps are given twice"), ("27:12,27:12", "27 steps are given twice")),
        *(("0:5", "step count 0 "), ("-1:5", "step count -1 "), ({0: 5.0}, "step count 0 ")),
        *(({True: 5.0}, "step count True "), ({8.0: 5.0}, "step count 8.0 "), ({"8": 5.0}, "step count '8' ")),
        *(("8:0", "[8]=0.0 "), ("8:-1", "[8]=-1.0 "), ("8:nan", "[8]=nan "), ("8:inf", "[8]=inf ")),
        *(({8: 0}, "[8]=0 "), ({8: -1.0}, "[8]=-1.0 "), ({8: NAN}, "[8]=nan "), ({8: INF}, "[8]=inf ")),
        *(({8: True}, "[8]=True "), ({8: "5"}, "[8]='5' "), ({8: None}, "[8]=None ")),
        *(("8", "'8' is not STEPS:SHIFT"), ("8:", "'8:' is not STEPS:SHIFT"), ("8.0:5", "'8.0:5' is not STEPS:SHIFT")),
        *(("8:5,,9:5", "'' is not STEPS:SHIFT"), ("8:5,", "'' is not STEPS:SHIFT"), (",", "'' is not STEPS:SHIFT")),
        *(("8:5:3", "'8:5:3' is not"), ("", "is empty"), ({}, "is empty"), ([(8, 5)], "=[(8, 5)] is not accepted")),
    ],
)
def test_a_bad_map_entry_is_named(value: Any, named: str) -> None:
    with pytest.raises(ValueError, match="flow_shift_by_steps") as raised:
        parse_flow_shift_by_steps(value)
    assert named in str(raised.value)
    with pytest.raises(ValueError, match="flow_shift_by_steps"):
        EngineDefaults(steps=8, flow_shift_by_steps=value)


# Digests and purity.

CHANGES = {
    "prompt": "b",
    "negative_prompt": "",
    "height": 48,
    "width": 48,
    "frames": 9,
    "steps": 7,
    "guidance_scale": 2,
    "guidance_scale_2": 3,
    "boundary_ratio": 0.5,
    "flow_shift": 9,
    "scheduler": "euler",
    "seed": 2,
    "videos_per_prompt": 2,
    "max_sequence_length": 64,
    "output_type": "latent",
}


@given(first=st.sets(st.sampled_from(sorted(CHANGES))), second=st.sets(st.sampled_from(sorted(CHANGES)), max_size=1))
@settings(max_examples=60, deadline=None)
def test_digests_are_equal_exactly_if_all_values_are(
    opened: dict[str, Checkpoint], first: set[str], second: set[str]
) -> None:
    one = decide(opened[DUAL], {name: CHANGES[name] for name in first}, {})
    other = decide(opened[DUAL], {name: CHANGES[name] for name in first ^ second}, {})
    assert one.as_json().keys() == {f.name for f in fields(ResolvedRequest)}
    assert (one.digest() == other.digest()) == (one.as_json() == other.as_json()) == (not second)


def test_resolve_changes_nothing_that_it_was_given(opened: dict[str, Checkpoint]) -> None:
    request = Request(prompt=["a", "b"], negative_prompt=["", "x"], seed=[1, 2], steps=8)
    defaults = EngineDefaults(steps=8, flow_shift_by_steps={8: 5.0})
    given = deepcopy((request, defaults, opened[DUAL]))
    assert resolve(request, defaults, opened[DUAL]) == resolve(request, defaults, opened[DUAL])
    assert (request, defaults, opened[DUAL]) == given
