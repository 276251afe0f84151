"""What a native run shows about reuse: how far each TeaCache signal and the stage's residual move between steps.

An observer of a run on one rank, which sees the stages of every topology: a native run is the same in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt
import torch

from oracle.campaign.observing import observing
from oracle.campaign.refusal import CampaignError
from wanref import block
from wanref.caching.teacache import Signal
from wanref.observe import Event, RequestEvent, StepEvent, TensorEvent, TensorKey
from wanref.topology import Branch, Topology

if TYPE_CHECKING:
    from wanref.pipeline import WanReference
    from wanref.request import Request
    from wanref.schedule import Schedule, Step

SIGNALS: tuple[Signal, ...] = get_args(Signal)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a stage's blocks. previous: position of the same expert's and branch's call before it, or None."""

    step: int
    branch: Branch
    previous: int | None


@dataclass(frozen=True, slots=True)
class Track:
    """All calls of one stage in one native request, in the order in which they ran; n of them.

    distances: for each signal, [n]: mean|x - x'| / mean|x'|, x' the signal at the call before; 0 at a first call.
    changes: the same of the residual, output minus input of the stage's blocks.
    products: [n, n], mean over elements of the product of two residuals: the error of reusing any combination of them
    follows from it. outputs: [n], mean square of the stage's output.
    """

    stage: int
    calls: tuple[Call, ...]
    distances: Mapping[Signal, Array]
    changes: Array
    products: Array
    outputs: Array


@dataclass(frozen=True, slots=True)
class Collected:
    """One native request. tracks: one for each stage, in order."""

    schedule: Schedule
    tracks: tuple[Track, ...]


def collect(engine: WanReference, request: Request, pp: int) -> Collected:
    """Run one request natively and collect, for `pp` stages.

    Raises CampaignError for a number that is not finite, for a cache that is mounted, for an engine of several ranks,
    of which each sees a part, and for a batch, whose videos would be mixed.
    """
    if engine.topology.world_size != 1:
        raise CampaignError(
            f"collect: topology={engine.topology} is not accepted: give pp1cfg1, which sees all stages."
        )
    if engine.cache is not None:
        raise CampaignError(
            f"collect: cache={engine.cache.method!r} is mounted: residuals are collected from native runs."
        )
    collector = _Collector(engine, pp)
    with observing(engine, collector):
        engine(request)
    return collector.finish()


class _Collector:
    """Keeps every residual of a request: steps x branches x stages x [tokens, dim] in the working dtype."""

    def __init__(self, engine: WanReference, pp: int) -> None:
        self._engine = engine
        layers = int(engine.checkpoint.transformer["num_layers"])
        grid = Topology(pp)
        blocks = [grid.blocks(stage, layers) for stage in range(pp)]
        self._stage_of_first = {span.start: stage for stage, span in enumerate(blocks)}
        self._stage_of_last = {span.stop - 1: stage for stage, span in enumerate(blocks)}
        self._recorders = [_Recorder(stage) for stage in range(pp)]
        self._schedule: Schedule | None = None
        self._projection = torch.empty(0)
        self._timestep_signals: dict[Signal, torch.Tensor] = {}

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, RequestEvent) and event.outcome is None:
            if event.resolved.videos != 1:
                raise CampaignError(f"collect: {event.resolved.videos} videos in one request are not accepted: give 1.")
            self._schedule = event.schedule
        elif isinstance(event, StepEvent):
            self._begin_step(event.step)
        elif isinstance(event, TensorEvent) and event.key.branch is not None and event.key.block != "project":
            self._see(event.key, event.key.branch, event.tensor)

    def finish(self) -> Collected:
        assert self._schedule is not None, "a request has ended well"
        return Collected(self._schedule, tuple(recorder.finish() for recorder in self._recorders))

    def _begin_step(self, step: Step) -> None:
        engine = self._engine
        # As in the loop: at its own shape, since a batch of timesteps rounds otherwise.
        timesteps = torch.tensor(step.timestep, device=engine.device).expand(1)
        embedding, self._projection = engine.stages[step.expert].time_embedding(timesteps, engine.dtype)
        self._timestep_signals = {"timestep_embedding": embedding, "timestep_projection": self._projection}

    def _see(self, key: TensorKey, branch: Branch, hidden: torch.Tensor) -> None:
        index = -1 if key.block == "embed" else int(key.block)
        if index in self._stage_of_last:
            self._recorders[self._stage_of_last[index]].end(hidden)
        if index + 1 in self._stage_of_first:
            first = self._engine.stages[key.expert].stack.blocks[index + 1]
            modulation = block.modulate(first, self._projection)
            signals = {
                **self._timestep_signals,
                "modulated_input": block.modulated_input(first, hidden, modulation),
            }
            self._recorders[self._stage_of_first[index + 1]].begin(key, branch, hidden, signals)


