"""Known failures that a suite lives with for a while: each with its reason, and a date on which it ends."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any


class WaiverError(ValueError):
    """A file of waivers that cannot be read, or a waiver that lacks something."""


@dataclass(frozen=True, slots=True)
class Waiver:
    """`test`: an id of pytest's, in which `*` stands for anything. `says`: a part of the failure's sentence. It holds
    to the end of the day `until`. `number`: its place in the file, from 1."""

    number: int
    test: str
    says: str
    reason: str
    until: date

    @property
    def label(self) -> str:
        return f"waiver {self.number}, until {self.until}: {self.reason}"

    def is_for(self, test: str) -> bool:
        pattern = ".*".join(map(re.escape, self.test.split("*")))
        return re.fullmatch(pattern, test, re.DOTALL) is not None

    def matches(self, test: str, sentence: str) -> bool:
        return self.is_for(test) and self.says in sentence


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Raises WaiverError."""
    try:
        held = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise WaiverError(f"{path}: {error}") from error
    entries = held.pop("waiver", [])
    if held or not isinstance(entries, list):
        raise WaiverError(f"{path}: {', '.join(held) or 'waiver'} is not accepted: give [[waiver]] tables only.")
    return tuple(_waiver(path, number, entry) for number, entry in enumerate(entries, 1))


def _waiver(path: Path, number: int, entry: dict[str, Any]) -> Waiver:
    types = {"test": str, "says": str, "reason": str, "until": date}
    where = f"{path}: waiver {number}"
    if unknown := entry.keys() - types.keys():
        raise WaiverError(f"{where}: {', '.join(sorted(unknown))} is not accepted: give {', '.join(types)}.")
    for name, kind in types.items():
        value = entry.get(name)
        # A date with a time is a date, too, to isinstance.
        if type(value) is not kind or value == "":
            what = "a date, as 2027-01-31" if kind is date else "a text"
            told = "is missing" if name not in entry else f"is {value!r}"
            raise WaiverError(f"{where}: {name} {told}: give {what}.")
    return Waiver(number, **entry)


def applies(waivers: Sequence[Waiver], test: str, sentence: str, today: date) -> Waiver | None:
    """The one that waives this failure, of which the last to end; None if there is none."""
    live = [each for each in waivers if each.matches(test, sentence) and each.until >= today]
    return max(live, key=lambda each: each.until, default=None)


def ended(waivers: Sequence[Waiver], test: str, sentence: str, today: date) -> tuple[Waiver, ...]:
    """Those that waived it until they ended."""
    return tuple(each for each in waivers if each.matches(test, sentence) and each.until < today)
