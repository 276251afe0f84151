"""Who failed: a board on which the first failure is written, and a heartbeat by which a lost rank is known.

Connections tell a rank only that a peer is gone. A rank that fails writes the reason on the board, then closes its
connections, which wakes whoever waits for it; those read the board, and close theirs. A killed rank writes nothing:
its heartbeat stops.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

BEAT_S = 0.5
STALE_S = 4.0
DIAGNOSIS_S = 15.0


class RankFailure(RuntimeError):
    """A rank of several failed or is lost. The engine is over on every rank; build a new one."""


class Liveness:
    """One rank's view of the others, through the process group's own store."""

    def __init__(self, rank: int, world_size: int) -> None:
        engine = [uuid.uuid4().hex]  # rank 0's: engines that share a process group keep apart
        dist.broadcast_object_list(engine, src=0)
        store: Any = _get_default_store()
        self._board = PrefixStore(f"wanref/{engine[0]}", store.clone())
        # A connection of its own for the thread: a client serves one call at a time.
        self._pulse = PrefixStore(f"wanref/{engine[0]}", store.clone())
        self._rank = rank
        self._world_size = world_size

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beat while a request runs; between requests nothing does."""
        stop = threading.Event()
        thread = threading.Thread(target=self._beat, args=(stop,), name="wanref-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def report(self, reason: str) -> str:
        """Write `reason` on the board, unless a failure stands there already. Returns what stands there."""
        try:
            return str(self._board.compare_set("failure", "", reason).decode())
        except (RuntimeError, dist.DistError):
            return f"{reason} (the launcher's store is gone, too)"

    def diagnose(self) -> str:
        """After a connection broke: the reported failure, or else the rank whose heartbeat has stopped."""
        try:
            return self._reported_or_silent()
        except (RuntimeError, dist.DistError) as error:
            return f"the process that holds the rendezvous store is lost ({type(error).__name__})"

    def _reported_or_silent(self) -> str:
        started = time.monotonic()
        last: dict[int, tuple[bytes, float]] = {}
        while (now := time.monotonic()) - started < DIAGNOSIS_S:
            if self._board.check(["failure"]):
                return str(self._board.get("failure").decode())
            for rank in range(self._world_size):
                beat = self._board.get(f"beat/{rank}") if self._board.check([f"beat/{rank}"]) else b""
                if rank not in last or last[rank][0] != beat:
                    last[rank] = beat, now
                elif now - last[rank][1] > STALE_S:
                    return self.report(f"rank {rank} is lost: it sent no heartbeat for {STALE_S:.0f} s")
            time.sleep(BEAT_S / 2)
        return self.report(f"a connection of rank {self._rank} broke, though every rank is alive")

    def _beat(self, stop: threading.Event) -> None:
        count = 0
        while True:
            count += 1
            try:
                self._pulse.set(f"beat/{self._rank}", str(count))
            except (RuntimeError, dist.DistError):
                return  # The store is gone, and with it everyone who could read a beat.
            if stop.wait(BEAT_S):
                return
