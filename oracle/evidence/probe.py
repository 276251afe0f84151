"""Mounts on a running engine and records what it does, at a chosen level, into a trace."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from oracle.evidence import words
from oracle.evidence.revision import Revision, revision_of
from oracle.evidence.trace import (
    LEVELS,
    SCHEMA,
    DecisionRecord,
    ErrorRecord,
    ExchangeRecord,
    Level,
    OriginRecord,
    RequestRecord,
    StateRecord,
    StepRecord,
    TensorRecord,
    TraceError,
    tensor_name,
    tensors_file,
)
from oracle.evidence.writer import TraceWriter, write_manifest, write_whole
from wanref import Output, Request, WanReference
from wanref.caching.base import Decision
from wanref.observe import (
    Event,
    ExchangeEvent,
    RequestEvent,
    StateEvent,
    StepEvent,
    TensorEvent,
    TensorKey,
    TensorSource,
)

if TYPE_CHECKING:
    from oracle.evidence.lock import Lock

_LIBRARIES = ("torch", "diffusers", "transformers", "cache-dit", "numpy", "safetensors")


class Probe:
    """An `Observer` that writes one rank's part of a trace. Use `recording`, which mounts and closes it."""

    def __init__(self, writer: TraceWriter, rank: int, level: Level, lock: Lock | None = None) -> None:
        self.writer = writer
        self.rank = rank
        self.level = LEVELS.index(level)
        self.lock = lock
        self.ordinal = 0
        self._seen: Counter[TensorKey] = Counter()
        self._pending: dict[str, torch.Tensor] = {}
        self._step = (0, 0)

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, TensorEvent):
            if self.level:
                self.tensor(event.key, event.tensor, event.source)
            if self.lock is not None:
                self.lock(event.key, event.tensor)
        elif isinstance(event, Decision):
            self.writer.write(_decision(event))
        elif isinstance(event, ExchangeEvent):
            self._exchange(event)
        elif isinstance(event, StepEvent):
            self.flush()
            step = event.step
            self.writer.write(
                StepRecord(event.request, step.index, step.expert, step.timestep, step.sigma, step.guidance_scale)
            )
        elif isinstance(event, RequestEvent):
            self._request(event)
        elif isinstance(event, StateEvent):
            self.writer.write(StateRecord(event.request, event.moment, event.digests))

    def tensor(self, key: TensorKey, tensor: torch.Tensor, source: TensorSource = "computed") -> None:
        """Record the value at `key`; a key that comes again in its request is another occurrence of it."""
        self._seen[key] += 1
        key = replace(key, occurrence=self._seen[key] - 1)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        statistics = _statistics(tensor) if self.level >= LEVELS.index("stats") else {}
        self.writer.write(TensorRecord(key, dtype, shape, words.tensor_digest(tensor), source, **statistics))
        if self.level >= LEVELS.index("tensor"):
            if (key.request, key.step) != self._step:
                self.flush()
                self._step = key.request, key.step
            self._pending[tensor_name(key)] = tensor.detach().to("cpu", copy=True).contiguous()

    def flush(self) -> None:
        """Write the tensors of the step that is over, whole."""
        if self._pending:
            request, step = self._step
            path = self.writer.folder / tensors_file(request, self.rank, step)
            if path.exists():
                raise TraceError(f"{path.name} is there already: step {step} of request {request} came back.")
            write_whole(path, lambda draft: save_file(self._pending, draft))
            self._pending = {}

    def _request(self, event: RequestEvent) -> None:
        self.flush()
        self._seen.clear()
        self.ordinal = event.request
        if event.outcome is not None:
            self.writer.write(RequestRecord(event.request, event.outcome))
            return
        schedule = tuple(asdict(step) for step in event.schedule)
        self.writer.write(RequestRecord(event.request, "begin", event.resolved.as_json(), schedule))

    def _exchange(self, event: ExchangeEvent) -> None:
        self.writer.write(
            ExchangeRecord(
                event.sequence,
                event.kind,
                event.peers,
                event.shape,
                event.dtype.removeprefix("torch."),
                event.completed,
            )
        )


