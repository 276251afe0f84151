"""What the runs of a matrix ran on, by their manifests: one list of facts, and where a run was different."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from oracle.evidence.reader import Trace
from oracle.evidence.revision import Revision
from oracle.report.stale import checked_out, describe_revision, stale


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and its value. Where runs differ there is a value for each, with the runs that have it."""

    name: str
    values: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def alike(self) -> bool:
        return len(self.values) == 1


def environment(traces: Sequence[Trace], tree: Path) -> list[Fact]:
    """Facts of all traces. `tree`: a folder of the source tree that the subject's revision is held against.

    The host's name is left out: a page is passed on, and its traces keep it.
    """
    by_fact: dict[str, dict[str, list[str]]] = {}
    for trace in traces:
        for name, value in _facts(trace.manifest, tree).items():
            run = f"{trace.folder.parent.name}/{trace.folder.name}"
            by_fact.setdefault(name, {}).setdefault(value, []).append(run)
    return [
        Fact(name, tuple((value, tuple(runs)) for value, runs in values.items())) for name, values in by_fact.items()
    ]


def stale_subjects(traces: Sequence[Trace], tree: Path) -> list[str]:
    """What is to be said of evidence that is not of the tree that is checked out; each sentence once."""
    subjects = dict.fromkeys(filter(None, (_subject(trace.manifest) for trace in traces)))
    said = ((subject.name, stale(subject.revision, checked_out(subject.name, tree))) for subject in subjects)
    return [f"{name}: {says}" for name, says in said if says is not None]


def _facts(manifest: Mapping[str, Any], tree: Path) -> dict[str, str]:
    subject, checkpoint = _subject(manifest), manifest.get("checkpoint") or {}
    libraries = manifest.get("libraries") or {}
    return {
        "subject": "not recorded" if subject is None else describe_revision(subject, checked_out(subject.name, tree)),
        "checkpoint": f"{checkpoint.get('name', 'not recorded')}, identity {str(checkpoint.get('identity'))[:16]}",
        "dtype": _said(manifest, "dtype"),
        "device": _said(manifest, "device"),
        "threads": _said(manifest, "threads"),
        "level": f"{manifest['level']}, digests by {manifest['digest']}",
        "python": _said(manifest, "python"),
        "libraries": ", ".join(f"{name} {version}" for name, version in libraries.items()) or "not recorded",
    }


def _subject(manifest: Mapping[str, Any]) -> Revision | None:
    recorded = manifest.get("subject")
    if not isinstance(recorded, Mapping) or not {"name", "version"} <= recorded.keys():
        return None
    return Revision(**{f.name: recorded[f.name] for f in fields(Revision) if f.name in recorded})


def _said(manifest: Mapping[str, Any], name: str) -> str:
    return str(manifest.get(name, "not recorded"))
