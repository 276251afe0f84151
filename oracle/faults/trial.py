"""One trial: record a scenario's candidate with something planted, and hold it against its clean reference."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from oracle.evidence.ranks import Outcome, RankPool
from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.trace import TraceError
from oracle.faults.plant import nothing, watching
from oracle.faults.scenario import Checkpoints, Past, Run, Scenario
from oracle.verdict.compare import compare
from oracle.verdict.contracts import CONTRACTS
from oracle.verdict.finding import Finding, Spot, Verdict
from wanref.topology import parse_topology

HANG_SECONDS = 20.0
"""A run that takes longer is taken for a hang: they take 1 to 3 seconds."""

Planted = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one. seconds: of the recording; verdict_seconds: of the comparison."""

    verdict: Verdict
    seconds: float
    verdict_seconds: float


@dataclass
class References:
    """Clean recordings, each made once and read by every trial that needs it."""

    checkpoints: Checkpoints
    folder: Path
    _traces: dict[Run, Trace] = field(default_factory=dict)
    _making: dict[Run, threading.Lock] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def get(self, run: Run, pool: RankPool) -> Trace:
        """Raises RuntimeError if the clean run fails: then nothing can be tried."""
        with self._guard:
            making = self._making.setdefault(run, threading.Lock())
        with making:
            if run not in self._traces:
                folder = self.folder / f"reference{len(self._making)}-{abs(hash(run)):x}"
                outcomes = record_run(run, self.checkpoints, folder, pool, nothing, 120.0)
                failed = [f"rank {rank}: {o.kind} {o.text}" for rank, o in enumerate(outcomes) if o.kind != "value"]
                if failed:
                    raise RuntimeError(f"a clean run failed: {run}\n" + "\n".join(failed))
                self._traces[run] = open_trace(folder)
            return self._traces[run]


def try_scenario(scenario: Scenario, plant: Planted, references: References, pool: RankPool, folder: Path) -> Trial:
    """Record into `folder`, which must be new, and compare."""
    reference = references.get(scenario.reference, pool)
    started = time.perf_counter()
    outcomes = record_run(scenario.candidate, references.checkpoints, folder, pool, plant, HANG_SECONDS)
    recorded = time.perf_counter()
    try:
        verdict = compare(reference, open_trace(folder), CONTRACTS[scenario.contract])
    except TraceError as error:
        verdict = Verdict(scenario.contract, (Finding("coverage", "missing evidence", Spot(), str(error)),), 0)
    ended = time.perf_counter()
    # What the ranks themselves say is evidence, too: also where their traces look whole.
    told = tuple(_told(outcomes))
    return Trial(
        replace(verdict, findings=(*verdict.findings, *told)),
        recorded - started,
        ended - recorded,
    )


def _told(outcomes: list[Outcome]) -> Iterator[Finding]:
    for rank, outcome in enumerate(outcomes):
        if outcome.kind != "value":
            says = f"{outcome.kind}: {outcome.value or outcome.text.splitlines()[0]}"
            yield Finding("coverage", "missing evidence", Spot(rank=rank), says)


def record_run(
    run: Run, checkpoints: Checkpoints, folder: Path, pool: RankPool, plant: Planted, timeout: float
) -> list[Outcome]:
    """On a pool. `plant` travels by its name, so it must be a function of a module, or a `partial` of one."""
    world_size = parse_topology(run.topology).world_size
    return pool.outcomes(world_size, on_rank, run, checkpoints[run.layout], folder, plant, timeout=timeout)


def on_rank(run: Run, checkpoint: Path, folder: Path, plant: Planted) -> None:
    """What each rank does: build an engine, run what came before, then record the request that counts."""
    from transformers.utils import logging

    from oracle.evidence.probe import recording
    from wanref.caching.spec import parse_cache
    from wanref.pipeline import WanReference

    logging.disable_progress_bar()
    cache = None if run.cache is None else parse_cache(run.cache, run.forced)
    with watching(), plant():
        engine = WanReference.from_pretrained(checkpoint, topology=run.topology, dtype=run.dtype, cache=cache)
        for past in run.past:
            _run_past(engine, past)
        with recording(engine, folder, run.level):
            engine(run.request)


def _run_past(engine: object, past: Past) -> None:
    from wanref.denoise import RequestAborted
    from wanref.observe import Event, StepEvent
    from wanref.pipeline import WanReference

    assert isinstance(engine, WanReference)
    if past.ending == "unmounted":
        cache = engine.cache
        assert cache is not None, "there is a cache to take off"
        engine.unmount()
        engine(past.request)
        engine.mount(cache)
        return

    def interrupt(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step.index == 2:
            if past.ending == "failed":
                raise RuntimeError("an observer fails on purpose")
            engine.abort()

    expected: dict[str, tuple[type[Exception], ...]] = {
        "done": (),
        "aborted": (RequestAborted,),
        "failed": (RuntimeError,),
        "refused": (ValueError,),
    }
    before = engine.observer
    if past.ending in ("aborted", "failed"):
        engine.observer = interrupt
    try:
        with suppress(*expected[past.ending]):
            engine(past.request)
    finally:
        engine.observer = before
