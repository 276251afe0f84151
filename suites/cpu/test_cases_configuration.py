"""Public bug reports on sizes, topologies and options that contradict each other, each as what is right instead.

Sources are repository#thread: omni vllm-project/vllm-omni, sgl sgl-project/sglang, trt NVIDIA/TensorRT-LLM, dfs
huggingface/diffusers, lx2v ModelTC/LightX2V, wan21 Wan-Video/Wan2.1.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanref import CheckpointError, EngineDefaults, Request, Topology, WanReference, open_checkpoint, resolve
from wanref.launch import join

pytestmark = pytest.mark.cpu


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        pytest.fail("weights were read before the refusal")

    monkeypatch.setattr("wanref.parts.load_parts", load)


# V1: sizes.


@pytest.mark.parametrize(
    ("patch", "size", "nearest"),
    [
        (2, {"frames": 6}, "5 or 9"),
        (2, {"height": 40}, "32 or 48"),
        (2, {"width": 40}, "32 or 48"),
        (4, {"height": 48}, "32 or 64"),
        (4, {"width": 48}, "32 or 64"),
    ],
)
def test_V1_a_size_that_vae_and_patches_cannot_make_is_refused_never_rounded(
    tiny: Callable[..., Path], patch: int, size: dict[str, int], nearest: str
) -> None:
    """dfs#11167, wan21#229, dfs pipeline_wan.py: rounded with a log line; omni#1279, omni#1280: 16 where 32 was due."""
    checkpoint = open_checkpoint(tiny())
    config = {**checkpoint.experts["high"], "patch_size": [1, patch, patch]}
    ((option, value),) = size.items()
    with pytest.raises(ValueError, match=rf"{option}={value} is not .* {nearest}\."):
        resolve(Request(prompt="a", **size), EngineDefaults(), replace(checkpoint, experts={"high": config}))


def test_V1_a_size_that_can_be_made_is_the_size_of_the_video(tiny: Callable[..., Path]) -> None:
    """sgl#19311: 93 frames for 81. That no topology changes the shape is proved where the topologies run."""
    engine = WanReference.from_pretrained(tiny())
    output = engine(Request(prompt="a", height=48, width=64, frames=9, steps=1, guidance_scale=1))
    assert output.video is not None
    assert output.video.shape == (1, 9, 48, 64, 3)
    assert (output.request.height, output.request.width, output.request.frames) == (48, 64, 9)


# V2: topologies.


@pytest.mark.parametrize(
    ("topology", "world"),
    [("pp1cfg1", "2"), ("pp1cfg2", None), ("pp1cfg2", "1"), ("pp2cfg2", "2"), ("pp2cfg2", "3"), ("pp2cfg1", "4")],
)
@pytest.mark.usefixtures("nothing_is_loaded")
def test_V2_a_topology_that_the_world_does_not_fit_is_refused_never_reduced(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, topology: str, world: str | None
) -> None:
    """omni#3382, omni#4290, omni#4900, omni#2281, lx2v#1248: CFG-parallel asked for, silently off."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    needed = int(topology[2]) * int(topology[6])
    refusal = rf"topology={topology} needs {needed} ranks, but the world size is {world or 1}\."
    for attempt in (
        lambda: join(Topology(int(topology[2]), int(topology[6])), "cpu"),
        lambda: WanReference.from_pretrained(tiny(), topology=topology),
    ):
        with pytest.raises(ValueError, match=refusal) as raised:
            attempt()
        assert f"'torchrun --nproc-per-node {needed} ...'" in str(raised.value)
        assert "wanref.launch.launch(...)" in str(raised.value)


def test_V2_the_effective_topology_is_echoed(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same reports."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    engine = WanReference.from_pretrained(tiny(), topology="pp1cfg1")
    output = engine(Request(prompt="a", steps=1, output_type="latent"))
    assert engine.topology == output.topology == Topology(1, 1)
    assert output.idle_ranks == ()


# V3: combinations.


@pytest.mark.parametrize(
    ("layout", "asked", "named"),
    [
        ("single", {"seed": 1, "generator": torch.Generator()}, ["seed=1", "generator"]),
        ("single", {"boundary_ratio": 0.9}, ["boundary_ratio=0.9", "one expert"]),
        ("single", {"guidance_scale_2": 3.0}, ["guidance_scale_2=3.0", "guidance_scale", "one expert"]),
        ("dual", {"steps": 20}, ["steps=20", "flow_shift_by_steps"]),
        ("dual", {"steps": 20, "flow_shift": 5.0}, ["steps=20", "flow_shift_by_steps"]),
        ("dual", {"prompt": ["a", "b"], "negative_prompt": ["x"] * 3}, ["negative_prompt=", "2 prompts"]),
        ("dual", {"videos_per_prompt": 2, "seed": [1, 2, 3]}, ["seed=[1, 2, 3]", "2 videos"]),
    ],
)
def test_V3_options_that_contradict_each_other_are_refused_by_both_names(
    tiny: Callable[..., Path], layout: str, asked: dict[str, Any], named: list[str]
) -> None:
    """trt#11923, trt#13170, omni#1578: combinations that nobody checked."""
    defaults = EngineDefaults(steps=8, flow_shift_by_steps={8: 5.0}) if layout == "dual" else EngineDefaults()
    with pytest.raises(ValueError, match=named[0].split("=")[0]) as raised:
        resolve(Request(**{"prompt": "a", **asked}), defaults, open_checkpoint(tiny(layout=layout)))
    assert [name for name in named if name not in str(raised.value)] == []


def test_V3_an_engines_own_steps_and_shift_map_contradict_each_other_at_build() -> None:
    """The same reports."""
    with pytest.raises(ValueError, match=r"steps=50 .*flow_shift_by_steps"):
        EngineDefaults(flow_shift_by_steps="27:12")


@pytest.mark.usefixtures("nothing_is_loaded")
def test_V3_a_third_guidance_branch_is_refused_not_dropped(tiny: Callable[..., Path]) -> None:
    """trt#14157, trt#17696: three branches on two ranks lost one."""
    with pytest.raises(ValueError, match=r"topology='pp1cfg3' is not accepted: .* M of 1 or 2"):
        WanReference.from_pretrained(tiny(), topology="pp1cfg3")


@pytest.mark.usefixtures("nothing_is_loaded")
def test_V3_a_checkpoint_with_timesteps_per_token_is_refused_by_name(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The same reports: two-dimensional timesteps in what expects one."""
    folder = shutil.copytree(tiny(), tmp_path / "ti2v")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"expand_timesteps": True}))
    with pytest.raises(CheckpointError, match=r"TI2V checkpoint \(expand_timesteps\)"):
        WanReference.from_pretrained(folder)


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("dtype", "fp8", "float32, bfloat16, float16"),
        ("vae_dtype", "half", "float32, bfloat16, float16"),
        ("device", "tpu", "cpu, cuda"),
    ],
)
@pytest.mark.usefixtures("nothing_is_loaded")
def test_V3_an_unknown_engine_option_is_refused(
    tiny: Callable[..., Path], option: str, value: str, accepted: str
) -> None:
    """The same reports."""
    with pytest.raises(ValueError, match=f"{option}='{value}' is not accepted: give one of {accepted}"):
        WanReference.from_pretrained(tiny(), **{option: value})
