"""Where stock diffusers is wrong: wanref does the right thing, and each difference is named and shown to be there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracle.evidence.stock import generators
from suites.stock import both, loaded, run_stock, same_bytes
from suites.support import fingerprint, observed
from wanref.checkpoint import open_checkpoint
from wanref.request import Request

pytestmark = pytest.mark.cpu

PROMPT = "a red square moving left"
REQUEST = Request(prompt=PROMPT, height=32, width=32, frames=5, steps=4, guidance_scale=4.0, seed=7)
GUIDED_TWICE = replace(REQUEST, guidance_scale_2=2.5)


@pytest.mark.parametrize("scheduler", ["unipc", "euler", "dpm++"])
def test_boundary_one_is_the_low_expert_alone_which_stock_needs_a_boundary_above_one_for(
    tiny: Callable[..., Path], scheduler: str
) -> None:
    request = replace(GUIDED_TWICE, scheduler=scheduler, boundary_ratio=1.0)
    output, stock = both(tiny(layout="dual"), request, stock_boundary=1.0001)
    assert output.schedule.split == {"high": 0, "low": 4}
    assert same_bytes(output, stock)


def test_stock_runs_the_high_expert_at_boundary_one_when_the_first_timestep_is_1000(
    tiny: Callable[..., Path],
) -> None:
    """Trap 23c. Euler alone starts at exactly 1000."""
    request = replace(GUIDED_TWICE, scheduler="euler", boundary_ratio=1.0)
    output, stock = both(tiny(layout="dual"), request)
    assert output.schedule.steps[0].timestep == 1000.0
    assert not same_bytes(output, stock)


def test_stock_drops_guidance_of_the_low_expert_when_the_high_one_has_none(tiny: Callable[..., Path]) -> None:
    """Trap 18. Stock asks guidance_scale alone whether the negative branch runs."""
    request = replace(REQUEST, guidance_scale=1, guidance_scale_2=4)
    output, stock = both(tiny(layout="dual"), request)
    _, unguided = both(tiny(layout="dual"), request, guidance_scale_2=1)
    assert fingerprint(stock.latents[-1]) == fingerprint(unguided.latents[-1]), "stock no longer drops it"
    assert not same_bytes(output, stock)
    # What it should be: each expert's steps of a stock run in which that expert's scale is honoured.
    assert fingerprint(output.latents) == fingerprint(_honoured(tiny(layout="dual"), request))


def test_stock_runs_a_negative_branch_at_scale_one_that_wanref_does_not_run(tiny: Callable[..., Path]) -> None:
    """Trap 18, the other way round: stock still computes `u + 1 * (c - u)`, which is `c` but for rounding."""
    folder = tiny(layout="dual")
    request = replace(REQUEST, guidance_scale=4, guidance_scale_2=1)
    engine, pipe = loaded(folder, "float32")
    forwards: list[int] = []
    counting = pipe.transformer_2.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        _, stock = both(folder, request)
    finally:
        counting.remove()
    run = observed(engine, request)
    engine.observer = None
    low = {key.step for key in run.tensors if key.expert == "low"}
    assert low == {2, 3}
    assert len(forwards) == 2 * len(low)
    assert {key.step for key in run.tensors if key.branch == "uncond"} == {0, 1}
    honoured = _honoured(folder, request)
    assert run.latents == fingerprint(honoured)
    assert torch.allclose(honoured, stock.latents[-1], atol=1e-5), "only rounding may differ"


def test_stock_rounds_a_frame_count_that_wanref_refuses(tiny: Callable[..., Path]) -> None:
    """Trap 19."""
    engine, pipe = loaded(tiny(), "float32")
    request = replace(REQUEST, frames=7)
    assert run_stock(pipe, request, engine.checkpoint).video.shape[1] == 5
    with pytest.raises(ValueError, match=r"frames=7 .* 5 or 9"):
        engine(request)


def test_stock_cuts_a_long_prompt_that_wanref_refuses(tiny: Callable[..., Path]) -> None:
    engine, pipe = loaded(tiny(), "float32")
    long, cut = (
        replace(REQUEST, prompt=prompt, max_sequence_length=4) for prompt in ("a red square left", "a red square")
    )
    stock = [fingerprint(run_stock(pipe, each, engine.checkpoint).latents[-1]) for each in (long, cut)]
    assert stock[0] == stock[1]
    with pytest.raises(ValueError, match="max_sequence_length=4 is less than the 5 tokens"):
        engine(long)
    assert fingerprint(engine(cut).latents) == stock[1]


@torch.no_grad()
def _honoured(folder: Path, request: Request) -> torch.Tensor:
    """Final latents by stock's own modules and scheduler, each step at its expert's own scale; at 1, cond alone."""
    _, pipe = loaded(folder, "float32")
    pipe.register_to_config(boundary_ratio=open_checkpoint(folder).boundary_ratio)
    texts = pipe.encode_prompt(request.prompt, request.negative_prompt, max_sequence_length=512)
    pipe.scheduler.set_timesteps(request.steps)
    pipe.scheduler.set_begin_index(0)
    latents = pipe.prepare_latents(1, 4, 32, 32, 5, torch.float32, "cpu", generators(request.seed))
    for timestep in pipe.scheduler.timesteps:
        high = timestep >= pipe.config.boundary_ratio * 1000
        scale = request.guidance_scale if high else request.guidance_scale_2
        model = pipe.transformer if high else pipe.transformer_2
        cond, uncond = (model(latents, timestep.expand(1), text, return_dict=False)[0] for text in texts)
        prediction = cond if scale <= 1 else uncond + scale * (cond - uncond)
        latents = pipe.scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents
