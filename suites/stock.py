"""Stock diffusers as the reference: its pipeline, asked as its users ask it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oracle.evidence.stock import load_stock, stock_arguments
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
    silence()
    return load_stock(open_checkpoint(folder).path, str(dtype).removeprefix("torch."), **components).to(device)


def run_stock(pipe: WanPipeline, request: Request, checkpoint: Checkpoint) -> StockRun:
    """The request as a user of stock diffusers writes it. Only what a test asks for is handed on."""
    import diffusers

    name = SCHEDULER_CLASSES[request.scheduler or "unipc"]
    shift = checkpoint.flow_shift if request.flow_shift is None else request.flow_shift
    option = "shift" if request.scheduler == "euler" else "flow_shift"
    own = getattr(diffusers, checkpoint.scheduler_class).from_config(dict(checkpoint.scheduler))
    pipe.scheduler = getattr(diffusers, name).from_config(own.config, **{option: shift})
    steps: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        steps.append(tensors["latents"].clone())
        return tensors

    video = pipe(**stock_arguments(request), callback_on_step_end=keep).frames
    return StockRun(tuple(steps), video)


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
