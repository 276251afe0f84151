"""A pool of rank processes that is started once and runs many jobs.

Importing torch and diffusers takes seconds, so ranks are forked from one server that has imported them. Each job gets a
process group of its own, over gloo. A rank that dies or does not come back is an outcome of its own, never a lost job.
Of one that does not come back, a thread in its process tells what it waits for.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, though not declared
from torch.distributed.distributed_c10d import _world

from oracle.evidence.stall import Standing, read_standing, tell_stall

PRELOAD = ["wanref.pipeline", "transformers", "diffusers.pipelines.wan.pipeline_wan"]
ANSWER_S = 2.0
"""A rank that hangs in a call of gloo answers a question at once; one that holds its interpreter never does."""
LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rank: a value, or the traceback of an exception, or `died` / `hung` with what is known.

    after: seconds from the start of the job until the pool knew. The text of `hung` is a line that says what the rank
    waits for, and its stack.
    """

    kind: str
    value: Any = None
    text: str = ""
    after: float = 0.0

    @property
    def sentence(self) -> str:
        """What became of it, without a stack."""
        said = self.value if self.kind == "raised" else self.text.partition("\n")[0]
        return f"{self.kind}: {said}"


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's process. questions: a second pipe, which a thread of its own answers while the rank is at work."""

    process: BaseProcess
    pipe: Connection
    questions: Connection
    stacks: Path


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
        self._ranks: list[_Rank] = []
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
        pipes = [rank.pipe for rank in self._ranks[:world_size]]
        for rank, pipe in enumerate(pipes):
            pipe.send((self._jobs, rank, world_size, timeout, function, args))
        outcomes: dict[int, Outcome] = {}
        started = time.monotonic()
        while len(outcomes) < world_size and (left := started + timeout - time.monotonic()) > 0:
            answered = wait([pipe for rank, pipe in enumerate(pipes) if rank not in outcomes], left)
            for rank, pipe in enumerate(pipes):
                if pipe in answered:
                    outcomes[rank] = replace(self._receive(rank), after=time.monotonic() - started)
        outcomes |= self._hung([rank for rank in range(world_size) if rank not in outcomes], outcomes, timeout)
        for rank, outcome in outcomes.items():
            if outcome.kind in ("died", "hung"):
                self._replace(rank)
        return [outcomes[rank] for rank in range(world_size)]

    def close(self) -> None:
        for rank in self._ranks:
            _hang_up(rank)
        for rank in self._ranks:
            # Who is not at work leaves by itself, and so gives back what a killed process would leak.
            rank.process.join(LEAVE_S)
            _kill(rank)
        self._ranks.clear()
        self._scratch.cleanup()

    def _start(self, rank: int) -> _Rank:
        pipe, its_pipe = self._context.Pipe()
        questions, its_questions = self._context.Pipe()
        scratch = Path(self._scratch.name)
        stacks = scratch / f"rank{rank}-{self._jobs}.stacks"
        process = self._context.Process(
            target=_serve,
            args=(its_pipe, its_questions, scratch, self._threads, stacks),
            name=f"rank{rank}",
            daemon=True,
        )
        process.start()
        its_pipe.close()
        its_questions.close()
        return _Rank(process, pipe, questions, stacks)

    def _replace(self, rank: int) -> None:
        _hang_up(self._ranks[rank])
        _kill(self._ranks[rank])
        self._ranks[rank] = self._start(rank)

    def _receive(self, rank: int) -> Outcome:
        process = self._ranks[rank].process
        try:
            outcome: Outcome = self._ranks[rank].pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            return Outcome("died", text=f"exit code {process.exitcode}")
        return outcome

    def _hung(self, hung: Sequence[int], outcomes: Mapping[int, Outcome], timeout: float) -> dict[int, Outcome]:
        """Outcomes of the ranks that did not come back; `outcomes` are those of the others."""
        if not hung:
            return {}
        standings = {rank: self._ask(rank) for rank in hung}
        ended = {rank: "has returned" if o.kind == "value" else f"has {o.sentence}" for rank, o in outcomes.items()}
        stacks = self._read_stacks(hung)
        return {
            rank: Outcome(
                "hung",
                text=f"no answer in {timeout:g} s; it {tell_stall(rank, standings, ended)}\n{stacks[rank]}",
                after=timeout,
            )
            for rank in hung
        }

    def _ask(self, rank: int) -> Standing | None:
        """Where it stands; None if it does not answer."""
        questions = self._ranks[rank].questions
        try:
            questions.send(None)
            standing: Standing | None = questions.recv() if questions.poll(ANSWER_S) else None
        except (EOFError, BrokenPipeError, ConnectionResetError):  # it has died after all
            return None
        return standing

    def _read_stacks(self, hung: Sequence[int]) -> dict[int, str]:
        for rank in hung:
            pid = self._ranks[rank].process.pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        return {rank: self._ranks[rank].stacks.read_text() for rank in hung}


def _hang_up(rank: _Rank) -> None:
    rank.pipe.close()
    rank.questions.close()


def _kill(rank: _Rank) -> None:
    rank.process.kill()
    rank.process.join()


def _serve(pipe: Connection, questions: Connection, scratch: Path, threads: int, stacks: Path) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_answer, args=(questions, threading.get_ident()), name="answers", daemon=True).start()
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        while True:
            try:
                job, rank, world_size, timeout, function, args = pipe.recv()
            except EOFError:
                return
            pipe.send(_run_job(scratch / f"job{job}", rank, world_size, timeout, function, args))


def _answer(questions: Connection, thread: int) -> None:
    """The answers to the pool's questions of where the thread that runs the jobs stands."""
    while True:
        try:
            questions.recv()
        except EOFError:
            return
        questions.send(read_standing(thread))


def _run_job(
    meeting: Path, rank: int, world_size: int, timeout: float, function: Callable[..., Any], args: Sequence[Any]
) -> Outcome:
    try:
        if world_size > 1:
            dist.init_process_group(
                "gloo",
                # In a file: a TCP store looks up the name of every address that connects to it, and each name server
                # that does not answer costs 5 s.
                store=FileStore(str(meeting), world_size),
                rank=rank,
                world_size=world_size,
                # The pool's own time-out comes first: gloo's would make a broken connection of a hang.
                timeout=datetime.timedelta(seconds=timeout + 60),
            )
            # A rank whose job ends at once must not hang up on one that is still connecting.
            dist.barrier()
        return Outcome("value", function(*args))
    except BaseException as error:  # whatever it is, it is this rank's outcome
        return Outcome("raised", value=f"{type(error).__name__}: {error}", text=traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # A rendezvous that failed has been counted, and the count names the next group: this rank would miss its peers.
        _world.group_count = 0
