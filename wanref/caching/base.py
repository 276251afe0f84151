"""The one door through which a cache meets the pipeline.

A cache is told when a request begins and ends, and runs a stage's `BlockStack` for it. Native, forced and cached runs
share `embed`, `BlockStack` and `project`; no cache sees another rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from wanref.block import TextKV
from wanref.caching.error import CacheError
from wanref.caching.profile import ProfileIdentity
from wanref.checkpoint import Expert
from wanref.schedule import Schedule, Step
from wanref.stage import BlockStack, Stage, StepInputs, Tap
from wanref.topology import Branch, Place

Verdict = Literal["compute", "reuse"]
Reason = Literal["first", "warmup", "last", "threshold", "range_guard", "no_residual", "cap", "schedule", "mask"]
"""Why: `first` and `last` are forced positions, `threshold` an accumulator or difference held against its limit."""


@dataclass(frozen=True, slots=True)
class Where:
    """One call of a stage's blocks. `place.stage` is where the residual lives, `branch` whose it is."""

    request: int
    step: Step
    branch: Branch
    place: Place

    def __str__(self) -> str:
        return f"step {self.step.index}, {self.branch}, stage {self.place.stage}, {self.step.expert}-noise expert"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a residual was computed: the provenance of a reuse."""

    request: int
    step: int
    expert: Expert
    branch: Branch
    stage: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a rule says of one call, and the numbers by which it came to it. None where the rule has no such number."""

    verdict: Verdict
    reason: Reason
    signal: float | None = None
    rescaled: float | None = None
    accumulated_before: float | None = None
    accumulated_after: float | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one call. `verdict` is what was done; under `forced` the judgement's is only a shadow.

    computed_blocks counts the blocks that ran. seconds, block_seconds: host time of the whole call, and of its blocks;
    they are no part of what two decisions are compared by.
    """

    where: Where
    judgement: Judgement
    verdict: Verdict
    forced: bool
    origins: tuple[Origin, ...]
    computed_blocks: int
    seconds: float = field(compare=False)
    block_seconds: float = field(compare=False)


class StackCall:
    """One call of a stage's blocks, from which a cache computes as many of them as it likes, counted.

    hidden: [batch, tokens, dim]; only read. text, step: what the blocks read beside it.
    """

    def __init__(
        self,
        where: Where,
        stack: BlockStack,
        hidden: torch.Tensor,
        text: Sequence[TextKV],
        step: StepInputs,
        tap: Tap | None,
    ) -> None:
        self.where = where
        self.stack = stack
        self.hidden = hidden
        self.text = text
        self.step = step
        self.tap = tap
        self._calls = 0
        self._seconds = 0.0
        self._started = time.perf_counter()

    def compute(self) -> torch.Tensor:
        """All blocks, natively."""
        hidden = self.hidden
        for index in range(len(self.stack)):
            hidden = self.run(index, hidden)
        return hidden

    def run(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """One block, by its index in the stack."""
        started = time.perf_counter()
        hidden = self.stack.run(index, hidden, self.text, self.step, self.tap)
        self._seconds += time.perf_counter() - started
        self._calls += 1
        return hidden

    def decided(self, judgement: Judgement, forced: bool, origins: tuple[Origin, ...] = ()) -> Decision:
        """The record of this call, once its output is there: it reused exactly if it names origins."""
        return Decision(
            where=self.where,
            judgement=judgement,
            verdict="reuse" if origins else "compute",
            forced=forced,
            origins=origins,
            computed_blocks=self._calls,
            seconds=time.perf_counter() - self._started,
            block_seconds=self._seconds,
        )


@dataclass(frozen=True, slots=True)
class Begin:
    """What a cache may know of a request before its first step. latents_shape: [batch, channels, frames, h, w]."""

    schedule: Schedule
    place: Place
    stages: Mapping[Expert, Stage]
    latents_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def batch(self) -> int:
        return self.latents_shape[0]


def check_provenance(origin: Origin, shape: torch.Size, dtype: torch.dtype, where: Where, hidden: torch.Tensor) -> None:
    """Raise CacheError unless a residual of this origin, shape and dtype may be reused at `where` for `hidden`."""
    found = (origin.request, origin.expert, origin.branch, origin.stage, shape, dtype)
    wanted = (where.request, where.step.expert, where.branch, where.place.stage, hidden.shape, hidden.dtype)
    if found != wanted:
        raise CacheError(f"{where}: a residual of {found} must not be reused for {wanted}.")


class BlockCache(Protocol):
    """A cache, mounted on one rank of one engine."""

    def begin(self, begin: Begin) -> None:
        """A request starts. All state is made here. Raises CacheError for a request that cannot be honoured."""
        ...

    def order(self, step: int, branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
        """The order in which this chain runs its branches at a step; the same on all its stages."""
        ...

    def run(self, call: StackCall) -> tuple[torch.Tensor, Decision]:
        """The blocks' output, computed or reused, and what was decided."""
        ...

    def state(self) -> Mapping[str, str]:
        """A digest of all that is remembered, by `EXPERT.BRANCH`. Empty outside a request."""
        ...

    def end(self) -> None:
        """The request is over, however it ended. Nothing of it stays."""
        ...


def identity_of(begin: Begin, checkpoint: str) -> ProfileIdentity:
    """The identity of a run: `checkpoint` is the digest of its configs and weights."""
    return ProfileIdentity(
        checkpoint=checkpoint,
        device=begin.device.type,
        dtype=str(begin.dtype).removeprefix("torch."),
        topology=str(begin.place.topology),
        latent_shape=begin.latents_shape,
        schedule=begin.schedule.digest(),
    )
