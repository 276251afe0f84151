"""What all renders of a campaign share: the checkpoint, how it is loaded, and what is asked beside prompt and seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from wanref.checkpoint import open_checkpoint
from wanref.request import EngineDefaults, OutputType, Request, SchedulerName
from wanref.topology import parse_topology

if TYPE_CHECKING:
    from oracle.campaign.pair import Pair
    from wanref.pipeline import WanReference


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value that is None is the checkpoint's. checkpoint: a folder, or a hub id `org/name@revision`."""

    checkpoint: str
    topology: str = "pp1cfg1"
    dtype: str = "float32"
    device: str = "cpu"
    steps: int = 50
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    boundary_ratio: float | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    flow_shift: float | None = None
    scheduler: SchedulerName | None = None
    negative_prompt: str | None = None

    @property
    def world_size(self) -> int:
        return parse_topology(self.topology).world_size

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def key(self) -> dict[str, Any]:
        """What a render depends on: the same, with the checkpoint's own digest in place of where it lies."""
        return self.as_json() | {"checkpoint": open_checkpoint(self.checkpoint).identity()}


def open_engine(setting: Setting) -> WanReference:
    """This rank's engine. Raises ValueError for what cannot be honoured."""
    from wanref.pipeline import WanReference

    return WanReference.from_pretrained(
        setting.checkpoint,
        topology=setting.topology,
        dtype=setting.dtype,
        device=setting.device,
        # Of an engine's own, since there it decides which experts are loaded.
        defaults=EngineDefaults(boundary_ratio=setting.boundary_ratio),
    )


def request_of(setting: Setting, pair: Pair, steps: int | None = None, output_type: OutputType = "video") -> Request:
    """The request of one pair; `steps` instead of the setting's, for the control."""
    return Request(
        prompt=pair.prompt,
        negative_prompt=setting.negative_prompt,
        height=setting.height,
        width=setting.width,
        frames=setting.frames,
        steps=setting.steps if steps is None else steps,
        guidance_scale=setting.guidance_scale,
        guidance_scale_2=setting.guidance_scale_2,
        flow_shift=setting.flow_shift,
        scheduler=setting.scheduler,
        seed=pair.seed,
        output_type=output_type,
    )
