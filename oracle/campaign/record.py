"""The JSON files that a campaign is judged by. Each carries the digest of what it says, so that an edited one shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oracle.campaign.refusal import CampaignError
from oracle.evidence.writer import write_whole


def digest_of(body: Mapping[str, Any]) -> str:
    """SHA-256 of plain values, whatever the order of their names. Raises ValueError for NaN, which is none."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def write_record(path: Path, schema: str, body: Mapping[str, Any]) -> str:
    """Write it whole, and return its digest. Equal bodies give equal bytes."""
    digest = digest_of(body)
    content = {"schema": schema, "digest": digest, **body}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"))
    return digest


def read_record(path: Path, schema: str) -> dict[str, Any]:
    """What was written. Raises CampaignError if it is not there, of another schema, or not what was written."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CampaignError(f"{path.name}: {type(error).__name__}: {error}.") from error
    found = content.pop("schema", None) if isinstance(content, dict) else None
    if found != schema:
        raise CampaignError(f"{path.name}: schema {found!r} is not accepted; this reader knows {schema}.")
    digest = content.pop("digest", None)
    if digest != digest_of(content):
        raise CampaignError(f"{path.name}: its digest is not that of what it says: it was changed by hand.")
    body: dict[str, Any] = content
    return body
