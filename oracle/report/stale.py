"""Whether evidence is of the tree that is checked out."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

from oracle.evidence.revision import Revision, _git, revision_of


def checked_out(subject: str, folder: Path) -> str | None:
    """The commit of the subject's own source tree, where it is a package in one; else of the tree around `folder`."""
    try:
        own = revision_of(subject).revision
    except PackageNotFoundError:
        own = None
    return own or _git(folder, "rev-parse", "HEAD")


def describe_revision(subject: Revision, tree: str | None) -> str:
    """`engine 1.0 at abc1234 with uncommitted changes, stale: recorded at abc1234, this tree is def5678`."""
    at = f" at {subject.revision[:7]}" if subject.revision else ""
    dirty = " with uncommitted changes" if subject.dirty else ""
    old = stale(subject.revision, tree)
    return f"{subject.name} {subject.version}{at}{dirty}{f', stale: {old}' if old else ''}"


def stale(recorded: str | None, tree: str | None) -> str | None:
    """What to say of evidence of another revision than the tree's; None where they are one, or one is not known."""
    if not recorded or not tree or recorded.startswith(tree) or tree.startswith(recorded):
        return None
    return f"recorded at {recorded[:7]}, this tree is {tree[:7]}"
