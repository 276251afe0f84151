"""Makes another engine traceable in ten lines. With ORACLE_TRACE=DIR in its environment, its processes write a trace;
without, every function here returns at once.

    from oracle.evidence.emit import TensorKey, begin, decide, describe, emit, end

    describe(name="my-engine", version="1.0", layers=30, topology="pp2cfg1", rank=rank)
    request = begin(schedule=[{"index": 0, "timestep": 999, "sigma": .99, "expert": "high", "guidance_scale": 5}, ...])
    emit(TensorKey(request, step, "high", "cond", block), hidden)
    decide(request, step, "high", "cond", stage=0, verdict="reuse", reason="threshold", signal=0.02)
    end(request)

ORACLE_TRACE_LEVEL is one of decisions, digest, stats (the default) and tensor. Where the folder cannot be written, the
engine goes on: a warning is logged once, and the trace says that it is incomplete, or is none. What the caller says
wrongly is an error.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from oracle.evidence.emitter import Emitter, Engine
from oracle.evidence.trace import DecisionRecord, OriginRecord, TraceError, incomplete_file
from oracle.evidence.writer import TraceExists
from wanref.observe import TensorKey, TensorSource

__all__ = ["TensorKey", "begin", "decide", "describe", "emit", "enabled", "end"]

VARIABLE, LEVEL = "ORACLE_TRACE", "ORACLE_TRACE_LEVEL"


class _Process:
    """This process's part. A child made by fork begins with none: its parent's file is not its own."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.emitter: Emitter | None = None
        self.rank = 0
        self.lost = False


_here = _Process()


def _forget() -> None:
    global _here
    _here = _Process()


os.register_at_fork(after_in_child=_forget)


def enabled() -> bool:
    """Whether there is a trace to write to: what is costly to prepare can wait for it."""
    return bool(os.environ.get(VARIABLE)) and not _here.lost


def describe(rank: int | None = None, **engine: Any) -> None:
    """What this process is, once, before anything else: the fields of `emitter.Engine`, and its rank.

    Without `rank` it is that of the launcher (RANK), else 0. A process that was forked describes itself anew.
    """
    if not enabled():
        return
    described = Engine(**engine)
    level: Any = os.environ.get(LEVEL, "stats")
    with _here.guard:
        _here.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        if _here.emitter is not None:
            raise TraceError("describe() was called twice in this process: a trace has one engine.")

        def start() -> None:
            _here.emitter = Emitter(Path(os.environ[VARIABLE]), described, _here.rank, level)

        _write(start)


def begin(schedule: Sequence[Mapping[str, Any]], **resolved: Any) -> int:
    """A request begins; see `Emitter.begin`. `resolved` is what was asked, by name. Returns its number, -1 without a
    trace."""
    request = _write(lambda: _emitter().begin(schedule, resolved))
    return -1 if request is None else request


def emit(key: TensorKey, value: Any, source: TensorSource = "computed") -> None:
    """The value at a key, an array or a torch tensor; see `Emitter.tensor`."""
    _write(lambda: _emitter().tensor(key, value, source))


def decide(
    request: int,
    step: int,
    expert: str,
    branch: str,
    stage: int,
    verdict: str,
    *,
    computed_blocks: int,
    reason: str = "threshold",
    signal: float | None = None,
    threshold: float | None = None,
    origin_step: int | None = None,
) -> None:
    """What a cache decided for one call of a stage's blocks: `compute` or `reuse`, and how many blocks then ran.

    origin_step: the step at which the reused residual was computed, in the same request, expert, branch and stage.
    """
    if verdict not in ("compute", "reuse"):
        raise TraceError(f"verdict={verdict!r} is not accepted: give compute or reuse.")
    origins = () if origin_step is None else (OriginRecord(request, origin_step, expert, branch, stage),)
    record = DecisionRecord(
        request=request,
        step=step,
        expert=expert,
        branch=branch,
        stage=stage,
        verdict=verdict,
        reason=reason,
        shadow=None,
        signal=signal,
        rescaled=None,
        accumulated_before=None,
        accumulated_after=None,
        threshold=threshold,
        computed_blocks=computed_blocks,
        origins=origins,
    )
    _write(lambda: _emitter().decision(record))


def end(request: int, outcome: str = "done") -> None:
    """The request ends: `done`, `aborted` or `failed`."""
    _write(lambda: _emitter().end(request, outcome))


def _emitter() -> Emitter:
    if _here.emitter is None:
        raise TraceError("describe() comes first: without it nobody knows whose values these are.")
    return _here.emitter


def _write(write: Callable[[], Any]) -> Any:
    """Unless there is no trace. A folder that takes no more ends the trace of this process, never its work."""
    if not enabled():
        return None
    with _here.guard:
        try:
            return write()
        except (OSError, TraceExists) as error:
            _lose(error)
            return None


def _lose(error: Exception) -> None:
    _here.lost = True
    folder = Path(os.environ[VARIABLE])
    says = f"process {os.getpid()} stopped recording: {type(error).__name__}: {error}"
    logging.getLogger(__name__).warning("%s=%s: %s. The engine goes on without.", VARIABLE, folder, says)
    with suppress(OSError):  # the same folder, which may take nothing: a request that does not end says as much
        (folder / incomplete_file(_here.rank, os.getpid())).write_text(says + "\n", encoding="utf-8")
