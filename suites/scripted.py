"""What tests of a cache without an engine share: schedules, calls of scripted blocks, dictated embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fixtures.fakes import ScriptedStack
from wanref.caching.base import Begin, StackCall, Where
from wanref.schedule import Schedule, Step
from wanref.topology import Branch, Place, Topology

ALONE = Topology()
HERE = ALONE.place(0)


def schedule_of(*steps: tuple[str, float], scale: float = 5.0) -> Schedule:
    """Steps by (expert, sigma)."""
    return Schedule(tuple(Step(i, 1000 * sigma, sigma, expert, scale) for i, (expert, sigma) in enumerate(steps)))  # type: ignore[arg-type]


def begin_of(schedule: Schedule, topology: Topology = ALONE, rank: int = 0, stages: Any = None) -> Begin:
    stages = {} if stages is None else stages
    return Begin(schedule, topology.place(rank), stages, (1, 1, 1, 2, 2), torch.float32, torch.device("cpu"))


def call_of(
    stack: ScriptedStack,
    step: Step,
    hidden: torch.Tensor,
    branch: Branch = "cond",
    place: Place = HERE,
    request: int = 0,
) -> StackCall:
    """A call of scripted blocks."""
    where = Where(request, step, branch, place)
    return StackCall(where, stack, hidden, branch, step.timestep, None)  # type: ignore[arg-type]


class DictatedStage:
    """Embeds timesteps as it is told: {timestep: (embedding, projection)}. `shapes` are those it was asked at."""

    def __init__(self, embeddings: Mapping[float, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.embeddings = embeddings
        self.shapes: list[tuple[int, ...]] = []

    def time_embedding(self, timestep: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append(tuple(timestep.shape))
        return self.embeddings[float(timestep[0])]
