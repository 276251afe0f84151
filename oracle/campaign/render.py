"""Renders pairs on an engine and gathers what its ranks know of each: frames, latents, hits, and the cache's state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oracle.campaign.metrics import measure
from oracle.campaign.observing import observing
from oracle.campaign.pair import Calls, Pair, Row
from oracle.campaign.refusal import CampaignError
from oracle.campaign.setting import Setting, request_of
from wanref.observe import Event, StateEvent

if TYPE_CHECKING:
    from wanref.caching.spec import CacheSpec
    from wanref.output import Output
    from wanref.pipeline import WanReference

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has of a render. video, latents: on the rank that decodes alone, see `Render`."""

    rank: int
    video: Floats | None
    latents: Floats | None
    calls: tuple[Calls, ...]
    begun: Mapping[str, str]
    ended: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Render:
    """One video: [frames, height, width, 3] in [0, 1], its final latents [channels, frames, height, width], the cache's

    calls in all stages, and digests of what it remembered when the request began and when it had ended.
    """

    video: Floats
    latents: Floats
    calls: tuple[Calls, ...]
    begun: str
    ended: str

    def digest(self) -> str:
        """Of latents and frames."""
        digest = hashlib.sha256()
        for array in (self.latents, self.video):
            digest.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def render_part(
    engine: WanReference, setting: Setting, pair: Pair, cache: CacheSpec | None, steps: int | None = None
) -> Part:
    """On each rank: one pair, natively or with a cache, which is mounted for it alone. steps: the control's."""
    request = request_of(setting, pair, steps)
    states: dict[str, Mapping[str, str]] = {}

    def keep(event: Event, /) -> None:
        if isinstance(event, StateEvent):
            states[event.moment] = event.digests

    if cache is not None:
        engine.mount(cache)
    try:
        with observing(engine, keep):
            output = engine(request)
    finally:
        if cache is not None:
            engine.unmount()
    owner = output.owns_video and output.video is not None
    return Part(
        rank=output.rank,
        video=output.video[0] if owner and output.video is not None else None,
        latents=output.latents[0].cpu().numpy() if owner else None,
        calls=_calls(output, engine),
        begun=states.get("begin", {}),
        ended=states.get("end", {}),
    )


def join_parts(parts: Sequence[Part]) -> Render:
    """One render from the parts of all ranks. Raises CampaignError unless exactly one of them has the video."""
    owners = [part for part in parts if part.video is not None and part.latents is not None]
    if len(owners) != 1:
        raise CampaignError(f"render: {len(owners)} of {len(parts)} ranks have the video, not one.")
    video, latents = owners[0].video, owners[0].latents
    assert video is not None
    assert latents is not None
    calls = sorted((calls for part in parts for calls in part.calls), key=lambda c: (c.expert, c.branch, c.stage))
    return Render(video, latents, tuple(calls), _digest(p.begun for p in parts), _digest(p.ended for p in parts))


def row_of_renders(pair: Pair, native: Render, cached: Render) -> Row:
    """The pair's row. Raises CampaignError for a video or latents that are not finite."""
    return Row(
        pair=pair,
        metrics=measure(native.video, cached.video, native.latents, cached.latents),
        calls=cached.calls,
        begun=cached.begun,
        ended=cached.ended,
        native=native.digest(),
        cached=cached.digest(),
    )


def _calls(output: Output, engine: WanReference) -> tuple[Calls, ...]:
    """By expert and branch. A run without a cache decides nothing and computes all: counted from its schedule."""
    stack = len(next(iter(engine.stages.values())).stack)
    counts: dict[tuple[str, str], list[int]] = {}
    if output.decisions:
        for decision in output.decisions:
            step = decision.where.step
            count = counts.setdefault((step.expert, decision.where.branch), [0, 0, 0])
            count[decision.verdict == "reuse"] += 1
            count[2] += decision.computed_blocks
    else:
        for step in output.schedule:
            for branch in engine.place.branches(step.guided):
                count = counts.setdefault((step.expert, branch), [0, 0, 0])
                count[0] += 1
                count[2] += stack
    stage = engine.place.stage
    return tuple(
        Calls(expert, branch, stage, computed, reused, blocks, (computed + reused) * stack)
        for (expert, branch), (computed, reused, blocks) in counts.items()
    )


def _digest(states: Any) -> str:
    """Of every rank's digests, in rank order."""
    return hashlib.sha256(repr([sorted(state.items()) for state in states]).encode()).hexdigest()
