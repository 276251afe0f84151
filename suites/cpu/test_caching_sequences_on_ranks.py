"""Contract 4 with caches on ranks: after caches, aborts, sizes and guidance came and went, each request is as fresh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from oracle.evidence.ranks import RankPool
from suites.cached import BASE, MATRIX, cache_for, verdicts
from suites.support import fingerprint, load_engine
from wanref.caching.spec import CacheSpec
from wanref.denoise import RequestAborted
from wanref.observe import Event, StepEvent
from wanref.pipeline import WanReference
from wanref.topology import parse_topology

pytestmark = pytest.mark.cpu

REQUESTS = (
    BASE,
    replace(BASE, guidance_scale=1.0),
    replace(BASE, guidance_scale=1.0, guidance_scale_2=4.0, steps=8),
    replace(BASE, guidance_scale_2=1.0, steps=5, flow_shift=5.0),
    replace(BASE, height=16, width=48, frames=5, prompt="a blue circle"),
)
CACHES: tuple[CacheSpec | None, ...] = (
    None,
    *(
        cache_for(MATRIX[name], "dual", 2, forced)
        for name in ("teacache, embedding, linear", "vllm-omni, modulated input", "cache-dit")
        for forced in (False, True)
    ),
)
TOPOLOGIES = ("pp2cfg1", "pp1cfg2", "pp2cfg2")


@dataclass(frozen=True, slots=True)
class Act:
    """One request under one of CACHES. `abort`: asked for in its second step, on this rank (of those there are)."""

    cache: int
    request: int
    abort: int | None = None

    @property
    def fresh(self) -> Act:
        return replace(self, abort=None)


ACTS = st.lists(
    st.builds(
        Act,
        cache=st.integers(0, len(CACHES) - 1),
        request=st.integers(0, len(REQUESTS) - 1),
        abort=st.sampled_from([None, None, 0, 1, 3]),
    ),
    min_size=3,
    max_size=6,
)
# Guidance on, off, on; a cache on, aborted, off, on; another; another size and step count in between.
STORY = [Act(5, 0), Act(5, 1), Act(5, 2, abort=1), Act(5, 0), Act(0, 3), Act(3, 4), Act(4, 3), Act(1, 2), Act(5, 0)]


def play(folder: Path, topology: str, acts: list[Act], unknown: list[Act]) -> tuple[list[Any], dict[Act, Any]]:
    """For ranks: what each act came to on one engine, and what each unknown one comes to on an engine of its own."""
    engine = load_engine(folder, topology)
    played = [act_on(engine, act) for act in acts]
    return played, {act: act_on(load_engine(folder, topology), act) for act in unknown}


def act_on(engine: WanReference, act: Act) -> Any:
    """The latents and decisions, or the step before which it was aborted. A cache stays on while it is asked for."""
    cache = CACHES[act.cache]
    if engine.cache != cache:
        engine.unmount()
        if cache is not None:
            engine.mount(cache)
    aborter = None if act.abort is None else act.abort % engine.topology.world_size
    engine.observer = aborting(engine) if engine.place.rank == aborter else None
    try:
        output = engine(REQUESTS[act.request])
    except RequestAborted as aborted:
        return aborted.step
    return fingerprint(output.latents), verdicts(output.decisions)


def aborting(engine: WanReference) -> Callable[[Event], None]:
    return lambda event: engine.abort() if isinstance(event, StepEvent) and event.step.index == 1 else None


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_any_sequence_on_ranks_leaves_every_rank_as_fresh(
    ranks: RankPool, tiny: Callable[..., Path], topology: str
) -> None:
    folder, world = tiny(layout="dual"), parse_topology(topology).world_size
    fresh: dict[Act, list[Any]] = {}
    seen: Counter[str] = Counter()

    @settings(max_examples=3, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(ACTS)
    @example(STORY)
    def check(acts: list[Act]) -> None:
        unknown = [act for act in dict.fromkeys(each.fresh for each in acts) if act not in fresh]
        by_rank = ranks.run(world, play, folder, topology, acts, unknown, timeout=120)
        for act in unknown:
            fresh[act] = [alone[act] for _, alone in by_rank]
        for rank, (played, _) in enumerate(by_rank):
            for act, came_to in zip(acts, played, strict=True):
                if isinstance(came_to, int):
                    assert (came_to, act.abort is None) == (2, False), f"rank {rank}: {act}"
                    seen["aborted"] += 1
                else:
                    assert came_to == fresh[act.fresh][rank], f"rank {rank}: {act} of {acts}"
                    seen.update(verdict for *_, verdict in came_to[1])

    check()
    assert min(seen[what] for what in ("aborted", "compute", "reuse")) > 0
