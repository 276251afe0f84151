"""The triplet in every topology, against the declared contracts: what is run, and what is claimed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.trace import Level, TraceError
from oracle.verdict.compare import compare
from oracle.verdict.finding import Finding, Spot, Verdict
from oracle.verdict.localise import locate
from oracle.verdict.twin import AGAIN, NATIVE, cached_folder, forced_folder, judge_triplet, record_triplets
from wanref.topology import parse_topology

if TYPE_CHECKING:
    from oracle.evidence.ranks import Outcome, RankPool
    from wanref.caching.spec import CacheSpec
    from wanref.request import EngineDefaults, Request

SERIAL = "pp1cfg1"


@dataclass(frozen=True, slots=True)
class Matrix:
    """One checkpoint and request in several topologies under several caches, by name."""

    checkpoint: str
    request: Request
    topologies: tuple[str, ...]
    caches: Mapping[str, CacheSpec]
    defaults: EngineDefaults
    dtype: str = "float32"
    level: Level = "stats"

    @property
    def run(self) -> tuple[str, ...]:
        """The topologies to run: those asked for, and the serial one that they are held against."""
        return (SERIAL, *(each for each in self.topologies if each != SERIAL))


@dataclass(frozen=True, slots=True)
class Row:
    """One claim and what came of it."""

    topology: str
    cache: str
    verdict: Verdict
    sentence: str = field(repr=False)


def record_matrix(matrix: Matrix, folder: Path, pool: RankPool, done: Callable[[str], object]) -> dict[str, str]:
    """Record every topology into a folder of its name; `done` is told each. Returns what became of failed ones."""
    failed: dict[str, str] = {}
    for topology in matrix.run:
        world = parse_topology(topology).world_size
        outcomes = pool.outcomes(world, record_on_rank, matrix, topology, str(folder / topology), timeout=600)
        broken = {rank: each for rank, each in enumerate(outcomes) if each.kind != "value"}
        if broken:
            failed[topology] = _what_happened(broken)
        done(topology)
    return failed


def record_on_rank(matrix: Matrix, topology: str, folder: str) -> None:
    """For ranks: this one's part of one topology."""
    from wanref import WanReference

    engine = WanReference.from_pretrained(
        matrix.checkpoint, topology=topology, dtype=matrix.dtype, defaults=matrix.defaults
    )
    record_triplets(engine, matrix.request, matrix.caches, Path(folder), matrix.level)


def judge_matrix(matrix: Matrix, folder: Path, failed: Mapping[str, str]) -> Iterator[Row]:
    """Every claim, topology by topology. What was not recorded is a claim that does not hold."""
    for topology in matrix.run:
        here = folder / topology
        if topology in failed:
            finding = Finding("coverage", "missing evidence", Spot(), failed[topology])
            yield Row(topology, "", Verdict("run", (finding,), 0), finding.says)
            continue
        if topology != SERIAL:
            yield _row(topology, "", folder / SERIAL / NATIVE, here / NATIVE, "topology")
        yield _row(topology, "", here / NATIVE, here / AGAIN, "used engine")
        for cache in matrix.caches:
            verdicts, loops = judge_triplet(here, cache)
            parts = {"forced": (NATIVE, forced_folder(cache)), "cached": (forced_folder(cache), cached_folder(cache))}
            for contract, verdict in verdicts.items():
                reference, candidate = (open_trace(here / part) for part in parts[contract])
                sentence = _sentence(reference, candidate, verdict)
                if contract == "cached" and verdict.holds:
                    sentence += f"; {len(loops.differing)} of {loops.calls} decisions differ from the open loop's"
                yield Row(topology, cache, verdict, sentence)
            grid = parse_topology(topology)
            beside = f"pp{grid.pp}cfg1"
            if grid.cfg == 2 and beside in matrix.run and beside not in failed:
                part = cached_folder(cache)
                yield _row(topology, cache, folder / beside / part, here / part, "cfg")


def _row(topology: str, cache: str, reference: Path, candidate: Path, contract: str) -> Row:
    try:
        one, other = open_trace(reference), open_trace(candidate)
    except TraceError as error:
        finding = Finding("coverage", "missing evidence", Spot(), str(error))
        return Row(topology, cache, Verdict(contract, (finding,), 0), str(error))
    verdict = compare(one, other, contract)
    return Row(topology, cache, verdict, _sentence(one, other, verdict))


def _sentence(reference: Trace, candidate: Trace, verdict: Verdict) -> str:
    location = locate(reference, candidate, verdict)
    return verdict.sentence if location is None else location.sentence


def _what_happened(broken: Mapping[int, Outcome]) -> str:
    """A rank that hung or died explains what the others raised, so it is named first."""
    order: Sequence[str] = ("hung", "died", "raised")
    rank, worst = min(broken.items(), key=lambda item: (order.index(item[1].kind), item[0]))
    text: Any = worst.value or worst.text
    return f"rank {rank} {worst.kind}: {text}"
