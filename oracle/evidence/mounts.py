"""Other people's caches on a stock pipeline: stock cache-dit, and the hooks of diffusers.

Each as its documentation mounts it, with options that make it fire within a few steps of a small model. Its twin is the
same cache with options under which, by its own documentation, it reuses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from oracle.evidence.subjects import CountedRule, FirstBlockRule

EVERY_TIMESTEP = (-1, 1001)


@dataclass(frozen=True, slots=True)
class Mount:
    """name, options: for the manifest. enable, disable: called with the pipeline. never: options of its forced twin,
    None where it has none. claims: how many hits its own statistics name, None where it keeps none. rule: by which it
    decides, as far as that is replayed."""

    name: str
    options: Mapping[str, Any]
    apply: Callable[[Any, Mapping[str, Any]], None]
    disable: Callable[[Any], None]
    never: Mapping[str, Any] | None = None
    claims: Callable[[Any], int] | None = None
    rule: FirstBlockRule | CountedRule | None = None

    def enable(self, pipe: Any) -> None:
        self.apply(pipe, self.options)

    @property
    def forced(self) -> Mount | None:
        return None if self.never is None else replace(self, options={**self.options, **self.never})


def transformers_of(pipe: Any) -> list[Any]:
    return [each for each in (pipe.transformer, pipe.transformer_2) if each is not None]


def _cache_dit(pipe: Any, options: Mapping[str, Any]) -> None:
    import cache_dit

    for name in [each for each in logging.root.manager.loggerDict if each.startswith("cache_dit")]:
        logging.getLogger(name).setLevel(logging.ERROR)  # each has a level of its own, and prints a dozen lines
    cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(**options))


def _disable_cache_dit(pipe: Any) -> None:
    import cache_dit

    cache_dit.disable_cache(pipe)


def _cache_dit_claims(pipe: Any) -> int:
    """Steps that it calls cached, of all branches and experts. An expert's statistics are listed more than once."""
    import cache_dit

    hits = 0
    for transformer in transformers_of(pipe):
        (stats, *_) = cache_dit.summary(transformer, logging=False)
        hits += len(stats.cached_steps) + len(stats.cfg_cached_steps)
    return hits


def _hook(config: str, **fixed: Any) -> Callable[[Any, Mapping[str, Any]], None]:
    """A cache of diffusers by the name of its configuration."""

    def apply(pipe: Any, options: Mapping[str, Any]) -> None:
        import diffusers

        own = dict(fixed)
        if "current_timestep_callback" in own:
            own["current_timestep_callback"] = lambda: float(pipe.current_timestep)
        for transformer in transformers_of(pipe):
            transformer.enable_cache(getattr(diffusers, config)(**own, **options))

    return apply


def _disable_hook(pipe: Any) -> None:
    for transformer in transformers_of(pipe):
        transformer.disable_cache()


def mounts(steps: int) -> dict[str, Mount]:
    """By name, for requests of so many steps."""
    listed = (
        Mount(
            "cache-dit",
            {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "residual_diff_threshold": 0.5, "max_warmup_steps": 2},
            _cache_dit,
            _disable_cache_dit,
            {"residual_diff_threshold": 0.0},
            _cache_dit_claims,
            FirstBlockRule(0.5, warmup=2),
        ),
        Mount(
            "first-block-cache",
            {"threshold": 0.5},
            _hook("FirstBlockCacheConfig"),
            _disable_hook,
            {"threshold": -1.0},
            rule=FirstBlockRule(0.5, folded=True),
        ),
        Mount(
            "mag-cache",
            {"threshold": 0.5, "max_skip_steps": 2, "retention_ratio": 0.25, "num_inference_steps": steps},
            _hook("MagCacheConfig", mag_ratios=[1.0] * steps),
            _disable_hook,
            {"max_skip_steps": 0},
            # Ratios of 1 never add an error: it skips as often in a row as it may.
            rule=CountedRule(first=round(0.25 * steps), between=2),
        ),
        Mount(
            "taylorseer",
            {"cache_interval": 2, "disable_cache_before_step": 2, "cache_identifiers": [r"blocks\.\d+"]},
            _hook("TaylorSeerCacheConfig"),
            _disable_hook,
            {"disable_cache_before_step": steps},
            rule=CountedRule(first=2, between=1),
        ),
        Mount("sea-cache", {"threshold": 0.5}, _hook("SeaCacheConfig"), _disable_hook, {"threshold": 0.0}),
        Mount(
            "pyramid-attention-broadcast",
            {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": EVERY_TIMESTEP},
            _hook("PyramidAttentionBroadcastConfig", current_timestep_callback=None),
            _disable_hook,
            {"spatial_attention_block_skip_range": 1},
            rule=CountedRule(first=1, between=1),
        ),
        Mount(
            "faster-cache",
            {"spatial_attention_block_skip_range": 2, "tensor_format": "BCFHW"},
            _hook("FasterCacheConfig", current_timestep_callback=None),
            _disable_hook,
        ),
    )
    return {mount.name: mount for mount in listed}
