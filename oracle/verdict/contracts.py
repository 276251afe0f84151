"""The declared table: which configurations must agree, and how closely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oracle.verdict.finding import Cause

Tensors = Literal["bitwise", "bounded", "intended"]
"""bitwise: T0, the same bytes at every key. bounded: T1 under the module lock, see `oracle.verdict.bounded`; T2's drift
stands beside it. intended: T3, an error by design, which no comparison calls equivalent; the gates of a campaign judge
it."""

Decisions = Literal["same", "verdicts", "none"]
"""same: equal verdicts for equal reasons by equal numbers. verdicts: equal verdicts, whatever the reasons. none: they
are not compared; a cached run's are held against its forced twin's by `oracle.verdict.twin`."""


@dataclass(frozen=True, slots=True)
class Contract:
    """A claim about a candidate, held against a reference.

    may_differ: names of the manifest in which the two may differ. history: the two differ in what their engines ran
    before, and in nothing else, so that a difference is state left over. cached: the candidate claims a cache, so that
    a run without a hit or without a miss shows nothing.
    """

    name: str
    claim: str
    tensors: Tensors
    decisions: Decisions
    may_differ: tuple[str, ...] = ()
    history: bool = False
    cached: bool = False

    @property
    def cause(self) -> Cause | None:
        """What a difference comes down to, where the contract leaves one cause."""
        return "state left over" if self.history else None


CONTRACTS = {
    contract.name: contract
    for contract in (
        Contract("rerun", "the same configuration, run again", "bitwise", "same"),
        Contract(
            "topology", "any topology and pp1cfg1, without a cache", "bitwise", "none", ("topology", "world_size")
        ),
        Contract("forced", "a cache mounted and forced to compute, and none", "bitwise", "none", ("cache",)),
        Contract("used engine", "a request on a used engine and on a fresh one", "bitwise", "same", history=True),
        Contract(
            "cfg",
            "a cached run at equal PP, branches on one chain or on two",
            "bitwise",
            "same",
            ("topology", "world_size"),
            cached=True,
        ),
        Contract(
            "replay",
            "a cached run, and its recorded schedule replayed on any topology that can",
            "bitwise",
            "verdicts",
            ("cache", "topology", "world_size"),
            cached=True,
        ),
        Contract("cached", "a cached run and its forced twin", "intended", "none", ("cache",), cached=True),
        Contract(
            "kernels",
            "bf16 or fp16 by other kernels, threads, compilers or topologies",
            "bounded",
            "verdicts",
            ("threads", "device", "libraries", "python", "topology", "world_size"),
        ),
    )
}
"""By name. On the CPU with one thread count; elsewhere `bitwise` holds where a rerun repeats, and the noise band is
used where it does not."""


def markdown_table() -> str:
    """The table as the README shows it."""
    rows = ["| contract | claim | tensors | decisions | may differ in |", "| --- | --- | --- | --- | --- |"]
    for each in CONTRACTS.values():
        differ = ", ".join(each.may_differ) or ("what ran before" if each.history else "nothing")
        rows.append(f"| {each.name} | {each.claim} | {each.tensors} | {each.decisions} | {differ} |")
    return "\n".join(rows)
