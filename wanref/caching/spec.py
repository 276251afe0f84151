"""`CacheSpec`: a cache by name and options, as a command line or a profile gives it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanref.caching.error import CacheError
from wanref.caching.profile import CacheProfile, read_profile

METHODS = ("teacache", "fixed", "cache-dit")

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Which cache, with which options; from a profile, or by hand. `forced`: evaluate, record, and compute all."""

    method: str
    options: Options
    profile: CacheProfile | None = None
    forced: bool = False

    @property
    def qualified(self) -> bool:
        """Whether a campaign has passed with just this. What is given by hand never is."""
        return self.profile is not None and self.profile.qualified


def parse_cache(text: str, forced: bool = False) -> CacheSpec:
    """`METHOD:option=value,...`, or the path of a profile (`*.json`). Raises CacheError naming what is wrong."""
    if text.endswith(".json"):
        profile = read_profile(Path(text))
        return CacheSpec(check_method(profile.method), profile.options, profile, forced)
    method, _, listed = text.partition(":")
    options: dict[str, str] = {}
    for entry in filter(None, listed.split(",")):
        name, equals, value = entry.partition("=")
        if not equals or name in options:
            raise CacheError(f"cache={text!r}: {entry!r} is not one option=value, given once.")
        options[name] = value
    return CacheSpec(check_method(method), options, None, forced)


def check_method(name: str) -> str:
    """The name, if it is one of a cache. Raises CacheError."""
    if name not in METHODS:
        raise CacheError(f"cache={name!r} is not accepted: give one of {', '.join(METHODS)}, or a profile (*.json).")
    return name
