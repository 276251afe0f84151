"""What `resolve` refuses, and the property that it otherwise takes exactly what was asked."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wanref import Checkpoint, EngineDefaults, Request, ResolvedRequest, open_checkpoint, resolve

pytestmark = pytest.mark.cpu

NAN, INF = float("nan"), float("inf")
NOT_COUNTS = [True, False, 0, -1, 5.0, NAN, INF, "5"]
NOT_SCALES = [True, -1, -0.5, NAN, INF, "5", [5.0]]
NOT_BOUNDARIES = [True, -0.1, 1.1, 2, NAN, INF, "0.9"]
NOT_SHIFTS = [True, 0, -3.0, NAN, INF, "3"]
NOT_SCHEDULERS = ["ddim", "UniPC", "UniPCMultistepScheduler", "", 3, ["unipc"]]
A_COUNT, A_SCALE = "give an integer of at least 1.", "give a finite number of at least 0"
SHARED = [
    *(
        (option, value, A_COUNT)
        for option in ("height", "width", "frames", "steps", "max_sequence_length")
        for value in NOT_COUNTS
    ),
    *((option, value, A_SCALE) for option in ("guidance_scale", "guidance_scale_2") for value in NOT_SCALES),
    *(("boundary_ratio", value, "give a number from 0 (high alone) to 1 (low alone).") for value in NOT_BOUNDARIES),
    *(("flow_shift", value, "a flow shift is a finite number above 0.") for value in NOT_SHIFTS),
    *(("scheduler", value, "give one of unipc, euler, dpm++.") for value in NOT_SCHEDULERS),
]
OWN = [
    *(("videos_per_prompt", value, A_COUNT) for value in [*NOT_COUNTS, None]),
    *(("output_type", value, "give one of video, latent.") for value in ["np", "pil", "", None]),
    *(("seed", value, "give an integer from 0 to 2**63 - 1.") for value in [True, -1, 2**63, 1.0, NAN, "7"]),
    *(("seed", value, "for 1 videos: give one, or one a video.") for value in [[], [1, 2], "12"]),
    *(("prompt", value, "give a text, or a sequence of at least one text.") for value in [None, [], 5, ["a", 3], b"a"]),
    *(("negative_prompt", value, "give a text, or a sequence of at least one text.") for value in [[], 5, [None]]),
    ("negative_prompt", ["x", "y"], "for 1 prompts: give one, or one a prompt."),
    ("generator", 5, "give a torch.Generator"),
    ("generator", [], "for 1 videos: give one, or one a video."),
    *(("height", value, "give 32 or 48.") for value in [33, 40, 47]),
    *(("width", value, "give 16.") for value in [1, 8, 15]),
    *(("frames", value, "4n + 1 frames, for instance 5 or 9.") for value in [6, 7, 8]),
]


@pytest.fixture(scope="module")
def opened(tiny: Callable[..., Path]) -> dict[str, Checkpoint]:
    return {layout: open_checkpoint(tiny(layout=layout)) for layout in ("single", "dual")}


def decide(checkpoint: Checkpoint, values: Mapping[str, Any], engine: Mapping[str, Any]) -> ResolvedRequest:
    return resolve(Request(**{"prompt": "a", **values}), EngineDefaults(**engine), checkpoint)


def assert_names(error: ValueError, option: str, value: object, accepted: str) -> None:
    message = str(error)
    assert f"{option}={value!r} " in message
    assert message.partition(f"{value!r} ")[2].count(accepted) == 1


@pytest.mark.parametrize(("option", "value", "accepted"), SHARED + OWN)
def test_a_request_with_an_invalid_value_is_refused_by_option_value_and_what_is_accepted(
    opened: dict[str, Checkpoint], option: str, value: object, accepted: str
) -> None:
    with pytest.raises(ValueError, match=option) as raised:
        decide(opened["dual"], {option: value}, {})
    assert_names(raised.value, option, value, accepted)


@pytest.mark.parametrize(("option", "value", "accepted"), SHARED)
def test_an_engine_with_an_invalid_default_is_not_built(option: str, value: object, accepted: str) -> None:
    with pytest.raises(ValueError, match=option) as raised:
        EngineDefaults(**{option: value})
    assert_names(raised.value, option, value, accepted)


@pytest.mark.parametrize("option", ["guidance_scale", "guidance_scale_2", "flow_shift", "boundary_ratio"])
def test_an_integer_that_no_float_can_hold_is_refused_like_infinity(opened: dict[str, Checkpoint], option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=1000000"):
        decide(opened["dual"], {option: 10**400}, {})


def test_an_invalid_boundary_is_refused_though_the_engine_overrides_it(opened: dict[str, Checkpoint]) -> None:
    with pytest.raises(ValueError, match=r"boundary_ratio=1\.1 is not accepted"):
        decide(opened["dual"], {"boundary_ratio": 1.1}, {"boundary_ratio": 0.5})


@pytest.mark.parametrize(("option", "value"), [("height", 40), ("width", 40), ("frames", 6)])
def test_an_engines_own_size_is_held_to_the_checkpoint_too(
    opened: dict[str, Checkpoint], option: str, value: int
) -> None:
    with pytest.raises(ValueError, match=f"{option}={value} is not"):
        decide(opened["single"], {}, {option: value})


@pytest.mark.parametrize("option", ["boundary_ratio", "guidance_scale_2"])
@pytest.mark.parametrize("side", ["request", "engine"])
def test_an_option_of_two_experts_is_refused_on_a_checkpoint_with_one(
    opened: dict[str, Checkpoint], option: str, side: str
) -> None:
    asked, engine = ({option: 0.5}, {}) if side == "request" else ({}, {option: 0.5})
    with pytest.raises(ValueError, match=rf"{option}=0\.5 \({side}\) is not accepted: .* one expert.* Leave it out"):
        decide(opened["single"], asked, engine)


@pytest.mark.parametrize(("option", "good"), [("seed", 0), ("generator", torch.Generator())])
def test_each_seed_and_generator_of_several_is_checked(
    opened: dict[str, Checkpoint], option: str, good: object
) -> None:
    with pytest.raises(ValueError, match=f"{option}=None is not accepted"):
        decide(opened["single"], {"videos_per_prompt": 2, option: [good, None]}, {})


def test_seed_and_generator_together_are_refused(opened: dict[str, Checkpoint]) -> None:
    with pytest.raises(ValueError, match="seed=0 and generator are both given"):
        decide(opened["single"], {"seed": 0, "generator": torch.Generator()}, {})


def test_a_checkpoint_whose_scheduler_is_not_run_needs_one_to_be_named(opened: dict[str, Checkpoint]) -> None:
    foreign = replace(opened["single"], scheduler_class="DDIMScheduler")
    with pytest.raises(ValueError, match=r"DDIMScheduler, is not one that wanref runs\. Name one of unipc, euler"):
        decide(foreign, {}, {})
    assert decide(foreign, {"scheduler": "unipc"}, {}).scheduler == "unipc"


# Batches.

DIFFERENT = {
    "height": (32, 48),
    "width": (32, 48),
    "frames": (5, 9),
    "steps": (7, 8),
    "guidance_scale": (0, 1),
    "guidance_scale_2": (2, 3),
    "boundary_ratio": (0.5, 0.6),
    "flow_shift": (5, 9),
    "videos_per_prompt": (1, 2),
    "scheduler": ("unipc", "euler"),
    "max_sequence_length": (64, 65),
    "output_type": ("video", "latent"),
}


def test_every_option_but_prompts_and_noise_is_tried_in_a_batch_that_differs() -> None:
    assert DIFFERENT.keys() == {f.name for f in fields(Request)} - {"prompt", "negative_prompt", "seed", "generator"}


@pytest.mark.parametrize("option", DIFFERENT)
def test_a_batch_that_resolves_to_different_values_is_refused(opened: dict[str, Checkpoint], option: str) -> None:
    first, other = DIFFERENT[option]
    batch = [Request(**{"prompt": "a", option: value}) for value in (first, first, other)]
    with pytest.raises(ValueError, match=option) as raised:
        resolve(batch, EngineDefaults(), opened["dual"])
    first, other = (float(v) if option.startswith(("guid", "flow")) else v for v in (first, other))
    assert f"request 0 resolves to {option}={first!r}, request 2 to {other!r}. Give" in str(raised.value)


def test_a_batch_that_resolves_alike_is_one_request_in_order(opened: dict[str, Checkpoint]) -> None:
    batch = [
        Request(prompt="a", seed=3, boundary_ratio=0.875),
        Request(prompt=["b", "c"], negative_prompt="x", steps=50, boundary_ratio=0.7),
    ]
    merged = resolve(batch, EngineDefaults(boundary_ratio=0.875), opened["dual"])
    assert merged.prompts == ("a", "b", "c")
    assert merged.negative_prompts == ("", "x", "x")
    assert [(n.videos, n.seed) for n in merged.noise] == [(1, 3), (2, None)]
    assert merged.videos == 3
    assert merged.overridden == ("boundary_ratio",)
    mixed = {option for option, source in merged.sources.items() if source == "mixed"}
    assert mixed == {"negative_prompt", "steps", "seed"}
    assert merged.sources["height"] == "checkpoint"


@pytest.mark.parametrize("batch", [[], (), "a red square", [Request(prompt="a"), "b"], None, {"prompt": "a"}])
def test_what_is_no_request_and_no_batch_of_them_is_refused(opened: dict[str, Checkpoint], batch: Any) -> None:
    with pytest.raises(ValueError, match="is not accepted: give a Request, or a sequence of at least one"):
        resolve(batch, EngineDefaults(), opened["single"])


# Properties.

SCALES, SHIFTS = st.sampled_from([0, 1, 1.0, 3, 4.5]), st.sampled_from([1, 3.0, 12])
SIDES, FRAMES = st.sampled_from([16, 48, 80]), st.sampled_from([1, 5, 81])
OPTIONS = {
    "height": SIDES,
    "width": SIDES,
    "frames": FRAMES,
    "steps": st.sampled_from([1, 8, 27]),
    "guidance_scale": SCALES,
    "guidance_scale_2": SCALES,
    "boundary_ratio": st.sampled_from([0, 0.5, 1]),
    "flow_shift": SHIFTS,
    "scheduler": st.sampled_from(["unipc", "euler", "dpm++"]),
    "max_sequence_length": st.sampled_from([1, 226]),
}
ASKED = st.fixed_dictionaries({}, optional=OPTIONS)
MAPS = st.dictionaries(st.sampled_from([8, 27, 50]), SHIFTS, min_size=1)
ENGINES = st.fixed_dictionaries({}, optional={**OPTIONS, "flow_shift_by_steps": MAPS})
BUILT_IN = {"steps": 50, "guidance_scale": 5.0, "max_sequence_length": 512}


def expected(asked: dict[str, Any], engine: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The values that `resolve` must come to, from the rules as users read them; None where it must refuse."""
    engine = BUILT_IN | engine
    both = engine | asked
    shifts = engine.pop("flow_shift_by_steps", None)
    if shifts is not None and not {engine["steps"], both["steps"]} <= shifts.keys():
        return None
    if checkpoint.kind == "single" and both.keys() & {"boundary_ratio", "guidance_scale_2"}:
        return None
    values = {"height": 32, "width": 32, "frames": 5, "scheduler": "unipc", "boundary_ratio": checkpoint.boundary_ratio}
    values |= {"flow_shift": 3.0} | both
    if "flow_shift" not in asked and shifts:
        values["flow_shift"] = shifts[both["steps"]]
    values["boundary_ratio"] = engine.get("boundary_ratio", values["boundary_ratio"])
    values["guidance_scale_2"] = (
        None if checkpoint.kind == "single" else both.get("guidance_scale_2", both["guidance_scale"])
    )
    return {option: value for option, value in values.items() if option != "flow_shift_by_steps"}


@given(asked=ASKED, engine=ENGINES, layout=st.sampled_from(["single", "dual"]))
@settings(max_examples=300, deadline=None)
def test_resolve_takes_exactly_what_precedence_picks_or_refuses(
    opened: dict[str, Checkpoint], asked: dict[str, Any], engine: dict[str, Any], layout: str
) -> None:
    checkpoint = opened[layout]
    values = expected(asked, engine, checkpoint)
    if values is None:
        with pytest.raises(ValueError, match=r"is not accepted|flow_shift_by_steps"):
            decide(checkpoint, asked, engine)
        return
    resolved = decide(checkpoint, asked, engine)
    assert {option: getattr(resolved, option) for option in values} == values


@given(asked=ASKED, bad=st.sampled_from(SHARED + OWN), layout=st.sampled_from(["single", "dual"]))
@settings(max_examples=200, deadline=None)
def test_one_invalid_value_is_refused_whatever_else_is_asked(
    opened: dict[str, Checkpoint], asked: dict[str, Any], bad: tuple[str, Any, str], layout: str
) -> None:
    with pytest.raises(ValueError, match="="):
        decide(opened[layout], {**asked, bad[0]: bad[1]}, {})
