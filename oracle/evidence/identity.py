"""What a trace is, in one digest: by it a locked run says whose values it was given."""

from __future__ import annotations

import hashlib

from oracle.evidence.reader import Trace
from oracle.evidence.trace import MANIFEST, TraceError, events_file


def identity_of(trace: Trace) -> str:
    """SHA-256 of a trace's manifest and of every rank's events, which hold the digests of its tensors.

    Raises TraceError where a rank recorded nothing: a trace with a hole is no reference.
    """
    digest = hashlib.sha256()
    for name in (MANIFEST, *map(events_file, range(trace.world_size))):
        try:
            content = (trace.folder / name).read_bytes()
        except OSError as error:
            raise TraceError(f"{trace.folder}: {name}: {error}; a trace with a hole is no reference.") from error
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
