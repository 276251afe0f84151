"""`resolve`: the one place where every effective value of a request is decided, and where a request is checked.

Everything downstream reads the `ResolvedRequest` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_args

from wanref.checkpoint import Checkpoint
from wanref.flow_shift import check_mapped
from wanref.option import (
    check_boundary,
    check_choice,
    check_count,
    check_flow_shift,
    check_frames,
    check_generator,
    check_guidance,
    check_seed,
    check_side,
    check_texts,
)
from wanref.request import (
    SCHEDULER_CLASSES,
    EngineDefaults,
    Noise,
    OutputType,
    Request,
    ResolvedRequest,
    SchedulerName,
    Source,
)

DEFAULT_BOUNDARY_RATIO = 0.875
DEFAULT_SIZE = {"height": 480, "width": 832, "frames": 81}
"""diffusers' own defaults, for a checkpoint that recommends no size."""


def resolve(request: Request | Sequence[Request], defaults: EngineDefaults, checkpoint: Checkpoint) -> ResolvedRequest:
    """Decide every value of a request, or of a batch of requests that run as one.

    Raises ValueError, naming the option, the value and what is accepted, for everything that cannot be honoured as it
    was asked; nothing is rounded or dropped. A batch must agree on everything but prompts, seeds and generators.
    """
    if isinstance(request, Request):
        return _resolve_one(request, defaults, checkpoint)
    batch: object = request
    if not isinstance(batch, Sequence) or not batch or not all(isinstance(each, Request) for each in batch):
        raise ValueError(f"request={batch!r} is not accepted: give a Request, or a sequence of at least one.")
    return _merge([_resolve_one(each, defaults, checkpoint) for each in batch])


def _resolve_one(request: Request, defaults: EngineDefaults, checkpoint: Checkpoint) -> ResolvedRequest:
    sources: dict[str, Source] = {}
    prompts, negatives = _prompts(request, sources)
    check_count("videos_per_prompt", request.videos_per_prompt)
    check_choice("output_type", request.output_type, get_args(OutputType))
    size = {option: _size(option, request, defaults, checkpoint, sources) for option in DEFAULT_SIZE}
    _check_size(size, checkpoint)
    steps = _first(sources, "steps", request.steps, defaults.steps)
    check_count("steps", steps)
    if defaults.shift_map:
        check_mapped(steps, defaults.shift_map, f"steps={steps}")
    length = _first(sources, "max_sequence_length", request.max_sequence_length, defaults.max_sequence_length)
    check_count("max_sequence_length", length)
    guidance, guidance_2 = _guidance(request, defaults, checkpoint, sources)
    overridden = _overridden(request, defaults)
    return ResolvedRequest(
        prompts=prompts,
        negative_prompts=negatives,
        videos_per_prompt=request.videos_per_prompt,
        **size,
        steps=steps,
        guidance_scale=guidance,
        guidance_scale_2=guidance_2,
        boundary_ratio=_boundary(request, defaults, checkpoint, sources),
        flow_shift=_flow_shift(request, defaults, steps, checkpoint, sources),
        scheduler=_scheduler(request, defaults, checkpoint, sources),
        max_sequence_length=length,
        output_type=request.output_type,
        noise=_noise(request, len(prompts) * request.videos_per_prompt, sources),
        sources=sources,
        overridden=overridden,
    )


def _merge(resolved: Sequence[ResolvedRequest]) -> ResolvedRequest:
    first = resolved[0]
    own = {"prompts", "negative_prompts", "noise", "sources", "overridden"}
    for position, other in enumerate(resolved[1:], start=1):
        for option in (f.name for f in fields(first) if f.name not in own):
            mine, theirs = getattr(first, option), getattr(other, option)
            if mine != theirs:
                raise ValueError(
                    f"a batch runs as one: request 0 resolves to {option}={mine!r}, request {position} to {theirs!r}. "
                    "Give them the same value, or run them one after the other."
                )
    return replace(
        first,
        prompts=tuple(prompt for each in resolved for prompt in each.prompts),
        negative_prompts=tuple(prompt for each in resolved for prompt in each.negative_prompts),
        noise=tuple(noise for each in resolved for noise in each.noise),
        sources={
            option: source if all(each.sources[option] == source for each in resolved) else "mixed"
            for option, source in first.sources.items()
        },
        overridden=tuple(dict.fromkeys(option for each in resolved for option in each.overridden)),
    )


def _first(sources: dict[str, Source], option: str, requested: Any, engine: Any) -> Any:
    sources[option] = "engine" if requested is None else "request"
    return engine if requested is None else requested


