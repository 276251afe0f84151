"""Stock diffusers as the reference: its pipeline, asked as its users ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from suites.support import fingerprint, load_engine, silence
from wanref.checkpoint import Checkpoint, open_checkpoint
from wanref.request import SCHEDULER_CLASSES, Request

if TYPE_CHECKING:
    from diffusers import WanPipeline

    from wanref.output import Output
    from wanref.pipeline import WanReference


@dataclass(frozen=True, slots=True)
class StockRun:
    """latents: after each step. video: [batch, frames, height, width, 3]."""

    latents: tuple[torch.Tensor, ...]
    video: np.ndarray


def stock_pipeline(folder: Path | str, dtype: torch.dtype, device: str = "cpu", **components: Any) -> WanPipeline:
    """As diffusers' documentation of Wan loads it: the VAE in float32."""
    from diffusers import AutoencoderKLWan, WanPipeline

    silence()
    opened = open_checkpoint(folder)
    vae = AutoencoderKLWan.from_pretrained(opened.path / "vae", dtype=torch.float32)
    pipe = WanPipeline.from_pretrained(opened.path, vae=vae, dtype=dtype, **components).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_stock(pipe: WanPipeline, request: Request, checkpoint: Checkpoint) -> StockRun:
    """The request as a user of stock diffusers writes it. Only what a test asks for is handed on."""
    import diffusers

    name = SCHEDULER_CLASSES[request.scheduler or "unipc"]
    shift = checkpoint.flow_shift if request.flow_shift is None else request.flow_shift
    option = "shift" if request.scheduler == "euler" else "flow_shift"
    own = getattr(diffusers, checkpoint.scheduler_class).from_config(dict(checkpoint.scheduler))
    pipe.scheduler = getattr(diffusers, name).from_config(own.config, **{option: shift})
    optional = {
        "negative_prompt": _text_or_list(request.negative_prompt),
        "guidance_scale_2": request.guidance_scale_2,
        "max_sequence_length": request.max_sequence_length,
    }
    steps: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        steps.append(tensors["latents"].clone())
        return tensors

    video = pipe(
        prompt=_text_or_list(request.prompt),
        height=request.height,
        width=request.width,
        num_frames=request.frames,
        num_inference_steps=request.steps,
        guidance_scale=5.0 if request.guidance_scale is None else request.guidance_scale,
        num_videos_per_prompt=request.videos_per_prompt,
        generator=generators(request),
        callback_on_step_end=keep,
        **{option: value for option, value in optional.items() if value is not None},
    ).frames
    return StockRun(tuple(steps), video)


def _text_or_list(texts: str | Sequence[str] | None) -> str | list[str] | None:
    return texts if texts is None or isinstance(texts, str) else list(texts)


def generators(request: Request) -> torch.Generator | list[torch.Generator]:
    if isinstance(request.seed, Sequence):
        return [torch.Generator().manual_seed(seed) for seed in request.seed]
    assert request.seed is not None
    return torch.Generator().manual_seed(request.seed)


def same_bytes(output: Output, stock: StockRun) -> bool:
    """Whether latents and pixels are. Stock's latents may be bfloat16 after Euler: float32 holds them exactly."""
    assert output.video is not None
    return fingerprint(output.latents) == fingerprint(stock.latents[-1].float()) and (
        fingerprint(output.video) == fingerprint(stock.video)
    )


@cache
def loaded(folder: Path, dtype: str) -> tuple[WanReference, Any]:
    return load_engine(folder, dtype=dtype), stock_pipeline(folder, getattr(torch, dtype))


def both(folder: Path, request: Request, dtype: str = "float32", **stock_options: Any) -> tuple[Output, StockRun]:
    """The request by wanref, and by stock diffusers; `boundary_ratio` of the latter if the request names one."""
    engine, pipe = loaded(folder, dtype)
    boundary = stock_options.pop("stock_boundary", request.boundary_ratio)
    opened = open_checkpoint(folder)
    pipe.register_to_config(boundary_ratio=opened.boundary_ratio if boundary is None else boundary)
    return engine(request), run_stock(pipe, replace(request, **stock_options), opened)
