"""What a cache's hits would give if the cache itself cost nothing: the ratio to hold a measured one against.

Ranks wait for each other, so what counts is the longest way through a step: a chain of stages is a flow shop whose jobs
are its branches, and the chains meet at the CFG combine. A hit that nobody waits for saves no time.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from oracle.campaign.observing import observing, synchronise
from oracle.campaign.refusal import CampaignError
from wanref.observe import Event, StepEvent, TensorEvent

if TYPE_CHECKING:
    from wanref.caching.base import Decision
    from wanref.pipeline import WanReference
    from wanref.request import Request
    from wanref.schedule import Schedule
    from wanref.topology import Topology


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one block call (the mean) and of the whole request, in one native run on this rank."""

    block: float
    request: float


def native_blocks(schedule: Schedule, topology: Topology, layers: int) -> int:
    """Block calls on the longest way through a native request, on a transformer of `layers` blocks."""
    sizes = _sizes(topology, layers)
    return sum(makespan([sizes] * (2 if step.guided and topology.cfg == 1 else 1)) for step in schedule)


def cached_blocks(decisions: Iterable[Decision], topology: Topology) -> int:
    """The same of a cached one, from the decisions of all ranks. Raises CampaignError where one is missing."""
    steps: dict[int, dict[tuple[int, str], dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for decision in decisions:
        where = decision.where
        steps[where.step.index][where.place.chain, where.branch][where.place.stage] = decision.computed_blocks
    total = 0
    for index, calls in sorted(steps.items()):
        for (_, branch), blocks in calls.items():
            if len(blocks) != topology.pp:
                raise CampaignError(
                    f"timing: step {index}, {branch} has decisions of {len(blocks)} of {topology.pp} stages."
                )
        jobs: dict[int, list[list[int]]] = defaultdict(list)
        for (chain, _), blocks in calls.items():
            jobs[chain].append([blocks[stage] for stage in range(topology.pp)])
        total += max(min(makespan(order) for order in permutations(chain)) for chain in jobs.values())
    return total


def makespan(jobs: Sequence[Sequence[int]]) -> int:
    """When the last stage is done with the last job. jobs, in their order: what each costs on each stage."""
    free = [0] * len(jobs[0])
    for job in jobs:
        ready = 0
        for stage, cost in enumerate(job):
            ready = free[stage] = max(ready, free[stage]) + cost
    return free[-1]


def ideal_ratio(blocks: int, ratio: float, paces: Sequence[Pace]) -> float:
    """cached / native at no cost of the cache's own: the blocks on the longest way shrink by `ratio`, all else stays.

    blocks: those on the longest way of one native request. paces: of all ranks. Raises CampaignError where the
    blocks would have taken longer than the request that they are a part of.
    """
    block = statistics.mean(pace.block for pace in paces)
    share = blocks * block / max(pace.request for pace in paces)
    if not 0 < share <= 1:
        raise CampaignError(f"timing: the blocks took {share:.2f} of the request that they are a part of.")
    return 1 - share * (1 - ratio)


def _sizes(topology: Topology, layers: int) -> list[int]:
    return [len(topology.blocks(stage, layers)) for stage in range(topology.pp)]


def measure_pace(engine: WanReference, request: Request) -> Pace:
    """Time one native request and the blocks in it, on every rank. Not to be used for a latency: it is observed."""
    clock = _Clock(engine)
    with observing(engine, clock):
        started = time.perf_counter()
        engine(request)
        synchronise(engine)
        seconds = time.perf_counter() - started
    if not clock.blocks:
        raise CampaignError("timing: no block ran on this rank: the request leaves it idle. Ask for guidance above 1.")
    return Pace(statistics.mean(clock.blocks), seconds)


class _Clock:
    """An observer that times each block from the event before it, which stands at the block's input."""

    def __init__(self, engine: WanReference) -> None:
        self._engine = engine
        self._last: float | None = None
        self.blocks: list[float] = []

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, StepEvent):
            self._last = None
        if not isinstance(event, TensorEvent) or (event.source == "received" and not isinstance(event.key.block, int)):
            return
        synchronise(self._engine)
        now = time.perf_counter()
        if isinstance(event.key.block, int) and event.source == "computed" and self._last is not None:
            self.blocks.append(now - self._last)
        self._last = now if isinstance(event.key.block, int) or event.key.block == "embed" else None
