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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oracle.evidence.ranks import RankPool
from oracle.faults.benign import Variant
from oracle.faults.fault import Fault
from oracle.faults.scenario import Checkpoints
from oracle.faults.trial import References, try_scenario

POINTED_SHARE = 0.95
"""Of the planted faults, at how many the oracle must point exactly."""


@dataclass(frozen=True, slots=True)
class Row:
    """One trial. alarm: whether the oracle found anything; pointed: None for a benign variant."""

    id: str
    kind: str
    planted: bool
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


@dataclass(frozen=True, slots=True)
class Score:
    rows: tuple[Row, ...]
    seconds: float

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
    def passes(self) -> bool:
        """All found, 95 % pointed at exactly, no false alarm; and something was tried."""
        faults = len(self.faults)
        return 0 < faults == self.found and self.pointed >= POINTED_SHARE * faults and not self.false_alarms

    def as_json(self) -> dict[str, Any]:
        return {
            "planted": len(self.faults),
            "found": self.found,
            "pointed": self.pointed,
            "only_by_oracle": sum(row.caught_by is None for row in self.faults),
            "benign": len(self.benign),
            "false_alarms": self.false_alarms,
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
    return Score(rows, time.perf_counter() - started)


def _try(tried: Fault | Variant, references: References, pool: RankPool, folder: Path) -> Row:
    trial = try_scenario(tried.scenario, tried.plant, references, pool, folder)
    shutil.rmtree(folder, ignore_errors=True)
    first = trial.verdict.first
    fault = tried if isinstance(tried, Fault) else None
    return Row(
        id=tried.id,
        kind=tried.kind,
        planted=fault is not None,
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
    )
