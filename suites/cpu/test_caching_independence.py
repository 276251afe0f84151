"""Contract 5: nothing that a peer does can change a rank's decision, and no collective takes part in one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oracle.evidence.ranks import RankPool
from oracle.verdict.decisions import DBCacheTerms, replay_dbcache, replay_teacache, teacache_terms
from suites.cached import BASE, MATRIX, CachedRun, cache_for, check_fired, run_cached
from suites.support import load_engine
from wanref.caching.base import Decision, StackCall
from wanref.caching.registry import build_cache
from wanref.observe import TensorEvent
from wanref.pipeline import WanReference

pytestmark = pytest.mark.cpu

REQUEST = replace(BASE, steps=8)
# Rules that read the hidden states. The thresholds lie inside the range of what they read here.
LIVE = {
    "vllm-omni": "teacache:dialect=vllm-omni,coefficients=1/0,threshold=0.13",
    "cache-dit": "cache-dit:threshold=0.1,max_warmup_steps=1",
}
COLLECTIVES = [name for name in dir(dist) if name.startswith(("all_", "broadcast", "reduce", "gather", "scatter"))]
COLLECTIVES += ["send", "recv", "isend", "irecv", "barrier", "batch_isend_irecv"]


# A slow peer.


def run_with_slow_rank(folder: Path, text: str, slow: int | None) -> CachedRun:
    engine = load_engine(folder, "pp2cfg2")

    def dawdle(event: Any) -> None:
        if isinstance(event, TensorEvent | Decision) and engine.place.rank == slow:
            time.sleep(0.01)

    return run_cached(engine, REQUEST, cache_for(text, "dual", 2), dawdle)


@pytest.mark.parametrize("cache", ["trt-llm, projection", "vllm-omni, modulated input", "cache-dit"])
def test_a_slow_rank_changes_no_decision_on_any(ranks: RankPool, tiny: Callable[..., Path], cache: str) -> None:
    undisturbed = ranks.run(4, run_with_slow_rank, tiny(layout="dual"), MATRIX[cache], None)
    for ran in undisturbed:
        check_fired([ran])
    for slow in (0, 3):
        disturbed = ranks.run(4, run_with_slow_rank, tiny(layout="dual"), MATRIX[cache], slow)
        assert [r.verdicts() for r in disturbed] == [r.verdicts() for r in undisturbed]
        assert [r.run.latents for r in disturbed] == [r.run.latents for r in undisturbed]


# A peer with other inputs.


@dataclass
class Predictions:
    """Locks what the last stages predict, so that other inputs of one rank reach no other rank through the latents."""

    recorded: list[torch.Tensor] = field(default_factory=list)
    replayed: Iterator[torch.Tensor] | None = None

    @contextmanager
    def on(self, engine: WanReference) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for stage in engine.stages.values() if engine.place.is_last else ():
                patch.setattr(stage, "project", self._around(stage.project))
            yield

    def _around(self, project: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def locked(*inputs: Any) -> torch.Tensor:
            prediction = project(*inputs)
            if self.replayed is not None:
                return next(self.replayed)
            self.recorded.append(prediction)
            return prediction

        return locked


@contextmanager
def other_inputs(engine: WanReference) -> Iterator[None]:
    """What this rank's cache is given grows from step to step, and differs from what it would be."""
    begin_call = StackCall.__init__

    def scrambled(call: StackCall, where: Any, stack: Any, hidden: torch.Tensor, *rest: Any) -> None:
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(where.step.index))
        begin_call(call, where, stack, hidden * (1 + 0.2 * where.step.index) + noise, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StackCall, "__init__", scrambled)
        yield


def run_with_scrambled_ranks(folder: Path, text: str) -> list[CachedRun]:
    """Undisturbed, and then with other inputs on rank 0, 1, 2 and 3 in turn."""
    engine = load_engine(folder, "pp2cfg2")
    cache, predictions = cache_for(text, "dual", 2), Predictions()
    with predictions.on(engine):
        runs = [run_cached(engine, REQUEST, cache)]
        for rank in range(4):
            predictions.replayed = iter(predictions.recorded)
            if rank == engine.place.rank:
                with other_inputs(engine):
                    runs.append(run_cached(engine, REQUEST, cache))
            else:
                runs.append(run_cached(engine, REQUEST, cache))
    return runs


@pytest.mark.parametrize("cache", LIVE)
def test_other_inputs_of_one_rank_change_only_what_is_downstream_of_it(
    ranks: RankPool, tiny: Callable[..., Path], cache: str
) -> None:
    by_rank = ranks.run(4, run_with_scrambled_ranks, tiny(layout="dual"), LIVE[cache])
    for rank, (undisturbed, *scrambled) in enumerate(by_rank):
        check_fired([undisturbed])
        for other, ran in enumerate(scrambled):
            downstream = other in (rank, rank - 1 if rank % 2 else rank)
            assert (ran.verdicts() != undisturbed.verdicts()) == downstream, (rank, other)
            assert replay(cache, ran) == [d.verdict == "reuse" for d in ran.decisions], (rank, other)


def replay(cache: str, ran: CachedRun) -> list[bool]:
    """What the rule says of the numbers that this rank itself recorded, branch by branch and expert by expert."""
    reuses: dict[int, bool] = {}
    groups: dict[tuple[str, str], list[int]] = {}
    for index, decision in enumerate(ran.decisions):
        groups.setdefault((decision.where.step.expert, decision.where.branch), []).append(index)
    for indices in groups.values():
        signals = [ran.decisions[index].judgement.signal for index in indices]
        if cache == "cache-dit":
            rulings = replay_dbcache(DBCacheTerms(threshold=0.1, warmup=1), signals)
        else:
            rulings = replay_teacache(teacache_terms("vllm-omni", "modulated_input", (1.0, 0.0), 0.13), signals)
        reuses.update((index, ruling.reuses) for index, ruling in zip(indices, rulings, strict=True))
    return [reuses[index] for index in range(len(ran.decisions))]


# No communication in a decision.


def run_counting_collectives(folder: Path, text: str, forced: bool) -> tuple[CachedRun, list[str], int]:
    """The run, what of torch.distributed was called inside the cache, and how much was outside."""
    engine = load_engine(folder, "pp2cfg2")
    spec = cache_for(text, "dual", 2, forced)
    kind = type(build_cache(spec, engine.checkpoint, engine.topology))
    inside: list[str] = []
    outside: list[str] = []
    deciding: list[None] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            (inside if deciding else outside).append(name)
            return original(*arguments, **options)

        return call

    def marked(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            deciding.append(None)
            try:
                return method(*arguments)
            finally:
                deciding.pop()

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        for name in ("begin", "order", "run", "end"):
            patch.setattr(kind, name, marked(getattr(kind, name)))
        ran = run_cached(engine, REQUEST, spec)
    return ran, inside, len(outside)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("cache", ["trt-llm, projection", "vllm-omni, modulated input", "cache-dit"])
def test_a_cache_calls_nothing_of_torch_distributed(
    ranks: RankPool, tiny: Callable[..., Path], cache: str, forced: bool
) -> None:
    """The exchange log would not show what a library calls on its own: cache-dit averages over the default group."""
    for ran, inside, outside in ranks.run(4, run_counting_collectives, tiny(layout="dual"), MATRIX[cache], forced):
        check_fired([ran])
        assert inside == []
        assert outside > 0
