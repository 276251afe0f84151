"""Writes one rank's part of a trace, so that whatever ends the run leaves a trace that says how far it came."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oracle.evidence.trace import MANIFEST, Record, TraceError, events_file, to_line


class TraceExists(TraceError):
    """The folder has a trace of this rank already."""


class TraceWriter:
    """Events of one rank, each written as it comes. Raises TraceExists for a folder that this rank has a trace in."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        try:
            # Without a buffer: what a full disk refused is not tried again when the file is closed.
            self._events = (folder / events_file(rank)).open("xb", buffering=0)
        except FileExistsError:
            raise TraceExists(f"folder={str(folder)!r} is not accepted: it has a trace. Give a new folder.") from None

    def write(self, record: Record) -> None:
        # One write of a whole line: what a crash can cut is the last line, and a reader sees that.
        line = to_line(record).encode() + b"\n"
        if self._events.write(line) != len(line):
            raise OSError(errno.ENOSPC, "the disk took a part of an event", self._events.name)

    def close(self) -> None:
        self._events.close()


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest."""
    write_whole(folder / MANIFEST, lambda draft: draft.write_text(json.dumps(manifest, indent=2) + "\n"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """`write` under another name, flushed to the disk, then renamed: under `path` there is all of it or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(draft)
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
