"""What tests of the oracle share: recorded runs on ranks, and traces that a test edits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oracle.evidence.reader import Trace, open_trace
from suites.support import defaults, load_engine
from wanref.request import Request
from wanref.topology import parse_topology

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

ASKED = Request(
    prompt="a red square",
    height=32,
    width=32,
    frames=1,
    steps=4,
    guidance_scale=4.0,
    seed=7,
    max_sequence_length=16,
)
TEACACHE = "teacache:coefficients=1/0,dialect=teacache,signal=timestep_projection,threshold=0.6,first=1"
LIVE = "teacache:coefficients=1/0,dialect=vllm-omni,signal=modulated_input,threshold=0.2"
"""Decides by the hidden states."""
CACHE_DIT = "cache-dit:threshold=0.5,max_warmup_steps=1"

Event = dict[str, Any]


def record_on_rank(
    checkpoint: str,
    topology: str,
    folder: str,
    level: str,
    cache: str | None,
    forced: bool,
    requests: Sequence[Request],
    dtype: str,
) -> None:
    """For ranks: these requests in turn on one engine, recorded into one trace."""
    from oracle.evidence.probe import recording
    from wanref.caching.spec import parse_cache

    engine = load_engine(checkpoint, topology, dtype, defaults=defaults())
    if cache is not None:
        engine.mount(parse_cache(cache, forced))
    with recording(engine, Path(folder), level):  # type: ignore[arg-type]
        for request in requests:
            engine(request)


def record_trace(
    ranks: RankPool,
    checkpoint: Path,
    folder: Path,
    topology: str = "pp1cfg1",
    cache: str | None = None,
    forced: bool = False,
    level: str = "tensor",
    requests: Sequence[Request] = (ASKED,),
    dtype: str = "float32",
) -> Trace:
    world = parse_topology(topology).world_size
    ranks.run(world, record_on_rank, str(checkpoint), topology, str(folder), level, cache, forced, requests, dtype)
    return open_trace(folder)


def edited(trace: Trace, folder: Path, edit: Callable[[Event], Event | None], rank: int = 0) -> Trace:
    """A copy of a trace in which each event of a rank has gone through `edit`; None drops it."""
    shutil.copytree(trace.folder, folder)
    file = folder / f"rank{rank}.events.jsonl"
    events = [edit(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(event) + "\n" for event in events if event is not None))
    return open_trace(folder)


def with_manifest(trace: Trace, folder: Path, **changes: Any) -> Trace:
    """A copy of a trace with another manifest."""
    shutil.copytree(trace.folder, folder)
    (folder / "manifest.json").write_text(json.dumps({**trace.manifest, **changes}))
    return open_trace(folder)
