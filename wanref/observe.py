"""What a running engine lets an observer see. Without one, nothing is built and nothing is paid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from wanref.caching.base import Decision
    from wanref.checkpoint import Expert
    from wanref.request import ResolvedRequest
    from wanref.schedule import Schedule, Step
    from wanref.topology import Branch


@dataclass(frozen=True, slots=True)
class TensorKey:
    """What a tensor is, in every topology alike.

    request: ordinal on the engine. block: global block index, or `embed`, `project`, `combine`, `scheduler`.
    branch: None for `combine` and `scheduler`, which both branches share. occurrence: counts repeats of a key.
    """

    request: int
    step: int
    expert: Expert
    branch: Branch | None
    block: int | str
    port: str = "output"
    occurrence: int = 0


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A request begins on this rank (`outcome` None), or ends (`done`, `aborted` or `failed`)."""

    request: int
    resolved: ResolvedRequest
    schedule: Schedule
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class StateEvent:
    """What the mounted cache remembers, as a digest for each `EXPERT.BRANCH`: once a request has begun or ended.

    One request begins with the same digests on a fresh engine and on a used one, and ends with none.
    """

    request: int
    moment: Literal["begin", "end"]
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step begins on this rank."""

    request: int
    step: Step


TensorSource = Literal["computed", "received", "reused"]


@dataclass(frozen=True, slots=True)
class TensorEvent:
    """A tensor at a logical key. It is the engine's own, not a copy: read it now. What is written to it, the engine
    goes on with: that is how a lock works, and nothing else should.

    source: `computed` here; `received` from the rank that did; `reused`, the stage's output that a cache made up.
    """

    key: TensorKey
    tensor: torch.Tensor
    source: TensorSource = "computed"


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """One communication of this rank: seen before the call (`completed` False) and after it.

    sequence: number of the exchange on this rank. peers: the other ranks in it.
    """

    sequence: int
    kind: str
    peers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    completed: bool


Event: TypeAlias = "RequestEvent | StateEvent | StepEvent | TensorEvent | ExchangeEvent | Decision"


class Observer(Protocol):
    """Anything that can be called with an event. What it raises ends the request, like any other exception."""

    def __call__(self, event: Event, /) -> None: ...
