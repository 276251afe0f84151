"""One trial: record a scenario's candidate with something planted, and hold it against its clean reference."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from oracle.evidence.ranks import Outcome, RankPool
from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.trace import TraceError
from oracle.faults.kernels import CALIBRATING, CALIBRATION
from oracle.faults.plant import Plant, nothing, watching
from oracle.faults.scenario import Checkpoints, Past, Run, Scenario
from oracle.verdict.align import align, same_value
from oracle.verdict.bounded import calibrate
from oracle.verdict.compare import compare
from oracle.verdict.contracts import CONTRACTS
from oracle.verdict.finding import Finding, Spot, Verdict
from oracle.verdict.tolerance import T1Limits
from wanref.topology import parse_topology

HANG_SECONDS = 20.0
"""A run that takes longer is taken for a hang: they take 1 to 3 seconds."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one. seconds: of the recording; verdict_seconds: of the comparison. changed: where bytes are not
    claimed, at how many keys they are not the reference's."""

    verdict: Verdict
    seconds: float
    verdict_seconds: float
    changed: int | None = None


@dataclass
class References:
    """Clean recordings, each made once and read by every trial that needs it.

    calibrated: the limits of bounded trials, once one has asked for them.
    """

    checkpoints: Checkpoints
    folder: Path
    calibrated: T1Limits | None = None
    _traces: dict[Run, Trace] = field(default_factory=dict)
    _making: dict[Run, threading.Lock] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _calibrating: threading.Lock = field(default_factory=threading.Lock)

    def get(self, run: Run, pool: RankPool) -> Trace:
        """Raises RuntimeError if the clean run fails: then nothing can be tried."""
        with self._guard:
            making = self._making.setdefault(run, threading.Lock())
        with making:
            if run not in self._traces:
                folder = self.folder / f"reference{len(self._making)}-{abs(hash(run)):x}"
                self._traces[run] = self._record(run, folder, pool, nothing)
            return self._traces[run]

    def precise(self, run: Run, pool: RankPool) -> Trace | None:
        """What a run is locked on."""
        return None if run.locked_on is None else self.get(run.locked_on, pool)

    def limits(self, pool: RankPool) -> T1Limits:
        """What bounded trials are held to. Raises ToleranceError where the variants cannot calibrate."""
        with self._calibrating:
            if self.calibrated is None:
                precise, base = self.precise(CALIBRATION.reference, pool), self.get(CALIBRATION.reference, pool)
                assert precise is not None, "a bounded scenario is locked"
                self.calibrated = calibrate(
                    precise,
                    base,
                    [
                        self._record(CALIBRATION.candidate, self.folder / f"calibration{number}", pool, plant)
                        for number, plant in enumerate(CALIBRATING)
                    ],
                )
            return self.calibrated

    def _record(self, run: Run, folder: Path, pool: RankPool, plant: Plant) -> Trace:
        outcomes = record_run(run, self, folder, pool, plant, 120.0)
        failed = [f"rank {rank}: {o.kind} {o.text}" for rank, o in enumerate(outcomes) if o.kind != "value"]
        if failed:
            raise RuntimeError(f"a clean run failed: {run}\n" + "\n".join(failed))
        return open_trace(folder)


def try_scenario(scenario: Scenario, plant: Plant, references: References, pool: RankPool, folder: Path) -> Trial:
    """Record into `folder`, which must be new, and compare."""
    reference = references.get(scenario.reference, pool)
    precise = references.precise(scenario.candidate, pool)
    limits = None if precise is None else references.limits(pool)
    started = time.perf_counter()
    outcomes = record_run(scenario.candidate, references, folder, pool, plant, HANG_SECONDS)
    recorded = time.perf_counter()
    changed = None
    try:
        trace = open_trace(folder)
        verdict = compare(reference, trace, CONTRACTS[scenario.contract], precise=precise, limits=limits)
        changed = None if precise is None else count_changed(reference, trace)
    except TraceError as error:
        verdict = Verdict(scenario.contract, (Finding("coverage", "missing evidence", Spot(), str(error)),), 0)
    ended = time.perf_counter()
    # What the ranks themselves say is evidence, too: also where their traces look whole.
    told = tuple(_told(outcomes))
    return Trial(
        replace(verdict, findings=(*verdict.findings, *told)),
        recorded - started,
        ended - recorded,
        changed,
    )


def count_changed(reference: Trace, candidate: Trace) -> int:
    """At how many keys that both have the bytes differ. What was embedded counts once: the branches may share it."""
    one, other = align(reference), align(candidate)
    keys = (key for key in one.tensors if (key.block, key.branch) != ("embed", "uncond"))
    pairs = ((one.owner(key), other.owner(key)) for key in keys)
    return sum(a is not None and b is not None and not same_value(a, b) for a, b in pairs)


def _told(outcomes: list[Outcome]) -> Iterator[Finding]:
    for rank, outcome in enumerate(outcomes):
        if outcome.kind != "value":
            yield Finding("coverage", "missing evidence", Spot(rank=rank), outcome.sentence)


def record_run(
    run: Run, references: References, folder: Path, pool: RankPool, plant: Plant, timeout: float
) -> list[Outcome]:
    """On a pool. `plant` travels by its name, so it must be a function of a module, or a `partial` of one."""
    world_size = parse_topology(run.topology).world_size
    precise = references.precise(run, pool)
    given = None if precise is None else precise.folder
    return pool.outcomes(
        world_size, on_rank, run, references.checkpoints[run.layout], folder, plant, given, timeout=timeout
    )


def on_rank(run: Run, checkpoint: Path, folder: Path, plant: Plant, precise: Path | None) -> None:
    """What each rank does: build an engine, run what came before, then record the request that counts."""
    from transformers.utils import logging

    from oracle.evidence.lock import make_lock, module_ports
    from oracle.evidence.probe import recording
    from wanref.caching.spec import parse_cache
    from wanref.pipeline import WanReference

    logging.disable_progress_bar()
    cache = None if run.cache is None else parse_cache(run.cache, run.forced)
    lock = None
    if precise is not None:
        given = align(open_trace(precise))
        lock = make_lock("module", given.trace, {key: replicas[0].rank for key, replicas in given.tensors.items()})
    with watching(), plant():
        engine = WanReference.from_pretrained(checkpoint, topology=run.topology, dtype=run.dtype, cache=cache)
        for past in run.past:
            _run_past(engine, past)
        with recording(engine, folder, run.level, lock=lock) as probe, ExitStack() as stack:
            if run.ports:
                stack.enter_context(module_ports(engine, probe))
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
