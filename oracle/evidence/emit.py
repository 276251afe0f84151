"""Makes another engine traceable in ten lines. With ORACLE_TRACE=DIR in its environment, its processes write a trace;
without, every function here returns at once.

    from oracle.evidence.emit import Origin, TensorKey, begin, decide, describe, emit, end

    describe(name="my-engine", version="1.0", layers=30, topology="pp2cfg1", rank=rank)
    request = begin(schedule=[{"index": 0, "timestep": 999, "sigma": .99, "expert": "high", "guidance_scale": 5}, ...])
    emit(TensorKey(request, step, "high", "cond", block), hidden)
    decide(request, step, "high", "cond", stage=0, verdict="reuse", computed_blocks=0, origins=[residual.origin])
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

from oracle.evidence.emitter import Emitter, Engine, check_part
from oracle.evidence.trace import DecisionRecord, TraceError, incomplete_file
from oracle.evidence.trace import OriginRecord as Origin
from oracle.evidence.writer import TraceExists
from wanref.observe import TensorKey, TensorSource

__all__ = ["Origin", "TensorKey", "begin", "decide", "describe", "emit", "enabled", "end"]

VARIABLE, LEVEL = "ORACLE_TRACE", "ORACLE_TRACE_LEVEL"


class _Process:
    """This process's part. A child made by fork begins a new one: its parent's file is not its own."""

    def __init__(self, described: tuple[Engine, int] | None = None) -> None:
        self.guard = threading.RLock()
        self.described = described
        self.emitter: Emitter | None = None
        self.folder = ""
        self.lost = ""


_here = _Process()


def _forget() -> None:
    global _here
    _here = _Process(_here.described)


os.register_at_fork(after_in_child=_forget)


def enabled() -> bool:
    """Whether there is a trace to write to: what is costly to prepare can wait for it."""
    folder = os.environ.get(VARIABLE)
    return bool(folder) and folder != _here.lost


def describe(rank: int | None = None, **engine: Any) -> None:
    """What this process runs, before anything else: the fields of `emitter.Engine`, and its rank.

    Without `rank` it is that of the launcher (RANK), else 0. A trace is of one engine; where ORACLE_TRACE names another
    folder from now on, the next request goes there, under the same description unless a new one came.
    """
    described = Engine(**engine), int(os.environ.get("RANK", 0)) if rank is None else rank
    if enabled():
        check_part(*described, _level())
    with _here.guard:
        running = _here.emitter is not None and _here.folder == os.environ.get(VARIABLE)
        if running and described != _here.described:
            raise TraceError(f"describe(): {_here.folder} is a trace of {_here.described}, and not of {described}.")
        _here.described = described


def begin(schedule: Sequence[Mapping[str, Any]], **resolved: Any) -> int:
    """A request begins; see `Emitter.begin`. `resolved` is what was asked, by name.

    Returns its number, -1 without a trace: of a request that began before there was one, nothing is recorded.
    """
    request = _write(0, lambda emitter: emitter.begin(schedule, resolved))
    return -1 if request is None else request


def emit(key: TensorKey, value: Any, source: TensorSource = "computed") -> None:
    """The value at a key, an array or a torch tensor; see `Emitter.tensor`."""
    _write(key.request, lambda emitter: emitter.tensor(key, value, source))


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
    origins: Sequence[Origin] = (),
) -> None:
    """What a cache decided for one call of a stage's blocks: `compute` or `reuse`, and how many blocks then ran.

    origins: where each residual that a reuse took was computed. Keep an `Origin` beside the residual itself, so that
    it tells of the residual that was taken, and not of the one that should have been.
    """
    if verdict not in ("compute", "reuse"):
        raise TraceError(f"verdict={verdict!r} is not accepted: give compute or reuse.")
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
        origins=tuple(origins),
    )
    _write(request, lambda emitter: emitter.decision(record))


def end(request: int, outcome: str = "done") -> None:
    """The request ends: `done`, `aborted` or `failed`."""
    _write(request, lambda emitter: emitter.end(request, outcome))


def _write(request: int, write: Callable[[Emitter], Any]) -> Any:
    """Unless there is no trace. A folder that takes no more ends the trace of this process, never its work."""
    if request < 0 or not enabled():
        return None
    with _here.guard:
        try:
            return write(_emitter(os.environ[VARIABLE]))
        except (OSError, TraceExists) as error:
            _lose(os.environ[VARIABLE], error)
            return None


def _emitter(folder: str) -> Emitter:
    if _here.emitter is not None and _here.folder == folder:
        return _here.emitter
    if _here.described is None:
        raise TraceError("describe() comes first: without it nobody knows whose values these are.")
    if _here.emitter is not None:
        _here.emitter.close()
        _here.emitter = None
    _here.emitter, _here.folder = Emitter(Path(folder), *_here.described, _level()), folder
    return _here.emitter


def _level() -> Any:
    return os.environ.get(LEVEL, "stats")


def _lose(folder: str, error: Exception) -> None:
    _here.lost = folder
    rank = 0 if _here.described is None else _here.described[1]
    says = f"process {os.getpid()} stopped recording: {type(error).__name__}: {error}"
    logging.getLogger(__name__).warning("%s=%s: %s. The engine goes on without.", VARIABLE, folder, says)
    with suppress(OSError):  # the same folder, which may take nothing: a request that does not end says as much
        (Path(folder) / incomplete_file(rank, os.getpid())).write_text(says + "\n", encoding="utf-8")
