"""Holds a trace against its published schema, and its stored tensors against their digests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.trace import MANIFEST, TensorRecord, TraceError, events_file
from oracle.evidence.words import array_digest


def check_trace(folder: Path) -> Iterator[str]:
    """What is wrong with a trace, problem by problem. Raises TraceError for a folder that cannot be opened as one."""
    trace = open_trace(folder)
    manifest = _validator("manifest")
    yield from (f"{MANIFEST}: {error.message}" for error in manifest.iter_errors(dict(trace.manifest)))
    for rank in range(trace.world_size):
        yield from _check_events(folder / events_file(rank))
    yield from map(str, trace.holes)
    if trace.manifest["level"] == "tensor":
        yield from _check_tensors(trace)


def schema() -> dict[str, Any]:
    """The published JSON Schema."""
    loaded: dict[str, Any] = json.loads(files("oracle.evidence").joinpath("trace.schema.json").read_text("utf-8"))
    return loaded


def _check_events(file: Path) -> Iterator[str]:
    if not file.is_file():
        return  # a hole, reported as one
    lines = file.read_text("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError:
            continue  # likewise
        kind = event.get("kind") if isinstance(event, dict) else None
        if kind not in schema_kinds():
            yield f"{file.name}, line {number}: kind {kind!r} is not one of {', '.join(schema_kinds())}"
            continue
        for error in _validator(kind).iter_errors(event):
            yield f"{file.name}, line {number}: {'.'.join(map(str, error.absolute_path)) or kind}: {error.message}"


def _check_tensors(trace: Trace) -> Iterator[str]:
    for rank, records in trace.records.items():
        for record in records:
            if isinstance(record, TensorRecord):
                try:
                    found = array_digest(trace.raw(record.key, rank))
                except TraceError as error:
                    yield f"rank {rank}: {error}"
                    continue
                if found != record.digest:
                    yield f"rank {rank}: the bytes stored for {record.key} are not those that were digested"


@cache
def schema_kinds() -> tuple[str, ...]:
    return tuple(each["$ref"].rsplit("/", 1)[1] for each in schema()["$defs"]["event"]["oneOf"])


@cache
def _validator(definition: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator({**schema(), "$ref": f"#/$defs/{definition}"})
