"""What tests of the engine share: fingerprints of tensors, recorded runs, engines on ranks."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wanref.observe import Event, ExchangeEvent, StepEvent, TensorEvent, TensorKey
from wanref.request import EngineDefaults, Request
from wanref.topology import parse_topology

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool
    from wanref.pipeline import WanReference


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Equal exactly for the same bytes in the same dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


def fingerprint(value: torch.Tensor | np.ndarray) -> Fingerprint:
    """Of a tensor or an array. NaN and constants are refused: such values agree whatever was computed."""
    tensor = torch.as_tensor(value).detach().cpu().contiguous()
    assert torch.isfinite(tensor).all(), "not finite: equal fingerprints would prove nothing"
    assert tensor.numel() == 1 or tensor.min() < tensor.max(), "constant: equal fingerprints would prove nothing"
    digest = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
    return Fingerprint(str(tensor.dtype), tuple(tensor.shape), digest)


class Recorder:
    """An observer that keeps every event, and of every computed tensor its fingerprint.

    `hook` is called with each event. What was received or reused is the oracle's to compare.
    """

    def __init__(self, hook: Callable[[Event], None] | None = None) -> None:
        self.hook = hook
        self.events: list[Event | TensorKey] = []
        self.tensors: dict[TensorKey, Fingerprint] = {}

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, TensorEvent) and event.source != "computed":
            pass
        elif isinstance(event, TensorEvent):
            assert event.key not in self.tensors, f"{event.key} was recorded twice on one rank"
            self.tensors[event.key] = fingerprint(event.tensor)
            self.events.append(event.key)
        else:
            self.events.append(event)
        if self.hook is not None:
            self.hook(event)


@dataclass(frozen=True, slots=True)
class Run:
    """What one request left on one rank, in a form that travels between processes."""

    rank: int
    owner: int
    topology: str
    idle_ranks: tuple[int, ...]
    seeds: tuple[int | None, ...]
    latents: Fingerprint
    video: Fingerprint | None
    events: tuple[Event | TensorKey, ...] = field(repr=False)
    tensors: dict[TensorKey, Fingerprint] = field(repr=False)
    log: tuple[ExchangeEvent, ...] = field(repr=False)

    @property
    def result(self) -> tuple[Fingerprint, Fingerprint | None]:
        return self.latents, self.video


def load_engine(folder: Path | str, topology: str = "pp1cfg1", dtype: str = "float32", **options: Any) -> WanReference:
    from wanref.pipeline import WanReference

    silence()
    return WanReference.from_pretrained(folder, topology=topology, dtype=dtype, **options)


def observed(engine: WanReference, request: Request, hook: Callable[[Event], None] | None = None) -> Run:
    """Run one request under a Recorder. Keys are those of request 0, whatever came before it on the engine."""
    recorder = Recorder(hook)
    engine.observer = recorder
    output = engine(request)
    return Run(
        rank=output.rank,
        owner=output.owner,
        topology=str(output.topology),
        idle_ranks=tuple(output.idle_ranks),
        seeds=tuple(noise.seed for noise in output.request.noise),
        latents=fingerprint(output.latents),
        video=None if output.video is None else fingerprint(output.video),
        events=tuple(replace(e, request=0) if isinstance(e, TensorKey) else _portable(e) for e in recorder.events),
        tensors={replace(key, request=0): value for key, value in recorder.tensors.items()},
        log=tuple(engine.exchange.log),
    )


def run_requests(
    folder: Path, topology: str, dtype: str, requests: Sequence[Request], options: dict[str, Any] | None = None
) -> list[Run]:
    """For ranks: one engine, these requests in turn."""
    engine = load_engine(folder, topology, dtype, **(options or {}))
    return [observed(engine, request) for request in requests]


def _portable(event: Event) -> Event | str:
    return event if isinstance(event, ExchangeEvent | StepEvent) else type(event).__name__


def run_on(
    ranks: RankPool, folder: Path, topology: str, requests: Sequence[Request], dtype: str = "float32"
) -> list[list[Run]]:
    """One engine of `topology`: for each request, the runs of all ranks."""
    by_rank = ranks.run(parse_topology(topology).world_size, run_requests, folder, topology, dtype, requests)
    return [list(of_request) for of_request in zip(*by_rank, strict=True)]


@cache
def serial(ranks: RankPool, folder: Path, requests: tuple[Request, ...], dtype: str = "float32") -> list[Run]:
    """The same requests on pp1cfg1."""
    return [only for (only,) in run_on(ranks, folder, "pp1cfg1", requests, dtype)]


def union(runs: Sequence[Run]) -> dict[TensorKey, Fingerprint]:
    """The tensors of all ranks of one request. What several ranks recorded must agree."""
    merged: dict[TensorKey, Fingerprint] = {}
    for run in runs:
        for key, value in run.tensors.items():
            assert merged.setdefault(key, value) == value, f"ranks disagree at {key}"
    return merged


def first_difference(one: dict[TensorKey, Fingerprint], other: dict[TensorKey, Fingerprint]) -> str | None:
    """The first key, in the order in which `one` was computed, where the two differ; None if they are the same."""
    for key, value in one.items():
        if other.get(key) != value:
            return f"{key}: {value} against {other.get(key, 'nothing')}"
    return next((f"{key}: only on one side" for key in other if key not in one), None)


# Memory and noise of libraries.


@contextmanager
def births() -> Iterator[Callable[[], list[tuple[int, ...]]]]:
    """Gives a function that tells the shapes of the tensors that were born in here and are alive.

    What was there before is frozen: to go through all that the libraries have made would take most of a test's time.
    """

    def alive() -> list[tuple[int, ...]]:
        gc.collect()
        return [tuple(each.shape) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]

    gc.collect()
    gc.freeze()
    try:
        yield alive
    finally:
        gc.unfreeze()


def settled(born: Callable[[], list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """What `born` tells on a rank once gloo's threads have let go of the last exchange: a moment after its call."""
    deadline = time.monotonic() + 5
    while (alive := born()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def defaults(**values: Any) -> EngineDefaults:
    return EngineDefaults(**{"height": 32, "width": 32, "frames": 5, "steps": 4, **values})


def silence() -> None:
    """No progress bars and notices of the libraries below; their errors still come through."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
