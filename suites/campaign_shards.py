"""A graph of shards without an engine, to be run in a process of its own that is killed.

As a program: FOLDER [NTH KIND]. With the latter it kills itself at the NTH write of a shard, before the file is written
(`draft`), before it gets its name (`rename`), or behind that (`behind`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from oracle.campaign.content import Content, read_content
from oracle.campaign.record import write_record
from oracle.campaign.shards import InProcess, Shard, path_of, run_graph

COUNT = 6


def graph(folder: Path, pause: float = 0.0) -> list[Shard]:
    """COUNT sources, and for each a sum that needs it."""
    sources = [Shard(f"native/{i:03d}", draw, keep, (i, pause), key=f"source {i}", world_size=1) for i in range(COUNT)]
    sums = [
        Shard(f"rows/{i:03d}", add, keep_sum, (path_of(source.name, folder), i), f"sum {i}", 1, (source.name,))
        for i, source in enumerate(sources)
    ]
    return [*sources, *sums]


def draw(seed: int, pause: float) -> Any:
    time.sleep(pause)
    return np.random.default_rng(seed).random((50, 50)).astype(np.float32)


def keep(by_rank: list[Any], seed: int, *_: object) -> Content:
    return Content({"seed": seed}, {"drawn": by_rank[0]})


def add(path: Path, seed: int) -> float:
    return float(read_content(path, f"source {seed}").arrays["drawn"].sum())


def keep_sum(by_rank: list[float], *_: object) -> Content:
    return Content({"sum": by_rank[0]})


def finish(folder: Path, pause: float = 0.0) -> Path:
    """Run the graph and write the table that follows from it."""
    run_graph(graph(folder, pause), folder, InProcess())
    sums = [read_content(path_of(f"rows/{i:03d}", folder), f"sum {i}").values["sum"] for i in range(COUNT)]
    write_record(folder / "quality.json", "test/1", {"sums": sums})
    return folder / "quality.json"


def _kill_at(nth: int, kind: str) -> None:
    """The process is killed outright: nothing is cleaned up, as by the system."""
    from oracle.evidence import writer

    replace, fsync = os.replace, os.fsync
    writes = iter(range(1, 10_000))

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_fsync(descriptor: int) -> None:
        if kind == "draft" and next(writes) == nth:
            die()
        fsync(descriptor)

    def dying_replace(source: Any, target: Any) -> None:
        if kind == "draft":
            return replace(source, target)
        number = next(writes)
        if kind == "rename" and number == nth:
            die()
        replace(source, target)
        if kind == "behind" and number == nth:
            die()

    writer.os.replace, writer.os.fsync = dying_replace, dying_fsync  # type: ignore[assignment]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _kill_at(int(sys.argv[2]), sys.argv[3])
    finish(Path(sys.argv[1]), pause=0.03)
