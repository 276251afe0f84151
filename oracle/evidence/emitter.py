"""Writes a trace of an engine that is not wanref: values and decisions are handed in by name.

Needs NumPy, and neither torch nor diffusers; torch tensors are taken all the same.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.evidence import words
from oracle.evidence.revision import Revision
from oracle.evidence.trace import (
    LEVELS,
    SCHEMA,
    DecisionRecord,
    ErrorRecord,
    Level,
    RequestRecord,
    StepRecord,
    TensorRecord,
    TraceError,
    tensor_name,
    tensors_file,
)
from oracle.evidence.writer import TraceWriter, write_manifest, write_whole
from wanref.observe import TensorKey, TensorSource
from wanref.topology import parse_topology

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names in NumPy, where it has one, and in safetensors."""

_STEP = ("index", "timestep", "sigma", "expert", "guidance_scale")


@dataclass(frozen=True, slots=True)
class Engine:
    """What a manifest says of an engine. `layers` counts the transformer's blocks; `cache` is None without one, else a
    mapping with at least `method`; `facts` is anything more that two runs should agree on."""

    name: str
    version: str
    layers: int
    topology: str = "pp1cfg1"
    dtype: str = "float32"
    cache: Mapping[str, Any] | None = None
    revision: str | None = None
    dirty: bool | None = None
    facts: Mapping[str, Any] | None = None

    def manifest(self, level: Level) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "level": level,
            "digest": words.NAME,
            "subject": asdict(Revision(self.name, self.version, self.revision, self.dirty)),
            "libraries": {},
            "python": platform.python_version(),
            "host": socket.gethostname(),
            "topology": self.topology,
            "world_size": parse_topology(self.topology).world_size,
            "layers": self.layers,
            "dtype": self.dtype,
            "cache": None if self.cache is None else dict(self.cache),
            **(self.facts or {}),
        }


def check_part(engine: Engine, rank: int, level: str) -> None:
    """Raises ValueError for what no trace can have."""
    parse_topology(engine.topology).place(rank)
    if level not in LEVELS:
        raise TraceError(f"level={level!r} is not accepted: give one of {', '.join(LEVELS)}.")


class Emitter:
    """One rank's part of a trace. Raises TraceError for what is no part of one, OSError if the folder takes no more."""

    def __init__(self, folder: Path, engine: Engine, rank: int = 0, level: Level = "stats") -> None:
        check_part(engine, rank, level)
        self.level = LEVELS.index(level)
        self._writer = TraceWriter(folder, rank)
        self._rank = rank
        self._requests = 0
        self._seen: Counter[TensorKey] = Counter()
        self._step: tuple[int, int] | None = None
        self._schedule: tuple[Mapping[str, Any], ...] = ()
        self._pending: dict[str, tuple[str, npt.NDArray[Any]]] = {}
        if rank == 0:
            write_manifest(folder, engine.manifest(level))

    def begin(self, schedule: Sequence[Mapping[str, Any]], resolved: Mapping[str, Any] | None = None) -> int:
        """A request begins: its steps, each with index, timestep, sigma, expert and guidance_scale, and what was asked.

        Returns the request's number on the engine, which its keys carry.
        """
        for number, step in enumerate(schedule):
            missing = [name for name in _STEP if name not in step]
            if missing or step["index"] != number:
                wrong = f"lacks {', '.join(missing)}" if missing else f"has index {step['index']}"
                raise TraceError(f"schedule: step {number} {wrong}.")
        request = self._requests
        self._requests += 1
        self._seen.clear()
        self._step = None
        self._schedule = tuple(schedule)
        self._writer.write(RequestRecord(request, "begin", dict(resolved or {}), self._schedule))
        return request

    def end(self, request: int, outcome: str = "done") -> None:
        """It ends: `done`, `aborted` or `failed`."""
        if outcome not in ("done", "aborted", "failed"):
            raise TraceError(f"outcome={outcome!r} is not accepted: give done, aborted or failed.")
        self.flush()
        self._writer.write(RequestRecord(request, outcome))

    def tensor(self, key: TensorKey, value: Any, source: TensorSource = "computed") -> None:
        """The value at a key: an array, or a torch tensor on any device. A key that comes again is another occurrence.

        Nothing is copied to the host below level `digest`.
        """
        self._enter(key.request, key.step, key.expert)
        if not self.level:
            return
        self._seen[key] += 1
        key = replace(key, occurrence=self._seen[key] - 1)
        dtype, array = as_array(value)
        statistics = _statistics(dtype, array) if self.level >= LEVELS.index("stats") else {}
        self._writer.write(TensorRecord(key, dtype, array.shape, words.array_digest(array), source, **statistics))
        if self.level >= LEVELS.index("tensor"):
            self._pending[tensor_name(key)] = dtype, array.copy()

    def decision(self, record: DecisionRecord) -> None:
        self._enter(record.request, record.step, record.expert)
        self._writer.write(record)

    def error(self, error: BaseException) -> None:
        self._writer.write(ErrorRecord(type(error).__name__, str(error)))

    def flush(self) -> None:
        """Write the tensors of the step that is over, whole."""
        if self._pending and self._step is not None:
            request, step = self._step
            path = self._writer.folder / tensors_file(request, self._rank, step)
            if path.exists():
                raise TraceError(f"{path.name} is there already: step {step} of request {request} came back.")
            write_whole(path, lambda draft: _save(draft, self._pending))
        self._pending = {}

    def close(self) -> None:
        self._writer.close()

    def _enter(self, request: int, step: int, expert: str) -> None:
        """A step begins with the first that is said of it."""
        if self._step == (request, step):
            return
        self.flush()
        self._step = request, step
        if step < len(self._schedule):
            asked = self._schedule[step]
            self._writer.write(
                StepRecord(request, step, expert, asked["timestep"], asked["sigma"], asked["guidance_scale"])
            )


def as_array(value: Any) -> tuple[str, npt.NDArray[Any]]:
    """Its dtype's name and its values on the host; bfloat16, which NumPy has not, as its 16-bit words.

    Raises TraceError for anything else than numbers of a dtype that traces hold.
    """
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        if value.dtype == torch.bfloat16:
            return "bfloat16", value.view(torch.int16).numpy().view(np.uint16)
        value = value.numpy()
    array = np.ascontiguousarray(value)
    if array.dtype.name == "bfloat16":  # of ml_dtypes, as JAX has it
        return "bfloat16", array.view(np.uint16)
    if array.dtype.name not in _DTYPES:
        raise TraceError(f"dtype={array.dtype.name!r} is not accepted: give one of {', '.join(_DTYPES)}.")
    return array.dtype.name, array


def _save(path: Path, parts: Mapping[str, tuple[str, npt.NDArray[Any]]]) -> None:
    """A safetensors file: the header's length, the header, the bytes. The library's NumPy interface has no bfloat16."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, array) in parts.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _DTYPES[dtype], "shape": array.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, array in parts.values():
            stream.write(array.tobytes())


def _statistics(dtype: str, array: npt.NDArray[Any]) -> dict[str, Any]:
    """As the probe has them: over the finite elements."""
    values = (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array
    values = values.astype(np.float64).ravel()
    nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    if nan or inf:
        values = values[np.isfinite(values)]
    if not values.size:
        return {"rms": 0.0, "absmax": 0.0, "nan": nan, "inf": inf}
    rms = float(np.sqrt(np.square(values).mean()))
    return {"rms": rms, "absmax": float(np.abs(values).max()), "nan": nan, "inf": inf}
