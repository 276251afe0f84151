"""Brings the per-rank records of any topology onto the same logical keys, and finds what is missing.

Needs the reader alone: neither torch nor diffusers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy.typing as npt

from oracle.evidence.reader import Hole, Trace
from oracle.evidence.trace import (
    DecisionRecord,
    ErrorRecord,
    ExchangeRecord,
    Record,
    RequestRecord,
    StateRecord,
    TensorRecord,
)
from oracle.verdict.finding import Layer, Spot
from wanref.observe import TensorKey
from wanref.topology import Topology, idle_ranks, parse_topology

DecisionKey = tuple[int, int, str, int]
"""(request, step, branch, stage)."""

_PLACES = {"embed": -1, "project": 1 << 20, "combine": (1 << 20) + 1, "scheduler": (1 << 20) + 2}


@dataclass(frozen=True, slots=True)
class Replica:
    """The value that one rank recorded at a key."""

    rank: int
    record: TensorRecord


@dataclass(frozen=True)
class Aligned:
    """One trace on logical keys. `requests` are what each request resolved to.

    Requests are numbered as they come in the trace, so that one on a used engine meets itself on a fresh one;
    `ordinals` are their numbers on the engine.
    """

    trace: Trace
    ordinals: Mapping[int, int]
    requests: Mapping[int, RequestRecord]
    outcomes: Mapping[int, Mapping[int, str]]
    tensors: Mapping[TensorKey, tuple[Replica, ...]] = field(repr=False)
    decisions: Mapping[DecisionKey, DecisionRecord] = field(repr=False)
    exchanges: Mapping[int, tuple[ExchangeRecord, ...]] = field(repr=False)
    states: Mapping[tuple[int, int, str], StateRecord] = field(repr=False)
    errors: Mapping[int, ErrorRecord]
    holes: tuple[Hole, ...]

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.trace.manifest

    @cached_property
    def topology(self) -> Topology:
        return parse_topology(self.manifest["topology"])

    @cached_property
    def ordered(self) -> list[TensorKey]:
        """Its keys in the order of execution; at one place of a step, cond before uncond."""
        return sorted(self.tensors, key=position)

    @cached_property
    def last_step(self) -> int:
        """The last step after which latents were recorded."""
        return max((key.step for key in self.tensors if key.block == "scheduler"), default=0)

    def rank_of(self, stage: int, branch: str | None) -> int:
        """The rank that runs a branch on a stage; for what both share, the one of chain 0."""
        chain = 1 if branch == "uncond" and self.topology.cfg == 2 else 0
        return chain * self.topology.pp + stage

    def stage_of(self, block: int | str) -> int:
        """The stage whose work a block is. The last one also projects, combines and steps."""
        if block == "embed":
            return 0
        if isinstance(block, str):
            return self.topology.pp - 1
        stages = range(self.topology.pp)
        return next(s for s in stages if block in self.topology.blocks(s, self.manifest["layers"]))

    def array(self, key: TensorKey, rank: int) -> npt.NDArray[Any]:
        """The tensor that `rank` recorded at a key. Raises TraceError if it did not."""
        return self.trace.array(replace(key, request=self.ordinals[key.request]), rank)

    def owner(self, key: TensorKey) -> Replica | None:
        """The value as it was computed, on the rank whose work it is."""
        wanted = self.rank_of(self.stage_of(key.block), key.branch)
        return next((each for each in self.tensors.get(key, ()) if each.rank == wanted), None)


def place_of(block: int | str | None) -> int:
    """Sorts the blocks of a step; what is said of a whole stage comes before its blocks."""
    if block is None:
        return -2
    return block if isinstance(block, int) else _PLACES.get(block, 1 << 21)


def position(key: TensorKey) -> tuple[Any, ...]:
    """Sorts keys in the order of execution."""
    return (key.request, key.step, place_of(key.block), key.branch or "", key.port, key.occurrence)


def align(trace: Trace) -> Aligned:
    """All records of a trace by what they are about. Nothing is judged here; holes are only listed."""
    requests: dict[int, RequestRecord] = {}
    outcomes: dict[int, dict[int, str]] = {}
    tensors: dict[TensorKey, list[Replica]] = {}
    decisions: dict[DecisionKey, DecisionRecord] = {}
    exchanges: dict[int, list[ExchangeRecord]] = {}
    states: dict[tuple[int, int, str], StateRecord] = {}
    errors: dict[int, ErrorRecord] = {}
    holes: list[Hole] = []
    begun = sorted({r.request for records in trace.records.values() for r in records if isinstance(r, RequestRecord)})
    number = {ordinal: index for index, ordinal in enumerate(begun)}
    for rank, records in trace.records.items():
        for record in (_numbered(record, number) for record in records):
            if isinstance(record, TensorRecord):
                tensors.setdefault(record.key, []).append(Replica(rank, record))
            elif isinstance(record, DecisionRecord):
                key = (record.request, record.step, record.branch, record.stage)
                if key in decisions:
                    holes.append(Hole(rank, f"decided a second time at {key}"))
                decisions[key] = record
            elif isinstance(record, ExchangeRecord):
                exchanges.setdefault(rank, []).append(record)
            elif isinstance(record, StateRecord):
                states[rank, record.request, record.moment] = record
            elif isinstance(record, ErrorRecord):
                errors[rank] = record
            elif isinstance(record, RequestRecord):
                if record.moment == "begin":
                    requests.setdefault(record.request, record)
                else:
                    outcomes.setdefault(record.request, {})[rank] = record.moment
    aligned = Aligned(
        trace,
        dict(enumerate(begun)),
        requests,
        outcomes,
        {key: tuple(replicas) for key, replicas in tensors.items()},
        decisions,
        {rank: tuple(each) for rank, each in exchanges.items()},
        states,
        errors,
        (),
    )
    missing = (*trace.holes, *holes, *_unfinished(aligned), *_missing(aligned))
    return replace(aligned, holes=missing)


EARLIER = -1
"""The number of a request that ran before the recording began."""


def _numbered(record: Record, number: Mapping[int, int]) -> Record:
    """The record with its requests numbered as they come in the trace."""
    if isinstance(record, TensorRecord):
        return replace(record, key=replace(record.key, request=number.get(record.key.request, EARLIER)))
    if isinstance(record, ExchangeRecord | ErrorRecord):
        return record
    if isinstance(record, DecisionRecord):
        origins = tuple(replace(o, request=number.get(o.request, EARLIER)) for o in record.origins)
        record = replace(record, origins=origins)
    return replace(record, request=number.get(record.request, EARLIER))


def _unfinished(aligned: Aligned) -> Iterator[Hole]:
    ranks = range(aligned.trace.world_size)
    if not aligned.requests:
        yield Hole(0, "no request was recorded")
    for request in aligned.requests:
        for rank in ranks:
            outcome = aligned.outcomes.get(request, {}).get(rank)
            if outcome != "done":
                said = "does not end" if outcome is None else f"ended as {outcome}"
                yield Hole(rank, f"request {request} {said}{_waiting(aligned, rank)}", request)


def _waiting(aligned: Aligned, rank: int) -> str:
    exchanges = aligned.exchanges.get(rank, ())
    if exchanges and not exchanges[-1].completed:
        last = exchanges[-1]
        return f"; it waits in {last.operation} #{last.sequence} with rank {', '.join(map(str, last.peers))}"
    return ""


def _missing(aligned: Aligned) -> Iterator[Hole]:
    """Keys that the recorded schedule calls for and no owner has recorded."""
    if aligned.manifest["level"] == "decisions":
        return
    for request, begun in aligned.requests.items():
        idle = idle_ranks(aligned.topology, any(step["guidance_scale"] > 1 for step in begun.schedule or ()))
        for key, stage in expected_keys(aligned, request, begun):
            rank = aligned.rank_of(stage, key.branch)
            if rank not in idle and aligned.owner(key) is None:
                what = f"nothing is recorded at step {key.step}, {key.branch or 'both'}, {key.block}"
                yield Hole(rank, what, request, key)


def expected_keys(aligned: Aligned, request: int, begun: RequestRecord) -> Iterator[tuple[TensorKey, int]]:
    """Every key that a request of this schedule has, with its stage, less the blocks that a reuse skipped."""
    layers, stages = aligned.manifest["layers"], range(aligned.topology.pp)
    for step in begun.schedule or ():
        index, expert = step["index"], step["expert"]
        for branch in ("cond", "uncond") if step["guidance_scale"] > 1 else ("cond",):
            yield TensorKey(request, index, expert, branch, "embed"), 0
            for stage in stages:
                blocks = aligned.topology.blocks(stage, layers)
                decision = aligned.decisions.get((request, index, branch, stage))
                reused = decision is not None and decision.verdict == "reuse"
                for block in blocks[-1:] if reused else blocks:
                    yield TensorKey(request, index, expert, branch, block), stage
            yield TensorKey(request, index, expert, branch, "project"), stages[-1]
        for shared in ("combine", "scheduler"):
            yield TensorKey(request, index, expert, None, shared), stages[-1]


def same_value(a: Replica, b: Replica) -> bool:
    """T0: the same bytes in the same dtype and shape."""
    one, other = a.record, b.record
    return (one.dtype, one.shape, one.digest) == (other.dtype, other.shape, other.digest)


def layer_of(key: TensorKey, aligned: Aligned) -> Layer:
    """Whether a value is what the run gives out: its last latents, its video."""
    final = key.block == "decode" or (key.block == "scheduler" and key.step == aligned.last_step)
    return "output" if final else "tensors"


def spot_of(key: TensorKey, aligned: Aligned) -> Spot:
    """Where a key's value is computed."""
    stage = aligned.stage_of(key.block)
    return Spot(key.request, key.step, key.expert, key.branch, key.block, stage, aligned.rank_of(stage, key.branch))


def only(aligned: Aligned, request: int) -> Aligned:
    """One request of a trace, as if it had been the only one."""

    def mine(mapping: Mapping[int, Any]) -> dict[int, Any]:
        return {0: mapping[request]} if request in mapping else {}

    return replace(
        aligned,
        ordinals=mine(aligned.ordinals),
        requests=mine(aligned.requests),
        outcomes=mine(aligned.outcomes),
        tensors={replace(key, request=0): v for key, v in aligned.tensors.items() if key.request == request},
        decisions={(0, *key[1:]): v for key, v in aligned.decisions.items() if key[0] == request},
        states={(key[0], 0, key[2]): v for key, v in aligned.states.items() if key[1] == request},
        holes=tuple(
            replace(hole, request=None, key=hole.key and replace(hole.key, request=0))
            for hole in aligned.holes
            if hole.request in (None, request)
        ),
    )
