"""Digests of files, each computed once."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def file_digest(file: Path) -> str:
    """SHA-256 of a file, remembered under the user's cache folder by its path, size and time of change."""
    stat = file.stat()
    key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    memo = root / "wanref" / "digests" / hashlib.sha256(key.encode()).hexdigest()
    if memo.is_file():
        return memo.read_text()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    with suppress(OSError):  # a home that cannot be written to: computed each time
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memo.parent, delete=False) as draft:
            draft.write(digest)
        os.replace(draft.name, memo)
    return digest
