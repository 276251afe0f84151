"""The oracle's score: what it found of the planted faults, where it pointed, and how often it cried wolf."""

from __future__ import annotations

import queue
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from oracle.evidence.ranks import RankPool
from oracle.faults.benign import Variant
from oracle.faults.fault import Fault
from oracle.faults.scenario import Checkpoints
from oracle.faults.trial import References, try_scenario
from oracle.verdict.contracts import CONTRACTS
from oracle.verdict.tolerance import T1Limits

POINTED_SHARE = 0.95
"""Of the planted faults, at how many the oracle must point exactly."""


@dataclass(frozen=True, slots=True)
class Row:
    """One trial. bounded: under a contract that claims no bytes; changed: see `Trial`. alarm: whether the oracle found
    anything; pointed: None for a benign variant."""

    id: str
    kind: str
    planted: bool
    bounded: bool
    scenario: str
    alarm: bool
    pointed: bool | None
    says: str
    layer: str | None
    cause: str | None
    expected: dict[str, Any] | None
    source: str | None
    caught_by: str | None
    seconds: float
    verdict_seconds: float
    changed: int | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """limits: what bounded trials were held to."""

    rows: tuple[Row, ...]
    seconds: float
    limits: T1Limits | None = None

    @property
    def faults(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.planted)

    @property
    def benign(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.planted)

    @property
    def found(self) -> int:
        return sum(row.alarm for row in self.faults)

    @property
    def pointed(self) -> int:
        return sum(bool(row.pointed) for row in self.faults)

    @property
    def false_alarms(self) -> int:
        return sum(row.alarm for row in self.benign)

    @property
    def changed(self) -> int:
        """Of the benign variants, how many have other bytes than their reference."""
        return sum(bool(row.changed) for row in self.benign)

    def part(self, bounded: bool) -> Score:
        """What was bounded, or what was claimed by bytes."""
        return replace(self, rows=tuple(row for row in self.rows if row.bounded == bounded))

    @property
    def passes(self) -> bool:
        """Of each part all found, 95 % pointed at exactly, no false alarm; and something was tried."""
        parts = [self.part(bounded) for bounded in (False, True)]
        return bool(self.faults) and all(
            part.found == len(part.faults)
            and part.pointed >= POINTED_SHARE * len(part.faults)
            and not part.false_alarms
            for part in parts
        )

    def as_json(self) -> dict[str, Any]:
        exact, bounded = self.part(False), self.part(True)
        return {
            "planted": len(exact.faults),
            "found": exact.found,
            "pointed": exact.pointed,
            "only_by_oracle": sum(row.caught_by is None for row in exact.faults),
            "benign": len(exact.benign),
            "false_alarms": exact.false_alarms,
            "bounded_planted": len(bounded.faults),
            "bounded_found": bounded.found,
            "bounded_pointed": bounded.pointed,
            "bounded_benign": len(bounded.benign),
            "bounded_benign_changed": bounded.changed,
            "bounded_false_alarms": bounded.false_alarms,
            "bounded_limits": None if self.limits is None else asdict(self.limits),
            "passes": self.passes,
            "seconds": round(self.seconds, 1),
            "verdict_seconds": round(sum(row.verdict_seconds for row in self.rows) / max(len(self.rows), 1), 4),
            "rows": [asdict(row) for row in self.rows],
        }


def sample_faults(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """`count` of them at random, but of every kind in turn."""
    chance = random.Random(seed)
    by_kind: dict[str, list[Fault]] = {}
    for fault in chance.sample(list(faults), len(faults)):
        by_kind.setdefault(fault.kind, []).append(fault)
    chosen: list[Fault] = []
    while len(chosen) < min(count, len(faults)):
        for group in by_kind.values():
            if group and len(chosen) < count:
                chosen.append(group.pop())
    return chosen


def score(
    faults: Sequence[Fault],
    variants: Sequence[Variant],
    checkpoints: Checkpoints,
    workers: int = 2,
    advance: Callable[[str], None] = lambda name: None,
) -> Score:
    """Try all of them, on `workers` pools of ranks at a time. `advance` is called with the name of each when it is
    done, from any thread."""
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        with ExitStack() as stack:
            pools: queue.SimpleQueue[RankPool] = queue.SimpleQueue()
            for _ in range(workers):
                pools.put(stack.enter_context(RankPool()))
            references = References(checkpoints, folder / "references")
            trials: list[Fault | Variant] = [*faults, *variants]

            def run(numbered: tuple[int, Fault | Variant]) -> Row:
                number, tried = numbered
                pool = pools.get()
                try:
                    row = _try(tried, references, pool, folder / f"trial{number:04d}")
                finally:
                    pools.put(pool)
                advance(row.id)
                return row

            with ThreadPoolExecutor(workers) as threads:
                rows = tuple(threads.map(run, enumerate(trials)))
    finally:
        shutil.rmtree(folder)
    return Score(rows, time.perf_counter() - started, references.calibrated)


def _try(tried: Fault | Variant, references: References, pool: RankPool, folder: Path) -> Row:
    trial = try_scenario(tried.scenario, tried.plant, references, pool, folder)
    shutil.rmtree(folder, ignore_errors=True)
    first = trial.verdict.first
    fault = tried if isinstance(tried, Fault) else None
    return Row(
        id=tried.id,
        kind=tried.kind,
        planted=fault is not None,
        bounded=CONTRACTS[tried.scenario.contract].tensors == "bounded",
        scenario=tried.scenario.name,
        alarm=first is not None,
        pointed=fault.pointed(trial.verdict) if fault else None,
        says=trial.verdict.sentence,
        layer=first.layer if first else None,
        cause=first.cause if first else None,
        expected=asdict(fault.points) if fault else None,
        source=fault.source if fault else None,
        caught_by=fault.caught_by if fault else None,
        seconds=round(trial.seconds, 3),
        verdict_seconds=round(trial.verdict_seconds, 4),
        changed=trial.changed,
    )
