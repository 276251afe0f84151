"""Whose run a trace shows: name, version, and the revision of its source."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Revision:
    """`revision` is the commit of the source tree, None outside one; `dirty`, whether the tree had changes."""

    name: str
    version: str
    revision: str | None = None
    dirty: bool | None = None


@cache
def revision_of(package: str, distribution: str | None = None) -> Revision:
    """Of an importable package, once a process. distribution: what it is installed as, if that has another name."""
    version = importlib.metadata.version(distribution or package)
    spec = importlib.util.find_spec(package)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    commit = None if folder is None else _git(folder, "rev-parse", "HEAD")
    if folder is None or commit is None or _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return Revision(package, version)
    return Revision(package, version, commit, bool(_git(folder, "status", "--porcelain", "--", ".")))


def _git(folder: Path, *words: str) -> str | None:
    """What git prints, or None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
