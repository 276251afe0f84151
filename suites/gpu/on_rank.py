"""What the tests of real checkpoints run on each rank. A module of its own: ranks are started afresh and import it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from suites.support import Run, load_engine, observed
from wanref.checkpoint import Checkpoint
from wanref.denoise import RequestAborted
from wanref.observe import Event, ExchangeEvent, StepEvent
from wanref.pipeline import WanReference
from wanref.request import Request

ABORT_DURING = 1


@dataclass(frozen=True, slots=True)
class Evidence:
    """One rank: a request, another, the first again; one that was aborted before `stopped`; the first again."""

    first: Run
    other: Run
    again: Run
    stopped: int | None
    after_abort: Run


def asked(checkpoint: Checkpoint) -> Request:
    """A small request, of the size that the checkpoint recommends if it recommends one."""
    size = checkpoint.size
    height, width, frames = (256, 448, 17) if size is None else (size.height, size.width, size.frames)
    return Request(
        prompt="a red square moving left",
        negative_prompt="blurred",
        height=height,
        width=width,
        frames=frames,
        steps=4,
        guidance_scale=4.0,
        guidance_scale_2=3.0 if checkpoint.has_boundary else None,
        seed=7,
    )


def gather(source: str, topology: str, device: str, dtype: str) -> Evidence:
    """SPMD, on every rank."""
    if device == "cpu":
        torch.set_num_threads(1)  # bytes may depend on it, and it must be the same in every topology
    engine = load_engine(source, topology, dtype, device=device)
    request = asked(engine.checkpoint)
    unguided = replace(request, prompt="a blue circle", steps=3, guidance_scale=1, guidance_scale_2=None, seed=8)
    return Evidence(
        first=observed(engine, request),
        other=observed(engine, unguided),
        again=observed(engine, request),
        stopped=_aborted(engine, request),
        after_abort=observed(engine, request),
    )


def _aborted(engine: WanReference, request: Request) -> int | None:
    """The step before which this rank stopped, after the last rank alone asked for it."""

    def abort(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step.index == ABORT_DURING:
            engine.abort()

    engine.observer = abort if engine.place.rank == engine.topology.world_size - 1 else None
    try:
        engine(request)
    except RequestAborted as aborted:
        return aborted.step
    return None


def log_problems(run: Run) -> list[ExchangeEvent | int]:
    """Exchanges that were not completed, and gaps in their numbers."""
    gaps = [b.sequence for a, b in zip(run.log, run.log[1:], strict=False) if b.sequence != a.sequence + 1]
    return [*(event for event in run.log if not event.completed), *gaps]
