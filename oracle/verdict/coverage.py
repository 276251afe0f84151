"""Whether the evidence is there: every key on both sides, replicas that agree, work that matches what was decided."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from oracle.evidence.trace import TensorRecord
from oracle.verdict.align import Aligned, Replica, position, same_value, spot_of
from oracle.verdict.contracts import Contract
from oracle.verdict.finding import Finding, Spot
from wanref.observe import TensorKey

_FAILED = re.compile(r"rank (\d+) failed")  # how wanref names the rank whose exception ended all of them


def check_coverage(one: Aligned, other: Aligned, contract: Contract) -> Iterator[Finding]:
    for name, aligned in (("", other), ("reference: ", one)):
        for hole in aligned.holes:
            spot = Spot(rank=hole.rank) if hole.key is None else spot_of(hole.key, aligned)
            yield Finding("coverage", "missing evidence", spot, f"{name}{hole.what}")
        yield from _errors(aligned, name)
        yield from _unsent(aligned, name)
        yield from _replicas(aligned, one if contract.tensors == "bitwise" else aligned, name)
        yield from _work(aligned, name)
    if contract.cached:
        verdicts = {decision.ruled for decision in other.decisions.values()}
        for verdict in sorted({"compute", "reuse"} - verdicts):
            says = f"a cache is claimed, but no call decided to {verdict}"
            yield Finding("coverage", "missing evidence", Spot(), says)
    if "cache" in contract.may_differ and not other.manifest.get("cache"):
        yield Finding("coverage", "missing evidence", Spot(), "a cache is claimed, and none is mounted")
    elif not contract.cached and other.manifest.get("cache") and not other.decisions:
        yield Finding("coverage", "missing evidence", Spot(), "a cache is mounted, but not one decision was recorded")
    if other.tensors and not any(_alive(replica) for replicas in other.tensors.values() for replica in replicas):
        yield Finding("coverage", "missing evidence", Spot(), "every recorded value is zero")
    for key in sorted(one.tensors.keys() ^ other.tensors.keys(), key=position):
        if contract.tensors == "bitwise" and not _skipped(key, one, other):
            side = "only in the reference" if key in one.tensors else "only here"
            yield Finding("coverage", "missing evidence", spot_of(key, other), f"a value is recorded {side}")


def _alive(replica: Replica) -> bool:
    absmax = replica.record.absmax
    return absmax != 0.0 if absmax is not None else set(replica.record.digest) != {"0"}


def _errors(aligned: Aligned, name: str) -> Iterator[Finding]:
    """Each exception, where the rank that it names was last seen at work."""
    for rank, error in aligned.errors.items():
        named = _FAILED.search(error.message)
        spot = _last_seen(aligned, int(named[1]) if named else rank)
        yield Finding("coverage", "missing evidence", spot, f"{name}{error.type}: {error.message}")


def _unsent(aligned: Aligned, name: str) -> Iterator[Finding]:
    """What a rank waits for and its peer has not sent: it is the peer that stopped, or went another way."""
    for rank, exchanges in aligned.exchanges.items():
        last = exchanges[-1]
        if last.completed or last.operation != "receive":
            continue
        (peer,) = last.peers
        wanted = sum(each.operation == "receive" and each.peers == (peer,) and not each.completed for each in exchanges)
        theirs = aligned.exchanges.get(peer, ())
        sent = sum(each.operation == "send" and each.peers == (rank,) and each.completed for each in theirs)
        if sent < wanted and peer not in aligned.errors:
            says = f"{name}did not send what rank {rank} waits for in receive #{last.sequence}"
            yield Finding("coverage", "exchange", _last_seen(aligned, peer), says)


def _last_seen(aligned: Aligned, rank: int) -> Spot:
    for record in reversed(aligned.trace.records.get(rank, ())):
        if isinstance(record, TensorRecord):
            key = record.key
            stage = rank % aligned.topology.pp
            return Spot(min(aligned.requests, default=0), key.step, key.expert, key.branch, key.block, stage, rank)
    return Spot(min(aligned.requests, default=0), rank=rank)


def _replicas(aligned: Aligned, one: Aligned, name: str) -> Iterator[Finding]:
    """A key that several ranks recorded has one value: its owner's, unless the reference says that the owner errs."""
    for key in aligned.ordered:
        owner = aligned.owner(key)
        wanted = one.owner(key)
        for replica in aligned.tensors[key]:
            if owner is None or replica is owner:
                continue
            spot = replace(spot_of(key, aligned), rank=replica.rank)
            computed = _computed(replica)
            if computed and key.branch is not None and replica.rank != owner.rank:
                says = f"{name}computed here, too, though it is the work of rank {owner.rank}: nothing is saved"
                yield Finding("coverage", "configuration", spot, says)
            elif same_value(owner, replica):
                continue
            elif not computed and any(_computed(each) and same_value(each, replica) for each in aligned.tensors[key]):
                continue  # it is what its sender had, and the finding is the sender's
            elif not computed:
                says = f"{name}is not what rank {owner.rank} computed: it was changed or mixed up on its way"
                yield Finding("coverage", "exchange", spot, says)
            elif wanted is not None and same_value(wanted, replica) and not same_value(wanted, owner):
                says = f"{name}is not what rank {replica.rank} computed, too, nor what the reference has"
                yield Finding("coverage", "arithmetic", replace(spot, rank=owner.rank), says)
            else:
                yield Finding("coverage", "arithmetic", spot, f"{name}is not what rank {owner.rank} computed, too")


def _computed(replica: Replica) -> bool:
    return replica.record.source == "computed"


def _work(aligned: Aligned, name: str) -> Iterator[Finding]:
    """What a decision says about the blocks that ran, against the blocks that were seen to run."""
    if aligned.manifest["level"] == "decisions":
        return
    for (request, step, branch, stage), decision in aligned.decisions.items():
        blocks = aligned.topology.blocks(stage, aligned.manifest["layers"])
        rank = aligned.rank_of(stage, branch)
        seen = 0
        for block in blocks:
            key = TensorKey(request, step, decision.expert, branch, block)  # type: ignore[arg-type]
            here = (each for each in aligned.tensors.get(key, ()) if each.rank == rank)
            seen += any(each.record.source == "computed" for each in here)
        says = ""
        if seen != decision.computed_blocks:
            says = f"{name}{decision.computed_blocks} blocks are said to have run, {seen} were seen"
        elif decision.verdict == "compute" and decision.computed_blocks != len(blocks):
            says = f"{name}said to compute, but {decision.computed_blocks} of {len(blocks)} blocks ran"
        elif decision.verdict == "reuse" and decision.computed_blocks >= len(blocks):
            says = f"{name}said to reuse, but all {len(blocks)} blocks ran: no work was saved"
        if says:
            spot = Spot(request, step, decision.expert, branch, stage=stage, rank=rank)
            yield Finding("coverage", "missing evidence", spot, says)


def _skipped(key: TensorKey, one: Aligned, other: Aligned) -> bool:
    """Whether a reuse on either side explains that a block's value is on one side only."""
    if not isinstance(key.block, int):
        return False
    for aligned in (one, other):
        stage = aligned.stage_of(key.block)
        decision = aligned.decisions.get((key.request, key.step, key.branch or "", stage))
        if decision is not None and decision.verdict == "reuse":
            return True
    return False
