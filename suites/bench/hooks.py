"""Other people's caches on the stock pipeline: stock cache-dit, and the hooks of diffusers that support Wan.

Each is brought to a share of steps that reuse by its own options, so that the work it skips is like ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations, pairwise

import cache_dit
import torch
from cache_dit import BlockAdapter, DBCacheConfig, ForwardPattern
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig, WanPipeline

Mount = Callable[[WanPipeline, int, int], AbstractContextManager[None]]
"""Called with the pipeline, its steps, and how many of them are to reuse."""

for name in [each for each in logging.root.manager.loggerDict if each.startswith("cache_dit")]:
    logging.getLogger(name).setLevel(logging.ERROR)  # each has a level of its own, and prints a dozen lines a run
NEVER = 1_000  # an interval that no run of the bench reaches


@contextmanager
def stock_cache_dit(pipe: WanPipeline, steps: int, reuses: int) -> Iterator[None]:
    config = DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        residual_diff_threshold=0.99,
        max_warmup_steps=steps - reuses,
        num_inference_steps=steps,
        enable_separate_cfg=False,
    )
    adapter = BlockAdapter(
        pipe=pipe,
        transformer=pipe.transformer,
        blocks=pipe.transformer.blocks,
        forward_pattern=ForwardPattern.Pattern_2,
        has_separate_cfg=False,  # guidance is off: one forward a step
    )
    cache_dit.enable_cache(adapter, cache_config=config)
    try:
        yield
    finally:
        cache_dit.disable_cache(adapter)


@contextmanager
def mag_cache(pipe: WanPipeline, steps: int, reuses: int) -> Iterator[None]:
    config = MagCacheConfig(
        mag_ratios=[1.0] * steps,
        max_skip_steps=NEVER,
        retention_ratio=(steps - reuses) / steps,
        num_inference_steps=steps,
    )
    with _diffusers_hook(pipe, config):
        yield


@contextmanager
def taylorseer(pipe: WanPipeline, steps: int, reuses: int) -> Iterator[None]:
    # It computes the steps before `disable_cache_before_step`, and one more behind it.
    config = TaylorSeerCacheConfig(
        cache_interval=NEVER,
        disable_cache_before_step=steps - reuses - 1,
        taylor_factors_dtype=torch.float32,
        cache_identifiers=[r"blocks\.\d+"],  # without them it hooks nothing on Wan
    )
    with _diffusers_hook(pipe, config):
        yield


def first_block_cache(residuals: Sequence[torch.Tensor]) -> Mount:
    """It has a threshold alone, found by its rule on an uncached run's residuals of the first block, one a step."""
    changes = sorted(_change(one, other) for one, other in combinations(residuals, 2))
    # Between two changes: on one of them, how the hook rounds its division would decide.
    limits = [(low + high) / 2 for low, high in pairwise(changes)]

    @contextmanager
    def mount(pipe: WanPipeline, steps: int, reuses: int) -> Iterator[None]:
        threshold = min(limits, key=lambda limit: abs(_reuses(residuals, limit) - reuses))
        with _diffusers_hook(pipe, FirstBlockCacheConfig(threshold=threshold)):
            yield

    return mount


def _reuses(residuals: Sequence[torch.Tensor], threshold: float) -> int:
    """How often the rule reuses: each residual is held against that of the last step that computed."""
    computed, reuses = residuals[0], 0
    for residual in residuals[1:]:
        if _change(computed, residual) <= threshold:
            reuses += 1
        else:
            computed = residual
    return reuses


def _change(before: torch.Tensor, now: torch.Tensor) -> float:
    return float((now - before).abs().mean() / before.abs().mean())


@contextmanager
def _diffusers_hook(pipe: WanPipeline, config: object) -> Iterator[None]:
    pipe.transformer.enable_cache(config)
    try:
        yield
    finally:
        pipe.transformer.disable_cache()