@contextmanager
def recording(
    engine: WanReference,
    folder: Path,
    level: Level = "digest",
    subject: Revision | None = None,
    lock: Lock | None = None,
) -> Iterator[Probe]:
    """Record what `engine` does inside the block. With several ranks, on each of them, into one folder.

    An observer that is mounted already sees every event, too. `subject`: whose run it is, if not this checkout's.
    """
    place = engine.place
    writer = TraceWriter(folder, place.rank)
    probe = Probe(writer, place.rank, level, lock)
    before = engine.observer

    def both(event: Event, /) -> None:
        if before is not None:
            before(event)
        probe(event)

    try:
        if place.rank == 0:
            write_manifest(folder, _manifest(engine, level, subject or revision_of("wanref"), lock))
        engine.observer = both
        yield probe
    except BaseException as error:
        writer.write(ErrorRecord(type(error).__name__, str(error)))
        raise
    finally:
        engine.observer = before
        probe.flush()
        writer.close()


def record(
    engine: WanReference, request: Request, folder: Path, level: Level = "digest", lock: Lock | None = None
) -> Output:
    """Run one request and record it, with its video, where this rank has it, as block `decode` behind the last step."""
    with recording(engine, folder, level, lock=lock) as probe:
        output = engine(request)
        if output.video is not None and probe.level:
            last = output.schedule.steps[-1]
            key = TensorKey(probe.ordinal, last.index + 1, last.expert, None, "decode")
            probe.tensor(key, torch.from_numpy(output.video))
    return output


def _manifest(engine: WanReference, level: Level, subject: Revision, lock: Lock | None) -> dict[str, Any]:
    cache = engine.cache
    checkpoint = engine.checkpoint
    return {
        "schema": SCHEMA,
        "level": level,
        "digest": words.NAME,
        "subject": asdict(subject),
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "device": engine.device.type,
        "threads": torch.get_num_threads(),
        "topology": str(engine.topology),
        "world_size": engine.topology.world_size,
        "layers": checkpoint.transformer["num_layers"],
        "dtype": str(engine.dtype).removeprefix("torch."),
        "checkpoint": {"name": checkpoint.path.name, "identity": checkpoint.identity()},
        "scheduler": {"class": checkpoint.scheduler_class, "config": dict(checkpoint.scheduler)},
        "block_epsilon": checkpoint.transformer.get("eps"),
        "cache": None
        if cache is None
        else {
            "method": cache.method,
            "options": {name: str(value) for name, value in sorted(cache.options.items())},
            "forced": cache.forced,
            "qualified": cache.qualified,
        },
        "lock": None if lock is None else {"name": lock.name, "of": lock.of},
    }


def _statistics(tensor: torch.Tensor) -> dict[str, Any]:
    values = tensor.detach().float()
    absmax = float(values.abs().max())
    nan = inf = 0
    if absmax - absmax != 0:  # NaN or infinite, and so is at least one element
        nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
        values = values[values.isfinite()]
        absmax = float(values.abs().max()) if values.numel() else 0.0
    rms = float(torch.linalg.vector_norm(values)) / max(values.numel(), 1) ** 0.5
    return {"rms": rms, "absmax": absmax, "nan": nan, "inf": inf}


def _decision(event: Decision) -> DecisionRecord:
    where, judged = event.where, event.judgement
    return DecisionRecord(
        request=where.request,
        step=where.step.index,
        expert=where.step.expert,
        branch=where.branch,
        stage=where.place.stage,
        verdict=event.verdict,
        reason="forced" if event.forced and judged.verdict != event.verdict else judged.reason,
        shadow=judged.verdict if event.forced else None,
        signal=judged.signal,
        rescaled=judged.rescaled,
        accumulated_before=judged.accumulated_before,
        accumulated_after=judged.accumulated_after,
        threshold=judged.threshold,
        computed_blocks=event.computed_blocks,
        origins=tuple(OriginRecord(o.request, o.step, o.expert, o.branch, o.stage) for o in event.origins),
    )
