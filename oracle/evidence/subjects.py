"""What can be put under the oracle: run a request, and there is a trace and an output.

Anybody's engine is a subject if it has these two members; `oracle.evidence.emit` records it. Here are wanref itself,
and a folder that was recorded earlier; a stock `diffusers.WanPipeline` is in `stock.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.trace import Level, RequestRecord, TensorRecord, TraceError

if TYPE_CHECKING:
    from wanref import Request, WanReference

Array = npt.NDArray[Any]
Place = tuple[int, str]
"""(step, branch)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one run leaves. latents: the final ones, float32 [batch, channels, frames, height, width]. video: float32
    [batch, frames, height, width, 3] in [0, 1], None if it was not asked for.

    work: by module of a block (`attn1`, `ffn`), in how many blocks it ran at each place; None where nobody counted.
    claimed: how many hits the subject's own statistics name; None where it keeps none.
    """

    trace: Trace
    latents: Array | None = None
    video: Array | None = None
    work: dict[str, dict[Place, int]] | None = None
    claimed: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> dict[str, Array]:
        """By name, as `oracle.report.arrays` compares outputs."""
        named = {"latents": self.latents, "video": self.video}
        return {name: array for name, array in named.items() if array is not None}


class Subject(Protocol):
    """name: for people. run: one request, recorded into a folder that must be new."""

    name: str

    def run(self, request: Request, folder: Path) -> Evidence: ...


@dataclass(frozen=True, slots=True)
class FirstBlockRule:
    """Reuse all blocks but the first while its residual has changed by less than `threshold` since the last call that
    computed; `warmup` calls of an expert and branch are computed first. folded: on a reuse, what leaves the first block
    has the residual of the others in it."""

    threshold: float
    warmup: int = 0
    folded: bool = False


@dataclass(frozen=True, slots=True)
class CountedRule:
    """Compute the first `first` calls of an expert and branch; then reuse at `between`, compute one, and so on."""

    first: int
    between: int


@dataclass(frozen=True, slots=True)
class Target:
    """What an audit needs: how to make the subject anew, each time with nothing behind it.

    plain: the same without its cache. forced: with the cache, told to reuse nothing; None where it cannot be told so.
    fail: lets a request of the subject fail in the middle. disable: takes its cache off. enable: puts the
    cache on a plain one. rule: by which it decides, as far as that is replayed.
    """

    name: str
    fresh: Callable[[], Subject]
    plain: Callable[[], Subject] | None = None
    forced: Callable[[], Subject] | None = None
    fail: Callable[[Any, Request], None] | None = None
    disable: Callable[[Any], None] | None = None
    enable: Callable[[Any], None] | None = None
    rule: FirstBlockRule | CountedRule | None = None


class Wanref:
    """An engine of wanref, on one rank, with whatever cache is mounted on it."""

    def __init__(self, engine: WanReference, level: Level = "tensor") -> None:
        self.name = "wanref" if engine.cache is None else f"wanref, {engine.cache.method}"
        self._engine = engine
        self._level = level

    def run(self, request: Request, folder: Path) -> Evidence:
        from oracle.evidence.probe import record

        output = record(self._engine, request, folder, self._level)
        reused = sum(decision.verdict == "reuse" for decision in output.decisions)
        claimed = None if self._engine.cache is None else reused
        return Evidence(open_trace(folder), output.latents.float().numpy(), output.video, None, claimed)


class Recorded:
    """A trace that is there already. It cannot run anything: whatever is asked, it is what was recorded."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._trace = open_trace(folder)

    def run(self, request: Request, folder: Path) -> Evidence:
        """Raises TraceError where the trace holds another request: other values than were asked for."""
        records = [record for rank in sorted(self._trace.records) for record in self._trace.records[rank]]
        begun = next((record for record in records if isinstance(record, RequestRecord)), None)
        resolved = {} if begun is None or begun.resolved is None else begun.resolved
        for name in ("steps", "height", "width", "frames", "guidance_scale"):
            asked, held = getattr(request, name), resolved.get(name)
            if asked is not None and held is not None and asked != held:
                raise TraceError(f"{self.name}: {name}={asked} was asked, and the trace is of {name}={held}.")
        tensors = [record for record in records if isinstance(record, TensorRecord)]
        latents, video = (self._last(tensors, block) for block in ("scheduler", "decode"))
        return Evidence(self._trace, latents, video)

    def _last(self, tensors: Sequence[TensorRecord], block: str) -> Array | None:
        """The last value that was computed at that block, where the trace kept tensors."""
        keys = [record.key for record in tensors if record.key.block == block and record.source == "computed"]
        if not keys or self._trace.manifest["level"] != "tensor":
            return None
        last = max(keys, key=lambda key: (key.request, key.step))
        rank = next(r for r, held in self._trace.records.items() if any(getattr(e, "key", None) == last for e in held))
        return np.asarray(self._trace.array(last, rank), dtype=np.float32)
