"""What a caller asks, what an engine presumes, and what `wanref.resolve` makes of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from wanref.checkpoint import Expert
from wanref.flow_shift import check_mapped, parse_flow_shift_by_steps
from wanref.option import check_boundary, check_choice, check_count, check_flow_shift, check_guidance

if TYPE_CHECKING:
    import torch

OutputType = Literal["video", "latent"]
SchedulerName = Literal["unipc", "euler", "dpm++"]
Source = Literal["request", "engine", "checkpoint", "default", "absent", "empty", "text", "drawn", "mixed"]

SCHEDULER_CLASSES: Mapping[SchedulerName, str] = {
    "unipc": "UniPCMultistepScheduler",
    "euler": "FlowMatchEulerDiscreteScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation. What is left at None is decided by the engine's defaults, then by the checkpoint.

    prompt, negative_prompt: a text or one text a prompt; an absent negative prompt embeds as the empty one.
    height, width: pixels. frames: 4n + 1 of them. videos_per_prompt: outputs for each prompt, in prompt order.
    boundary_ratio: the low-noise expert takes over below this share of the training timesteps, in [0, 1].
    seed: an integer (one generator draws all videos, as diffusers does with one), or one for each video.
    generator: the caller's own instead, likewise. With neither, rank 0 draws a seed and reports it.
    """

    prompt: str | Sequence[str]
    negative_prompt: str | Sequence[str] | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    boundary_ratio: float | None = None
    flow_shift: float | None = None
    scheduler: SchedulerName | None = None
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    videos_per_prompt: int = 1
    max_sequence_length: int | None = None
    output_type: OutputType = "video"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDefaults:
    """What an engine decides for requests that leave a value open; checked when it is built.

    `boundary_ratio` alone is an override: it wins over the request's. `flow_shift_by_steps` (a mapping or
    "27:12,40:5") binds the engine to the step counts that it names.
    """

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int = 50
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    boundary_ratio: float | None = None
    flow_shift: float | None = None
    flow_shift_by_steps: str | Mapping[int, float] | None = None
    scheduler: SchedulerName | None = None
    max_sequence_length: int = 512

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_count("max_sequence_length", self.max_sequence_length)
        for option in ("height", "width", "frames"):
            if getattr(self, option) is not None:
                check_count(option, getattr(self, option))
        check_guidance("guidance_scale", self.guidance_scale)
        if self.guidance_scale_2 is not None:
            check_guidance("guidance_scale_2", self.guidance_scale_2)
        if self.boundary_ratio is not None:
            check_boundary(self.boundary_ratio)
        if self.flow_shift is not None:
            check_flow_shift("flow_shift", self.flow_shift)
        if self.scheduler is not None:
            check_choice("scheduler", self.scheduler, tuple(SCHEDULER_CLASSES))
        if self.flow_shift_by_steps is not None:
            object.__setattr__(self, "flow_shift_by_steps", parse_flow_shift_by_steps(self.flow_shift_by_steps))
            check_mapped(self.steps, self.shift_map, "its own default")

    @property
    def shift_map(self) -> Mapping[int, float]:
        """The parsed `flow_shift_by_steps`; empty without one."""
        return self.flow_shift_by_steps if isinstance(self.flow_shift_by_steps, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Noise:
    """Where the initial latents of some successive videos are drawn from: a seed, or the caller's generator.

    With neither, rank 0 draws the seed.
    """

    videos: int
    seed: int | None = None
    generator: torch.Generator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """Every effective value of a request. `prompts` and `negative_prompts` are of equal length.

    `guidance_scale_2` and `boundary_ratio` are None on a checkpoint with one expert. `sources` says for every value
    whether the request, the engine, the checkpoint or a default decided (`mixed` where the requests of a batch differ
    in that); `overridden` names request options over which the engine won.
    """

    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...]
    videos_per_prompt: int
    height: int
    width: int
    frames: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    boundary_ratio: float | None
    flow_shift: float
    scheduler: SchedulerName
    max_sequence_length: int
    output_type: OutputType
    noise: tuple[Noise, ...]
    sources: Mapping[str, Source] = field(hash=False)
    overridden: tuple[str, ...] = ()

    @property
    def videos(self) -> int:
        """The batch size: prompts times videos a prompt."""
        return len(self.prompts) * self.videos_per_prompt

    def guidance(self, expert: Expert) -> float:
        """The guidance scale that `expert` runs at."""
        return self.guidance_scale if expert == "high" or self.guidance_scale_2 is None else self.guidance_scale_2

    def as_json(self) -> dict[str, Any]:
        """Plain values for a manifest. A caller's generator is written as being there: its state is not compared."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "noise"}
        plain["sources"] = dict(self.sources)
        plain["noise"] = [
            {"videos": n.videos, "seed": n.seed, "generator": n.generator is not None} for n in self.noise
        ]
        return plain

    def digest(self) -> str:
        """SHA-256 of `as_json`: ranks that were given the same request agree on it."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()
