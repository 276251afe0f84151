"""wanref over stock diffusers, in this process: the whole pipeline, and the transformer alone.

Both are one thread that never waits, so that CPU time is what an idle machine's clock would show, and leaves out what
other programs take of this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from diffusers import WanPipeline

from suites.bench.figure import Figure, interleave, ratios, require_same
from suites.bench.subject import PROMPT, SIZE, STEPS, digest, request
from wanref import WanReference

REPETITIONS = 7  # of a ratio that is close to its target
TEXT_TOKENS = 512


@torch.no_grad()
def measure(checkpoint: Path) -> list[Figure]:
    """The whole pipeline is text encoding and denoising, up to the final latents.

    The transformer alone is what one step costs, both branches. There wanref's text keys and values and rotary table
    are at hand, as at every step but a request's first; the whole pipeline pays for them.
    """
    torch.set_num_threads(1)
    engine = WanReference.from_pretrained(checkpoint)
    stock = WanPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    engine(request(steps=1))  # what a process does once is not measured
    _stock_latents(stock, steps=1)
    whole = _compare({"wanref": lambda: engine(request()).latents, "diffusers": lambda: _stock_latents(stock, STEPS)})
    alone = _compare(_transformers(engine, stock))
    return [
        Figure(name="wanref_over_diffusers", values=whole, at_most=0.95),
        Figure(name="transformer_over_diffusers", values=alone, note="both branches of one step"),
    ]


def _compare(runs: Mapping[str, Callable[[], torch.Tensor]]) -> tuple[float, ...]:
    digests: dict[str, str] = {}

    def timed(name: str) -> float:
        started = time.process_time()
        output = runs[name]()
        seconds = time.process_time() - started
        digests[name] = digest(output)
        require_same(digests)
        return seconds

    times = interleave(REPETITIONS, {name: partial(timed, name) for name in runs})
    return ratios(times["wanref"], times["diffusers"])


def _stock_latents(stock: WanPipeline, steps: int) -> torch.Tensor:
    height, width, frames = SIZE
    return stock(
        prompt=PROMPT,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=steps,
        guidance_scale=request().guidance_scale,
        generator=torch.Generator("cpu").manual_seed(request().seed),
        output_type="latent",
        max_sequence_length=TEXT_TOKENS,
    ).frames


def _transformers(engine: WanReference, stock: WanPipeline) -> dict[str, Callable[[], torch.Tensor]]:
    height, width, frames = SIZE
    generator = torch.Generator("cpu").manual_seed(0)
    latents = torch.randn(1, 4, (frames - 1) // 4 + 1, height // 8, width // 8, generator=generator)
    embeds = [torch.randn(1, TEXT_TOKENS, 16, generator=generator) for _ in range(2)]
    timestep = torch.tensor([800])
    stage = engine.stages["high"]
    texts, rotary = [stage.prepare_text(each) for each in embeds], stage.prepare_rotary(latents)

    def wanref() -> torch.Tensor:
        inputs = stage.prepare_step(timestep, rotary, torch.float32)
        hidden = stage.embed(latents)
        return torch.stack([stage.project(stage.stack(hidden, text, inputs), inputs, latents.shape) for text in texts])

    def diffusers() -> torch.Tensor:
        return torch.stack([stock.transformer(latents, timestep, each, return_dict=False)[0] for each in embeds])

    return {"wanref": wanref, "diffusers": diffusers}
