"""`CacheProfile`: a cache's method and options, and the one configuration that they were calibrated for.

A JSON file, checked when it is read. Loading one for anything else than its identity is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from wanref.caching.error import CacheError

VERSION = 1


@dataclass(frozen=True, slots=True)
class ProfileIdentity:
    """What a profile holds for. `schedule` is a digest of steps, experts and guidance."""

    checkpoint: str
    device: str
    dtype: str
    topology: str
    latent_shape: tuple[int, ...]
    schedule: str


@dataclass(frozen=True, slots=True)
class CacheProfile:
    """`options` are those of `method`. `calibrated_on` says where they come from, `qualified` whether that passed."""

    method: str
    options: Mapping[str, Any]
    identity: ProfileIdentity
    calibrated_on: str
    qualified: bool

    def check(self, found: ProfileIdentity) -> None:
        """Raise CacheError, with both values of whatever differs, if this profile is for something else."""
        differing = [
            f"{f.name}: the profile is for {getattr(self.identity, f.name)!r}, this run is {getattr(found, f.name)!r}"
            for f in fields(found)
            if getattr(self.identity, f.name) != getattr(found, f.name)
        ]
        if differing:
            raise CacheError(f"the cache profile was calibrated for another run. {'; '.join(differing)}.")


def read_profile(path: Path) -> CacheProfile:
    """Raises CacheError for a file that is not a profile of this version, naming the field."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:  # not there, not JSON, not UTF-8
        raise CacheError(f"cache profile {path}: {error}.") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise CacheError(f"cache profile {path}: version {VERSION} is read, not {_get(content, 'version')!r}.")
    identity = _fields(path, "identity", content.get("identity"), _IDENTITY)
    body = _fields(path, "profile", {key: value for key, value in content.items() if key != "version"}, _PROFILE)
    shape = identity.pop("latent_shape")
    if not all(type(side) is int for side in shape):
        raise CacheError(f"cache profile {path}: identity.latent_shape is {shape!r}, not a list of integers.")
    body["identity"] = ProfileIdentity(**identity, latent_shape=tuple(shape))
    return CacheProfile(**body)


def write_profile(path: Path, profile: CacheProfile) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    draft.write_text(json.dumps({"version": VERSION, **asdict(profile)}, indent=2) + "\n")
    os.replace(draft, path)


_IDENTITY = {
    "checkpoint": str,
    "device": str,
    "dtype": str,
    "topology": str,
    "latent_shape": list,
    "schedule": str,
}
_PROFILE = {"method": str, "options": dict, "identity": dict, "calibrated_on": str, "qualified": bool}


def _fields(path: Path, name: str, value: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CacheError(f"cache profile {path}: {name} is {value!r}, not an object.")
    if value.keys() != kinds.keys():
        missing, unknown = sorted(kinds.keys() - value.keys()), sorted(value.keys() - kinds.keys())
        raise CacheError(f"cache profile {path}: {name} lacks {missing} and has unknown {unknown}.")
    for key, kind in kinds.items():
        if not isinstance(value[key], kind):
            raise CacheError(f"cache profile {path}: {name}.{key} is {value[key]!r}, not {kind.__name__}.")
    return dict(value)


def _get(content: object, key: str) -> object:
    return content.get(key) if isinstance(content, dict) else content
