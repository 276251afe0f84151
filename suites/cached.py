"""What tests of caches share: a request under a cache, and its decisions in groups, each beside its replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fixtures.fakes import ScriptedStack
from oracle.verdict.decisions import Ruling
from suites.support import defaults, load_engine
from wanref.caching.base import Begin, Decision, StackCall, Where
from wanref.caching.spec import CacheSpec
from wanref.output import Output
from wanref.pipeline import WanReference
from wanref.request import Request
from wanref.schedule import Schedule, Step
from wanref.topology import Branch, Place, Topology

MICRO = Path(__file__).parents[1] / "fixtures" / "micro"
MICRO_DUAL = Path(__file__).parents[1] / "fixtures" / "micro-dual"

ALONE = Topology()
HERE = ALONE.place(0)

Group = tuple[str, Branch, int]
"""(expert, branch, stage)."""


def run_cached(engine: WanReference, cache: str | CacheSpec, request: Request) -> Output:
    """One request under `cache`, which is taken off again however it ends."""
    engine.mount(cache)
    try:
        return engine(request)
    finally:
        engine.unmount()


def decisions_on_rank(folder: Path, topology: str, cache: str, request: Request) -> tuple[Decision, ...]:
    """For ranks."""
    return tuple(run_cached(load_engine(folder, topology, defaults=defaults()), cache, request).decisions)


def groups(decisions: Iterable[Decision]) -> dict[Group, list[Decision]]:
    """The decisions of each rule state, in order."""
    grouped: dict[Group, list[Decision]] = {}
    for decision in decisions:
        where = decision.where
        grouped.setdefault((where.step.expert, where.branch, where.place.stage), []).append(decision)
    return grouped


def rulings(decisions: Iterable[Decision]) -> list[Ruling]:
    """What the rule said, to be held against its replay: under `forced`, the shadow."""
    judgements = [decision.judgement for decision in decisions]
    assert all(judgement.accumulated_after is not None for judgement in judgements)
    return [Ruling(j.verdict == "reuse", float(j.accumulated_after or 0.0)) for j in judgements]


def signals(decisions: Iterable[Decision]) -> list[float | None]:
    return [decision.judgement.signal for decision in decisions]


def hits_and_misses(decisions: Sequence[Decision]) -> tuple[int, int]:
    """How many calls reused and how many computed. A test that claims a cache asserts that neither is 0."""
    hits = sum(decision.verdict == "reuse" for decision in decisions)
    return hits, len(decisions) - hits


# A cache without an engine.


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