class _Recorder:
    """The calls of one stage."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self._calls: list[Call] = []
        self._residuals: list[torch.Tensor] = []
        self._outputs: list[float] = []
        self._changes: list[float] = []
        self._distances: dict[Signal, list[float]] = {signal: [] for signal in SIGNALS}
        self._signals: dict[tuple[str, str], dict[Signal, torch.Tensor]] = {}
        self._last: dict[tuple[str, str], int] = {}
        self._hidden = torch.empty(0)

    def begin(self, key: TensorKey, branch: Branch, hidden: torch.Tensor, signals: dict[Signal, torch.Tensor]) -> None:
        place = (key.expert, branch)
        before = self._signals.get(place)
        for signal, value in signals.items():
            self._distances[signal].append(0.0 if before is None else relative_change(value, before[signal]))
        self._signals[place] = signals
        self._calls.append(Call(key.step, branch, self._last.get(place)))
        self._last[place] = len(self._calls) - 1
        self._hidden = hidden

    def end(self, output: torch.Tensor) -> None:
        residual = output - self._hidden
        previous = self._calls[-1].previous
        self._changes.append(0.0 if previous is None else relative_change(residual, self._residuals[previous]))
        self._residuals.append(residual)
        self._outputs.append(float(output.double().square().mean()))

    def finish(self) -> Track:
        flat = torch.stack([residual.flatten() for residual in self._residuals])
        products = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat.device)
        for part in flat.split(2**20, dim=1):  # in double precision, and never all of it at once
            exact = part.double()
            products += exact @ exact.T
        track = Track(
            stage=self.stage,
            calls=tuple(self._calls),
            distances={signal: np.array(values) for signal, values in self._distances.items()},
            changes=np.array(self._changes),
            products=(products / flat.shape[1]).cpu().numpy(),
            outputs=np.array(self._outputs),
        )
        check_track(track)
        return track


def check_track(track: Track) -> None:
    """Raise CampaignError, with the first place, for a number that is not finite: it is refused, never dropped."""
    # Of the products those with earlier calls, so that one that is not finite shows at its own call.
    totals = [("residual", track.changes), ("output", track.outputs), ("products", np.tril(track.products))]
    wrong = []
    for name, values in [*track.distances.items(), *totals]:
        finite = np.isfinite(values).reshape(len(track.calls), -1).all(axis=1)
        wrong += [(int(position), name) for position in np.flatnonzero(~finite)[:1]]
    if wrong:
        position, name = min(wrong)
        call = track.calls[position]
        raise CampaignError(f"collect: {name} is not finite at step {call.step}, {call.branch}, stage {track.stage}.")


def relative_change(current: torch.Tensor, previous: torch.Tensor) -> float:
    """mean|x - x'| / mean|x'| in float32, as TeaCache takes it with eps=0."""
    current, previous = current.float(), previous.float()
    return float((current - previous).abs().mean() / previous.abs().mean())
