"""A real fault: the release that has it, and the one that mended it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

CASES = Path(__file__).with_name("cases.toml")


@dataclass(frozen=True, slots=True)
class Case:
    """before, after: versions of `package`. wrong: in one sentence. scenario: a function of `scenarios`."""

    id: str
    package: str
    before: str
    after: str
    wrong: str
    source: str
    scenario: str


def read_cases() -> tuple[Case, ...]:
    """Raises ValueError for a case that lacks something, or has more."""
    cases = []
    for entry in tomllib.loads(CASES.read_text("utf-8"))["case"]:
        if entry.keys() != {field.name for field in fields(Case)}:
            raise ValueError(f"case {entry.get('id')!r}: give exactly {', '.join(f.name for f in fields(Case))}.")
        cases.append(Case(**entry))
    return tuple(cases)
