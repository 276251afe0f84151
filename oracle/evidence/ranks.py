"""A pool of rank processes that is started once and runs many jobs.

Importing torch and diffusers takes seconds, so ranks are forked from one server that has imported them. Each job gets a
process group of its own, over gloo. A rank that dies or does not come back is an outcome of its own, never a lost job.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not declared
from torch.distributed.distributed_c10d import PrefixStore, _world

PRELOAD = ["wanref.pipeline", "transformers", "diffusers.pipelines.wan.pipeline_wan"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rank: a value, or the traceback of an exception, or `died` / `hung` with what is known."""

    kind: str
    value: Any = None
    text: str = ""


class RanksFailed(AssertionError):
    """At least one rank of a job did not return a value; the message has each rank's outcome."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        super().__init__("\n".join(f"rank {rank}: {o.kind} {o.text}" for rank, o in enumerate(outcomes)))


class RankPool:
    """Use as a context manager, or call `close`. Grows to the largest world that it has been asked for."""

    def __init__(self, threads: int = 1) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._threads = threads
        self._ranks: list[tuple[BaseProcess, Connection, Path]] = []
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        self._jobs = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """`function(*args)` on each of `world_size` ranks; their values in rank order. Raises RanksFailed."""
        outcomes = self.outcomes(world_size, function, *args, timeout=timeout)
        if any(outcome.kind != "value" for outcome in outcomes):
            raise RanksFailed(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0
    ) -> list[Outcome]:
        """The same, but whatever became of each rank is returned. Ranks that did not come back are replaced."""
        while len(self._ranks) < world_size:
            self._ranks.append(self._start(len(self._ranks)))
        self._jobs += 1
        ranks = self._ranks[:world_size]
        for rank, (_, pipe, _) in enumerate(ranks):
            pipe.send((self._jobs, rank, world_size, function, args))
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < world_size and (left := deadline - time.monotonic()) > 0:
            answered = wait([pipe for rank, (_, pipe, _) in enumerate(ranks) if rank not in outcomes], left)
            for rank, (_, pipe, _) in enumerate(ranks):
                if pipe in answered:
                    outcomes[rank] = self._receive(rank)
        for rank in range(world_size):
            if rank not in outcomes:
                outcomes[rank] = Outcome("hung", text=f"no answer in {timeout:.0f} s\n{self._stack(rank)}")
            if outcomes[rank].kind in ("died", "hung"):
                self._replace(rank)
        return [outcomes[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process, pipe, _ in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks.clear()
        self._scratch.cleanup()

    def _start(self, rank: int) -> tuple[BaseProcess, Connection, Path]:
        here, there = self._context.Pipe()
        stacks = Path(self._scratch.name) / f"rank{rank}-{self._jobs}.stacks"
        process = self._context.Process(
            target=_serve, args=(there, self._store.port, self._threads, stacks), name=f"rank{rank}", daemon=True
        )
        process.start()
        there.close()
        return process, here, stacks

    def _replace(self, rank: int) -> None:
        process, pipe, _ = self._ranks[rank]
        pipe.close()
        process.kill()
        process.join()
        self._ranks[rank] = self._start(rank)

    def _receive(self, rank: int) -> Outcome:
        process, pipe, _ = self._ranks[rank]
        try:
            outcome: Outcome = pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            return Outcome("died", text=f"exit code {process.exitcode}")
        return outcome

    def _stack(self, rank: int) -> str:
        process, _, stacks = self._ranks[rank]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return stacks.read_text()


def _serve(pipe: Connection, port: int, threads: int, stacks: Path) -> None:
    torch.set_num_threads(threads)
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        while True:
            try:
                job, rank, world_size, function, args = pipe.recv()
            except EOFError:
                return
            pipe.send(_run_job(port, job, rank, world_size, function, args))


def _run_job(
    port: int, job: int, rank: int, world_size: int, function: Callable[..., Any], args: Sequence[Any]
) -> Outcome:
    try:
        if world_size > 1:
            store = TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"job{job}", store),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=60),
            )
        return Outcome("value", function(*args))
    except BaseException as error:  # whatever it is, it is this rank's outcome
        return Outcome("raised", value=f"{type(error).__name__}: {error}", text=traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # A rendezvous that failed has been counted, and the count names the next group: this rank would miss its peers.
        _world.group_count = 0
