"""Reads traces lazily: events line by line, tensors one at a time. Needs NumPy, and neither torch nor diffusers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.evidence.trace import (
    MANIFEST,
    SCHEMA,
    Record,
    TraceError,
    events_file,
    from_line,
    tensor_name,
    tensors_file,
)
from wanref.observe import TensorKey

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,  # NumPy has no such type: widened below
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_REQUIRED = ("world_size", "topology", "level", "digest", "layers")


@dataclass(frozen=True, slots=True)
class Hole:
    """Evidence that should be there and is not."""

    rank: int
    what: str
    request: int | None = None
    key: TensorKey | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}"


@dataclass(frozen=True)
class Trace:
    """An opened trace. Holes are known once the events have been read: `records` reads them all, once."""

    folder: Path
    manifest: Mapping[str, Any] = field(repr=False)

    @property
    def world_size(self) -> int:
        return int(self.manifest["world_size"])

    @cached_property
    def _read(self) -> tuple[dict[int, tuple[Record, ...]], tuple[Hole, ...]]:
        holes: list[Hole] = []
        records = {rank: tuple(self._events(rank, holes)) for rank in range(self.world_size)}
        for file in sorted(self.folder.glob("rank*.events.jsonl")):
            match = re.fullmatch(r"rank(\d+)\.events\.jsonl", file.name)
            if match and int(match[1]) >= self.world_size:
                holes.append(Hole(int(match[1]), f"recorded, though the world has {self.world_size} ranks"))
        for file in sorted(self.folder.glob("rank*.incomplete.txt")):
            rank = re.match(r"rank(\d+)\.", file.name)
            says = file.read_text("utf-8", errors="replace").strip()
            holes.append(Hole(int(rank[1]) if rank else 0, f"is incomplete: {says}"))
        return records, tuple(holes)

    @property
    def records(self) -> Mapping[int, tuple[Record, ...]]:
        """Every rank's records, in the order in which they were written."""
        return self._read[0]

    @property
    def holes(self) -> tuple[Hole, ...]:
        """What the files lack: a rank's file, a line, the rest of a line."""
        return self._read[1]

    def array(self, key: TensorKey, rank: int) -> npt.NDArray[Any]:
        """The tensor that `rank` recorded at `key`, bfloat16 widened to float32. Raises TraceError without one."""
        array = self.raw(key, rank)
        return _widen(array) if array.dtype == np.uint16 else array

    def raw(self, key: TensorKey, rank: int) -> npt.NDArray[Any]:
        """The same in the bytes that were stored, bfloat16 as uint16. Only this tensor's bytes are read."""
        file = self.folder / tensors_file(key.request, rank, key.step)
        name = tensor_name(key)
        try:
            header, start = _header(file)
            dtype, shape, (begin, end) = (header[name][part] for part in ("dtype", "shape", "data_offsets"))
            count = (end - begin) // _size(dtype)
            flat: npt.NDArray[Any] = np.fromfile(file, _DTYPES[dtype], count, offset=start + begin)
            array = flat.reshape(shape)
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise TraceError(f"{file.name}: no tensor {name}: {type(error).__name__}: {error}") from error
        return array

    def _events(self, rank: int, holes: list[Hole]) -> Iterator[Record]:
        file = self.folder / events_file(rank)
        if not file.is_file():
            holes.append(Hole(rank, "recorded nothing: its events file is missing"))
            return
        with file.open(encoding="utf-8", errors="replace", newline="\n") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    yield from_line(line)
                except TraceError as error:
                    cut = " (cut short)" if not line.endswith("\n") else ""
                    holes.append(Hole(rank, f"line {number}{cut}: {error}"))


def open_trace(folder: Path | str) -> Trace:
    """Raises TraceError for a folder without a manifest, or with one of another version."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"trace={str(folder)!r} is not accepted: {MANIFEST}: {error}") from error
    found = manifest.get("schema") if isinstance(manifest, dict) else None
    if found != SCHEMA:
        raise TraceError(f"trace={str(folder)!r} is not accepted: schema {found!r}; this reader knows {SCHEMA}.")
    missing = [name for name in _REQUIRED if name not in manifest]
    if missing:
        raise TraceError(f"trace={str(folder)!r} is not accepted: {MANIFEST} lacks {', '.join(missing)}.")
    return Trace(folder, manifest)


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where the bytes of its tensors start."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("cut short")
        return json.loads(stream.read(length)), 8 + length


def _size(dtype: str) -> int:
    return int(np.dtype(_DTYPES[dtype]).itemsize)


def _widen(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (words.astype(np.uint32) << 16).view(np.float32)
