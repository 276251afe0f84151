"""The triplet in every topology, against the declared contracts: what is run, and what is claimed of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.trace import Level, TraceError
from oracle.evidence.writer import write_whole
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
FAILURE = "failure.txt"
MATRIX = "matrix.json"
MATRIX_SCHEMA = 1
HANG_SECONDS = 600.0
"""One topology's recordings that take longer are taken for a hang: with micro checkpoints they take some seconds."""


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
class Recorded:
    """What MATRIX says of a folder: what was asked, and what became of the topologies that failed.

    request: the options that were given. run: the topologies in order. caches: method and options, by name.
    """

    checkpoint: str
    request: Mapping[str, Any]
    run: tuple[str, ...]
    caches: Mapping[str, Mapping[str, Any]]
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One claim and what came of it."""

    topology: str
    cache: str
    verdict: Verdict
    sentence: str = field(repr=False)


def record_matrix(matrix: Matrix, folder: Path, pool: RankPool, done: Callable[[str], object]) -> dict[str, str]:
    """Record every topology into a folder of its name; `done` is told each. Returns what became of failed ones.

    A failed one's folder has a file FAILURE: what became of each rank, with its stack. MATRIX is there from the start,
    so that a verification that was cut short shows what it lacks.
    """
    failed: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    _write_matrix(matrix, folder, failed)
    for topology in matrix.run:
        world = parse_topology(topology).world_size
        outcomes = pool.outcomes(world, record_on_rank, matrix, topology, str(folder / topology), timeout=HANG_SECONDS)
        broken = {rank: each for rank, each in enumerate(outcomes) if each.kind != "value"}
        if broken:
            failed[topology] = _what_happened(broken)
            (folder / topology).mkdir(parents=True, exist_ok=True)
            told = "\n".join(f"rank {rank} {each.kind}: {each.text}" for rank, each in broken.items())
            (folder / topology / FAILURE).write_text(told)
            _write_matrix(matrix, folder, failed)
        done(topology)
    return failed


def record_on_rank(matrix: Matrix, topology: str, folder: str) -> None:
    """For ranks: this one's part of one topology."""
    from wanref import WanReference

    engine = WanReference.from_pretrained(
        matrix.checkpoint, topology=topology, dtype=matrix.dtype, defaults=matrix.defaults
    )
    record_triplets(engine, matrix.request, matrix.caches, Path(folder), matrix.level)


def read_matrix(folder: Path) -> Recorded:
    """Raises TraceError for a folder that no verification has left, or one of another version."""
    try:
        plain = json.loads((folder / MATRIX).read_text("utf-8"))
        found = plain.pop("schema")
        if found != MATRIX_SCHEMA:
            raise ValueError(f"schema {found!r}; this reader knows {MATRIX_SCHEMA}")
        return Recorded(**{**plain, "run": tuple(plain["run"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"folder={str(folder)!r} is not accepted: {MATRIX}: {error}. Give the folder of `wanref verify --traces`."
        ) from error


def _write_matrix(matrix: Matrix, folder: Path, failed: Mapping[str, str]) -> None:
    asked = {f.name: getattr(matrix.request, f.name) for f in fields(matrix.request)}
    plain = {
        "schema": MATRIX_SCHEMA,
        "checkpoint": matrix.checkpoint,
        "request": {name: value for name, value in asked.items() if value is not None},
        "run": matrix.run,
        "caches": {name: {"method": spec.method, "options": spec.options} for name, spec in matrix.caches.items()},
        "failed": failed,
    }
    write_whole(folder / MATRIX, lambda draft: draft.write_text(json.dumps(plain, indent=2) + "\n", "utf-8"))


def judge_matrix(matrix: Matrix | Recorded, folder: Path, failed: Mapping[str, str]) -> Iterator[Row]:
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
            yield from _triplet(topology, cache, here)
            grid = parse_topology(topology)
            beside = f"pp{grid.pp}cfg1"
            if grid.cfg == 2 and beside in matrix.run and beside not in failed:
                part = cached_folder(cache)
                yield _row(topology, cache, folder / beside / part, here / part, "cfg")


def _triplet(topology: str, cache: str, here: Path) -> Iterator[Row]:
    parts = {"forced": (NATIVE, forced_folder(cache)), "cached": (forced_folder(cache), cached_folder(cache))}
    try:
        verdicts, loops = judge_triplet(here, cache)
    except TraceError as error:
        yield from (_unshown(topology, cache, contract, error) for contract in parts)
        return
    for contract, verdict in verdicts.items():
        reference, candidate = (open_trace(here / part) for part in parts[contract])
        sentence = _sentence(reference, candidate, verdict)
        if contract == "cached" and verdict.holds:
            sentence += f"; {len(loops.differing)} of {loops.calls} decisions differ from the open loop's"
        yield Row(topology, cache, verdict, sentence)


def _row(topology: str, cache: str, reference: Path, candidate: Path, contract: str) -> Row:
    try:
        one, other = open_trace(reference), open_trace(candidate)
    except TraceError as error:
        return _unshown(topology, cache, contract, error)
    verdict = compare(one, other, contract)
    return Row(topology, cache, verdict, _sentence(one, other, verdict))


def _unshown(topology: str, cache: str, contract: str, error: TraceError) -> Row:
    finding = Finding("coverage", "missing evidence", Spot(), str(error))
    return Row(topology, cache, Verdict(contract, (finding,), 0), str(error))


def _sentence(reference: Trace, candidate: Trace, verdict: Verdict) -> str:
    location = locate(reference, candidate, verdict)
    return verdict.sentence if location is None else location.sentence


def _what_happened(broken: Mapping[int, Outcome]) -> str:
    """The rank that explains what became of the others is named: the first that died, or else one that hung."""
    order: Sequence[str] = ("died", "hung", "raised")
    rank, worst = min(broken.items(), key=lambda item: (order.index(item[1].kind), item[1].after, item[0]))
    return f"rank {rank} {worst.sentence}"
