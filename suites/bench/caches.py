"""What a cache costs beyond the blocks that it skips: cached time over the ideal for the blocks skipped.

(cached / native) / (1 - skipped block calls x block time / native), each side against its own native runs. Block calls
are counted at the feed-forward of each block, which runs exactly when the block does. Times are CPU time of one thread
(see `suites.bench.pipeline`) in paces of the run that they are of (see `suites.bench.pace`): the machine's own changes
of speed are larger than what is measured. The figure in plain seconds is in the note.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline

from suites.bench import hooks
from suites.bench.figure import BytesDiffer, Figure, beside, interleave, interval, require_same
from suites.bench.pace import Timing, time_run
from suites.bench.subject import PROMPT, digest, request
from wanref import WanReference
from wanref.caching.spec import CacheSpec, parse_cache

REPETITIONS = 5
STEPS = 8
REUSES = {25: 2, 50: 4, 75: 6}
"""Share of the steps that reuse, in percent, and how many of STEPS that is."""

FRAMES = 5  # 800 tokens: what is not block work weighs more in them than in the 2,000 of the other figures
ASKED = replace(request(STEPS), guidance_scale=1.0, frames=FRAMES)  # one branch: each step is one call of the stack

OURS = {
    "teacache": "teacache:dialect=teacache,signal=timestep_projection,coefficients=1/0,threshold=1000,first={computed}",
    "cachedit": "cache-dit:fn=1,threshold=0.99,max_warmup_steps={computed}",
}


@torch.no_grad()
def measure(checkpoint: Path) -> list[Figure]:
    """Ours and theirs in turn, at each share."""
    torch.set_num_threads(1)
    ours, theirs = _time_ours(checkpoint), _time_theirs(checkpoint)
    timings: dict[str, list[Timing]] = {}

    def run(name: str, once: Callable[[], Timing]) -> float:
        timing = once()
        timings.setdefault(name, []).append(timing)
        return timing.seconds

    interleave(REPETITIONS, {name: partial(run, name, once) for name, once in {**ours, **theirs}.items()})
    figures = _beside_others([_figure(name, timings) for name in timings if name[-2:].isdecimal()])
    forced = {name: _over(timings[name], timings["native"]) for name in timings if name.endswith("_forced")}
    worst = max(forced, key=lambda name: statistics.median(forced[name]))
    note = ", ".join(f"{name} {_says(each)}" for name, each in forced.items())
    return [*figures, Figure(name="forced_over_native", values=forced[worst], at_most=1.01, note=note)]


def over_ideal(cached: Timing, native: Timing) -> float:
    """(cached / native) / ideal, in paces. Raises BytesDiffer for a run that skipped nothing, or everything."""
    return cached.paced / native.paced / _ideal(cached, native)


def _ideal(cached: Timing, native: Timing) -> float:
    skipped = native.calls - cached.calls
    if not 0 < skipped < native.calls:
        raise BytesDiffer(f"{skipped} of {native.calls} block calls were skipped: that run says nothing about a cache")
    return 1 - skipped * native.seconds_a_block / native.seconds


def _over(ours: Sequence[Timing], native: Sequence[Timing]) -> tuple[float, ...]:
    return tuple(a.paced / b.paced for a, b in zip(ours, native, strict=True))


def _says(values: tuple[float, ...]) -> str:
    low, high = interval(values)
    return f"{statistics.median(values):.3f} ({low:.3f} to {high:.3f})"


def _figure(name: str, timings: Mapping[str, list[Timing]]) -> Figure:
    cache, share = name.rsplit("_", 1)
    mine = cache in OURS
    native = timings["native" if mine else "stock_native"]
    pairs = list(zip(timings[name], native, strict=True))
    values = tuple(over_ideal(cached, plain) for cached, plain in pairs)
    seconds = [cached.seconds / plain.seconds / _ideal(cached, plain) for cached, plain in pairs]
    saved = 1 - timings[name][0].calls / native[0].calls
    low, high = interval(values)
    note = (
        f"{saved:.0%} of the block calls skipped; 95 % interval of the median {low:.3f} to {high:.3f}; in seconds "
        f"{statistics.median(seconds):.3f}"
    )
    return Figure(name=f"{cache}_over_ideal_{share}", values=values, at_most=1.02 if mine else None, note=note)


def _beside_others(figures: Sequence[Figure]) -> list[Figure]:
    """Ours, which have a target, with a note of where they stand beside the others at the same share."""
    noted = []
    for figure in figures:
        share = figure.name.rsplit("_", 1)[1]
        others = [] if figure.at_most is None else [each for each in figures if each.at_most is None]
        notes = [
            f"{other.name.removesuffix(f'_over_ideal_{share}')}: {beside(figure.values, other.values)}"
            for other in others
            if other.name.endswith(share)
        ]
        noted.append(replace(figure, note="; ".join([figure.note, *notes])))
    return noted


def _time_ours(checkpoint: Path) -> dict[str, Callable[[], Timing]]:
    engine = WanReference.from_pretrained(checkpoint)
    engine(replace(ASKED, steps=1))  # what a process does once is not measured
    blocks = engine.stages["high"].stack.blocks
    digests: dict[str, str] = {}

    def once(name: str, cache: CacheSpec | None, reuses: int) -> Timing:
        if cache is not None:
            engine.mount(cache)
        try:
            timing, output = time_run(blocks, lambda: engine(ASKED))
        finally:
            engine.unmount()
        hits = sum(decision.verdict == "reuse" for decision in output.decisions)
        if hits != reuses:
            raise BytesDiffer(f"{name}: {hits} of {STEPS} calls reused, {reuses} should have")
        if not reuses:
            digests[name] = digest(output.latents)
            require_same(digests)
        return timing

    runs = {"native": partial(once, "native", None, 0)}
    for cache, text in OURS.items():
        for share, reuses in REUSES.items():
            spec = parse_cache(text.format(computed=STEPS - reuses))
            runs[f"{cache}_{share}"] = partial(once, cache, spec, reuses)
        runs[f"{cache}_forced"] = partial(once, f"{cache}, forced", replace(spec, forced=True), 0)
    return runs


def _time_theirs(checkpoint: Path) -> dict[str, Callable[[], Timing]]:
    pipe = WanPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    blocks = tuple(pipe.transformer.blocks)
    with _first_block_residuals(blocks[0]) as residuals:
        _stock(pipe)
    mounts: dict[str, hooks.Mount] = {
        "stock_cachedit": hooks.stock_cache_dit,
        "first_block_cache": hooks.first_block_cache(residuals),
        "mag_cache": hooks.mag_cache,
        "taylorseer": hooks.taylorseer,
    }

    def once(mount: hooks.Mount, reuses: int) -> Timing:
        with mount(pipe, STEPS, reuses):
            return time_run(blocks, lambda: _stock(pipe))[0]

    runs: dict[str, Callable[[], Timing]] = {"stock_native": lambda: time_run(blocks, lambda: _stock(pipe))[0]}
    for cache, mount in mounts.items():
        for share, reuses in REUSES.items():
            runs[f"{cache}_{share}"] = partial(once, mount, reuses)
    return runs


def _stock(pipe: WanPipeline) -> Any:
    return pipe(
        prompt=PROMPT,
        height=ASKED.height or 320,
        width=ASKED.width or 320,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        generator=torch.Generator("cpu").manual_seed(7),
        output_type="latent",
    )


@contextmanager
def _first_block_residuals(block: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    residuals: list[torch.Tensor] = []
    handle = block.register_forward_hook(lambda _, inputs, output: residuals.append(output - inputs[0]))
    try:
        yield residuals
    finally:
        handle.remove()