def _prompts(request: Request, sources: dict[str, Source]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    prompts = check_texts("prompt", request.prompt)
    if request.negative_prompt is None:
        sources["negative_prompt"] = "absent"
        return prompts, ("",) * len(prompts)
    negatives = check_texts("negative_prompt", request.negative_prompt)
    if isinstance(request.negative_prompt, str):
        negatives *= len(prompts)
    if len(negatives) != len(prompts):
        raise ValueError(
            f"negative_prompt={request.negative_prompt!r} has {len(negatives)} texts for {len(prompts)} prompts: give "
            "one, or one a prompt."
        )
    sources["negative_prompt"] = "text" if any(negatives) else "empty"
    return prompts, negatives


def _size(
    option: str, request: Request, defaults: EngineDefaults, checkpoint: Checkpoint, sources: dict[str, Source]
) -> int:
    candidates: tuple[tuple[Source, int | None], ...] = (
        ("request", getattr(request, option)),
        ("engine", getattr(defaults, option)),
        ("checkpoint", getattr(checkpoint.size, option, None)),
        ("default", DEFAULT_SIZE[option]),
    )
    sources[option], value = next((source, value) for source, value in candidates if value is not None)
    return check_count(option, value)


def _check_size(size: Mapping[str, int], checkpoint: Checkpoint) -> None:
    frames_per_latent, pixels_per_latent = checkpoint.latent_scale
    for option, patch in zip(("height", "width"), checkpoint.transformer["patch_size"][1:], strict=True):
        check_side(option, size[option], pixels_per_latent * patch)
    check_frames(size["frames"], frames_per_latent)


def _guidance(
    request: Request, defaults: EngineDefaults, checkpoint: Checkpoint, sources: dict[str, Source]
) -> tuple[float, float | None]:
    scale = check_guidance(
        "guidance_scale", _first(sources, "guidance_scale", request.guidance_scale, defaults.guidance_scale)
    )
    if not checkpoint.has_boundary:
        for where, value in (("request", request.guidance_scale_2), ("engine", defaults.guidance_scale_2)):
            if value is not None:
                raise ValueError(
                    f"guidance_scale_2={value!r} ({where}) is not accepted: this checkpoint has one expert. "
                    "Leave it out; guidance_scale holds for every step."
                )
        return scale, None
    if request.guidance_scale_2 is None and defaults.guidance_scale_2 is None:
        sources["guidance_scale_2"] = sources["guidance_scale"]
        return scale, scale
    second = _first(sources, "guidance_scale_2", request.guidance_scale_2, defaults.guidance_scale_2)
    return scale, check_guidance("guidance_scale_2", second)


def _boundary(
    request: Request, defaults: EngineDefaults, checkpoint: Checkpoint, sources: dict[str, Source]
) -> float | None:
    candidates: tuple[tuple[Source, float | None], ...] = (
        ("engine", defaults.boundary_ratio),
        ("request", request.boundary_ratio),
        ("checkpoint", checkpoint.boundary_ratio),
        ("default", DEFAULT_BOUNDARY_RATIO),
    )
    if not checkpoint.has_boundary:
        for where, value in candidates[:2]:
            if value is not None:
                raise ValueError(
                    f"boundary_ratio={value!r} ({where}) is not accepted: this checkpoint has one expert, which runs "
                    "every step. Leave it out."
                )
        return None
    if request.boundary_ratio is not None:
        check_boundary(request.boundary_ratio)
    sources["boundary_ratio"], value = next((source, value) for source, value in candidates if value is not None)
    return check_boundary(value)


def _overridden(request: Request, defaults: EngineDefaults) -> tuple[str, ...]:
    asked, forced = request.boundary_ratio, defaults.boundary_ratio
    return ("boundary_ratio",) if asked is not None and forced is not None and asked != forced else ()


def _flow_shift(
    request: Request, defaults: EngineDefaults, steps: int, checkpoint: Checkpoint, sources: dict[str, Source]
) -> float:
    candidates: tuple[tuple[Source, float | None], ...] = (
        ("request", request.flow_shift),
        ("engine", defaults.shift_map.get(steps)),
        ("engine", defaults.flow_shift),
        ("checkpoint", checkpoint.flow_shift),
        ("default", 1.0),
    )
    sources["flow_shift"], shift = next((source, value) for source, value in candidates if value is not None)
    return check_flow_shift("flow_shift", shift)


def _scheduler(
    request: Request, defaults: EngineDefaults, checkpoint: Checkpoint, sources: dict[str, Source]
) -> SchedulerName:
    if request.scheduler is None and defaults.scheduler is None:
        for name, class_name in SCHEDULER_CLASSES.items():
            if class_name == checkpoint.scheduler_class:
                sources["scheduler"] = "checkpoint"
                return name
        raise ValueError(
            f"scheduler: the checkpoint's own, {checkpoint.scheduler_class}, is not one that wanref runs. "
            f"Name one of {', '.join(SCHEDULER_CLASSES)}."
        )
    chosen: SchedulerName = _first(sources, "scheduler", request.scheduler, defaults.scheduler)
    check_choice("scheduler", chosen, tuple(SCHEDULER_CLASSES))
    return chosen


def _noise(request: Request, videos: int, sources: dict[str, Source]) -> tuple[Noise, ...]:
    if request.seed is not None and request.generator is not None:
        raise ValueError(
            f"seed={request.seed!r} and generator are both given, and contradict each other: leave one out."
        )
    sources["seed"] = "request"
    if request.generator is not None:
        if not isinstance(request.generator, Sequence):
            return (Noise(videos, generator=check_generator(request.generator)),)
        if len(request.generator) != videos:
            raise ValueError(
                f"generator={request.generator!r} has {len(request.generator)} for {videos} videos: give one, or one "
                "a video."
            )
        return tuple(Noise(1, generator=check_generator(generator)) for generator in request.generator)
    if request.seed is None:
        sources["seed"] = "drawn"
        return (Noise(videos),)
    if not isinstance(request.seed, Sequence):
        return (Noise(videos, seed=check_seed(request.seed)),)
    if len(request.seed) != videos:
        raise ValueError(
            f"seed={request.seed!r} has {len(request.seed)} for {videos} videos: give one, or one a video."
        )
    return tuple(Noise(1, seed=check_seed(seed)) for seed in request.seed)
