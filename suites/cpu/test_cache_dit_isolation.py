"""A mounted cache-dit touches no module and no class, and two engines in one process do not know of each other."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_dit
import diffusers
import pytest
import torch
from cache_dit.caching.cache_contexts.cache_context import CachedContext

from suites.cached import MICRO_DUAL, hits_and_misses, output_of
from suites.stock import stock_pipeline
from suites.support import defaults, fingerprint, load_engine
from wanref.caching.spec import CacheSpec
from wanref.observe import Event, StepEvent
from wanref.pipeline import WanReference
from wanref.request import Request
from wanref.stage import BlockStack, Stage

pytestmark = pytest.mark.cpu

REQUEST = Request(prompt="a red circle", steps=12, seed=3, output_type="latent")
OPTIONS = {"fn": 1, "threshold": 0.3, "max_warmup_steps": 2, "low_threshold": 0.3, "taylorseer_order": 1}
SPEC = CacheSpec("cache-dit", OPTIONS)


def anatomy(value: Any, path: str = "engine", seen: dict[int, str] | None = None) -> dict[str, Any]:
    """Everything that hangs on an engine, by path: types, attributes, hooks, values. Shared objects once."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        return {path: (type(value), value.dtype, tuple(value.shape), hash(value.detach().numpy().tobytes()))}
    if isinstance(value, str | int | float | bool | torch.dtype | torch.device | Path | type | None):
        return {path: value}
    if id(value) in seen:
        return {path: f"as {seen[id(value)]}"}
    seen[id(value)] = path
    found: dict[str, Any] = {path: type(value)}
    children: dict[Any, Any] = dict(getattr(value, "__dict__", {}))
    if isinstance(value, dict):
        children.update(value)
    elif isinstance(value, list | tuple | set):
        children.update(enumerate(value))
    for name in getattr(type(value), "__slots__", ()):
        children[name] = getattr(value, name, None)
    found[f"{path}, names"] = list(map(str, children))
    for name, child in children.items():
        found.update(anatomy(child, f"{path}.{name}", seen))
    return found


def classes(engine: WanReference, pipeline: type = diffusers.WanPipeline) -> dict[str, dict[str, int]]:
    """The attributes of every class that an engine's modules are made of, by identity; and a pipeline's."""
    kinds = {pipeline, diffusers.DiffusionPipeline, torch.nn.ModuleList, Stage, BlockStack, WanReference}
    for stage in engine.stages.values():
        kinds.update(kind for module in stage.transformer.modules() for kind in type(module).__mro__)
    return {
        f"{kind.__module__}.{kind.__qualname__}": {name: id(value) for name, value in vars(kind).items()}
        for kind in kinds - {object}
    }


def body(engine: WanReference) -> dict[str, Any]:
    """What an engine computes with: its stages."""
    return anatomy(engine.stages, "stages")


@pytest.mark.parametrize("layout", ["single", "dual", "high only", "low only"])
def test_after_unmount_an_engine_is_one_that_was_never_enabled(tiny: Callable[..., Path], layout: str) -> None:
    boundary = {"high only": 0.0, "low only": 1.0}.get(layout)
    folder = tiny(layout=layout)
    never, once = (load_engine(folder, defaults=defaults(boundary_ratio=boundary)) for _ in range(2))
    before, kinds = never(REQUEST), classes(once)
    own = {name.removeprefix("low_"): value for name, value in OPTIONS.items()} | {"threshold": 0.9}
    options = {}
    for expert in once.checkpoint.experts:
        options.update({f"low_{name}" if expert == "low" else name: value for name, value in own.items()})
    once.mount(CacheSpec("cache-dit", options))
    during = []
    once.observer = lambda event: during.append(body(once)) if _is_step(event, 6) else None
    cached = once(REQUEST)
    once.observer = None
    once.unmount()
    assert min(hits_and_misses(cached.decisions)) > 0
    assert body(once) == body(never)
    assert during == [body(never)], "nor is anything there while it runs"
    assert classes(once) == kinds
    assert set(vars(once)) == set(vars(never))
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is CachedContext], "a context outlived its cache"
    assert fingerprint(once(REQUEST).latents) == fingerprint(before.latents)


def test_the_comparison_sees_what_stock_cache_dit_leaves_behind(tiny: Callable[..., Path]) -> None:
    engine = load_engine(tiny(), defaults=defaults())
    pipe = stock_pipeline(tiny(), torch.float32)
    pipe.transformer = engine.stages["high"].transformer
    pipe.__class__ = type("WanPipeline", (diffusers.WanPipeline,), {})
    before, kinds = body(engine), classes(engine, type(pipe))
    cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(Fn_compute_blocks=1))
    assert classes(engine, type(pipe)) != kinds, "the class of the pipeline is patched"
    cache_dit.disable_cache(pipe)
    assert body(engine) != before, "trap 8"


def _is_step(event: Event, index: int) -> bool:
    return isinstance(event, StepEvent) and event.step.index == index


def test_two_engines_in_one_process_do_not_disturb_each_other() -> None:
    one, two, plain = (load_engine(MICRO_DUAL, defaults=defaults()) for _ in range(3))
    other = CacheSpec("cache-dit", {**OPTIONS, "fn": 2, "threshold": 0.5, "low_max_warmup_steps": 3})
    alone = output_of(one, REQUEST, SPEC), output_of(two, REQUEST, other), plain(REQUEST)
    assert len({fingerprint(output.latents).digest for output in alone}) == 3
    two.mount(other)
    inner = []

    def interleave(event: Event) -> None:
        if _is_step(event, 7):
            inner.extend([two(REQUEST), plain(REQUEST)])

    one.observer = interleave
    outer = output_of(one, REQUEST, SPEC)
    again = two(REQUEST)
    for output, reference in zip((outer, *inner, again), (*alone, alone[1]), strict=True):
        assert fingerprint(output.latents) == fingerprint(reference.latents)
        assert [d.judgement for d in output.decisions] == [d.judgement for d in reference.decisions]
