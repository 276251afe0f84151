"""The file that a shard writes: values and arrays under a key, in a safetensors file that tells if it is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from oracle.campaign.refusal import CampaignError
from oracle.evidence.writer import write_whole

SCHEMA = "wanref.campaign.shard/1"


@dataclass(frozen=True, slots=True)
class Content:
    """values: what JSON can hold. arrays: by name."""

    values: Any
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def digest(self, key: str) -> str:
        """SHA-256 of all of it, with the key that it is kept under."""
        digest = hashlib.sha256(json.dumps([key, self.values], sort_keys=True, allow_nan=False).encode())
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def write_content(path: Path, key: str, content: Content) -> None:
    """Under `path` there is all of it or nothing. Raises ValueError for a value that JSON cannot hold, as NaN."""
    said = {"schema": SCHEMA, "key": key, "digest": content.digest(key), "values": content.values}
    # In one entry: the order of several in a safetensors header is not fixed, and equal contents give equal bytes.
    header = {"shard": json.dumps(said, sort_keys=True, allow_nan=False)}
    arrays = {name: np.ascontiguousarray(array) for name, array in content.arrays.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda draft: save_file(arrays, draft, header))


def read_content(path: Path, key: str | None = None) -> Content:
    """What was written under `key`, or under any. Raises CampaignError if it is not there, not whole, or of another."""
    try:
        with safe_open(path, "np") as file:
            said = json.loads(file.metadata()["shard"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        content = Content(said["values"], arrays)
        found, digest, schema = said["key"], said["digest"], said["schema"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CampaignError(f"{path.name}: {type(error).__name__}: {error}.") from error
    if schema != SCHEMA:
        raise CampaignError(f"{path.name}: schema {schema!r} is not accepted; this reader knows {SCHEMA}.")
    if key is not None and found != key:
        raise CampaignError(f"{path.name}: it was written for other work than what is asked now.")
    if digest != content.digest(found):
        raise CampaignError(f"{path.name}: what it holds is not what was written: its digest differs.")
    return content
