"""Contract 1: latents and pixels are bitwise those of stock diffusers, which is itself run here, not remembered."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.evidence.stock import generators
from suites.stock import both, loaded, run_stock, same_bytes
from suites.support import fingerprint, observed
from wanref.request import Request

pytestmark = pytest.mark.cpu

PROMPT = "a red square moving left"
REQUEST = Request(prompt=PROMPT, height=32, width=32, frames=5, steps=4, guidance_scale=4.0, seed=7)
GUIDED_TWICE = replace(REQUEST, guidance_scale_2=2.5)


# Where stock diffusers is right.


@pytest.mark.parametrize("scheduler", ["unipc", "euler", "dpm++"])
@pytest.mark.parametrize("layout", ["single", "dual"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents_and_pixels_are_those_of_stock_diffusers(
    tiny: Callable[..., Path], dtype: str, layout: str, scheduler: str
) -> None:
    request = replace(REQUEST if layout == "single" else GUIDED_TWICE, scheduler=scheduler, steps=6)
    output, stock = both(tiny(layout=layout), request, dtype)
    assert layout == "single" or min(output.schedule.split.values()) > 0, "both experts must have run"
    assert same_bytes(output, stock)


@pytest.mark.parametrize("flow_shift", [1, 12.0])
@pytest.mark.parametrize("scheduler", ["unipc", "euler", "dpm++"])
def test_flow_shift_is_the_one_that_stock_takes_from_the_scheduler_config(
    tiny: Callable[..., Path], scheduler: str, flow_shift: float
) -> None:
    output, stock = both(tiny(layout="dual"), replace(GUIDED_TWICE, scheduler=scheduler, flow_shift=flow_shift))
    assert same_bytes(output, stock)


def test_every_step_leaves_the_latents_of_stock_diffusers(tiny: Callable[..., Path]) -> None:
    engine, pipe = loaded(tiny(layout="dual"), "float32")
    stock = run_stock(pipe, GUIDED_TWICE, engine.checkpoint)
    run = observed(engine, GUIDED_TWICE)
    engine.observer = None
    ours = [value for key, value in run.tensors.items() if key.block == "scheduler"]
    assert ours == [fingerprint(latents) for latents in stock.latents]


@pytest.mark.parametrize("boundary", [0.0, 0.5, 0.9375])
@pytest.mark.parametrize("scheduler", ["unipc", "euler", "dpm++"])
def test_boundary_of_the_request_is_that_of_the_stock_config(
    tiny: Callable[..., Path], scheduler: str, boundary: float
) -> None:
    request = replace(GUIDED_TWICE, scheduler=scheduler, boundary_ratio=boundary, steps=5)
    output, stock = both(tiny(layout="dual"), request)
    assert same_bytes(output, stock)
    assert (output.schedule.split["low"] == 0) == (boundary == 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"height": 48, "width": 32, "frames": 9},
        {"height": 16, "width": 64, "frames": 1},
        {"prompt": (PROMPT, "a blue circle over dots")},
        {"prompt": (PROMPT, "a blue circle"), "videos_per_prompt": 2},
        {"prompt": (PROMPT, "a blue circle"), "seed": (3, 4)},
        {"prompt": (PROMPT, "a blue circle"), "videos_per_prompt": 2, "seed": (3, 4, 5, 3)},
        {"negative_prompt": "the stripes"},
        {"prompt": (PROMPT, "a blue circle"), "negative_prompt": ("stripes", "")},
        {"negative_prompt": ""},
        {"guidance_scale": 0},
        {"guidance_scale": 1, "guidance_scale_2": 1},
        {"guidance_scale": 1.5},
        {"guidance_scale": 6, "guidance_scale_2": 2},
        {"max_sequence_length": 8},
        {"max_sequence_length": 600},
        {"prompt": "  a red &amp; square  "},
        {"steps": 1},
    ],
    ids=lambda changes: "-".join(changes),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_option_means_what_it_means_to_stock_diffusers(
    tiny: Callable[..., Path], dtype: str, changes: dict[str, Any]
) -> None:
    output, stock = both(tiny(layout="dual"), replace(REQUEST, **changes), dtype)
    assert same_bytes(output, stock)


@pytest.mark.parametrize("count", [None, 2])
def test_generators_of_the_caller_draw_what_they_draw_for_stock_diffusers(
    tiny: Callable[..., Path], count: int | None
) -> None:
    seeded = replace(REQUEST, prompt=(PROMPT, "a blue circle"), seed=7 if count is None else (7, 8))
    own = replace(seeded, seed=None, generator=generators(seeded.seed))
    engine, pipe = loaded(tiny(), "float32")
    assert same_bytes(engine(own), run_stock(pipe, seeded, engine.checkpoint))


@pytest.mark.parametrize("head_dim", [12, 32, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_that_fill_vectors_and_heads_that_do_not_are_rotated_alike(
    tiny: Callable[..., Path], dtype: str, head_dim: int
) -> None:
    output, stock = both(tiny(head_dim=head_dim, blocks=2), REQUEST, dtype)
    assert same_bytes(output, stock)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_weights_of_any_dtype_load_as_stock_diffusers_loads_them(
    tiny: Callable[..., Path], dtype: str, stored: torch.dtype
) -> None:
    folder = tiny(layout="dual", dtype=stored, shards=3)
    assert len(list((folder / "transformer").glob("*.safetensors"))) >= 3
    output, stock = both(folder, GUIDED_TWICE, dtype)
    assert same_bytes(output, stock)


@pytest.mark.parametrize(("layout", "boundary"), [("high only", 0.0), ("low only", 1.0)])
def test_one_expert_of_a_dual_checkpoint_runs_alone_as_in_stock_diffusers(
    tiny: Callable[..., Path], layout: str, boundary: float
) -> None:
    request = replace(GUIDED_TWICE, boundary_ratio=boundary)
    output, stock = both(tiny(layout=layout), request, stock_boundary=0.0 if boundary == 0.0 else 1.0001)
    assert same_bytes(output, stock)
