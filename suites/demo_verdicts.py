"""The demo's second half: every contract held against recorded runs of both checkpoints, then one planted fault.

What came of it is left as a page for people and a JUnit file for CI.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from oracle.evidence.ranks import RankPool
from oracle.evidence.reader import open_trace
from oracle.faults.catalogue import FAULTS
from oracle.faults.scenario import Checkpoints
from oracle.faults.trial import References, try_scenario
from oracle.report.junit import Case, Result, Suite
from oracle.report.tables import verdict_table
from oracle.report.verdicts import as_suite
from oracle.verdict.localise import locate
from oracle.verdict.matrix import Matrix, judge_matrix, record_matrix
from wanref.caching.spec import parse_cache
from wanref.request import EngineDefaults, Request

FAULT = "branch-one-slot-for-both"
STEPS = 8
TEACACHE = "teacache:signal=timestep_projection,coefficients=1/0,threshold=0.3,first=2"
LOW = ",coefficients_low=1/0"
DBCACHE = "cache-dit:threshold=0.4,max_warmup_steps=2,low_threshold=0.4,low_max_warmup_steps=1"


def matrix(name: str, checkpoint: Path, topologies: tuple[str, ...]) -> Matrix:
    """Eight steps of one request, under TeaCache and Cache-DiT."""
    teacache, dbcache = (TEACACHE + LOW, DBCACHE) if name == "dual" else (TEACACHE, DBCACHE.partition(",low_")[0])
    return Matrix(
        checkpoint=os.path.relpath(checkpoint),  # as it is shown on the page
        request=Request(prompt="a red circle moving left over stripes", steps=STEPS, guidance_scale=4.0, seed=7),
        topologies=topologies,
        caches={"teacache": parse_cache(teacache), "cache-dit": parse_cache(dbcache)},
        defaults=EngineDefaults(steps=STEPS),
    )


def show_verdicts(
    console: Console,
    pool: RankPool,
    checkpoints: Checkpoints,
    topologies: tuple[str, ...],
    folder: Path,
    done: Callable[[str], object],
) -> list[Suite]:
    """Record and judge; a suite of claims a checkpoint. Traces of an earlier demo make way."""
    shutil.rmtree(folder, ignore_errors=True)
    suites = []
    for name, checkpoint in checkpoints.items():
        asked = matrix(name, checkpoint, topologies)
        started = time.monotonic()
        failed = record_matrix(asked, folder / name, pool, lambda topology, of=name: done(f"oracle: {of} {topology}"))  # type: ignore[misc]
        rows = list(judge_matrix(asked, folder / name, failed))
        holding = sum(row.verdict.holds for row in rows)
        console.print(verdict_table(rows, f"{name}: {holding} of {len(rows)} claims hold"))
        suites.append(as_suite(name, rows, time.monotonic() - started))
    return suites


def show_planted_fault(console: Console, pool: RankPool, checkpoints: Checkpoints, folder: Path) -> Suite:
    """Plant one fault, and print where the oracle points; the case passes if that is where it was planted."""
    started = time.monotonic()
    (fault,) = (each for each in FAULTS if each.id == FAULT)
    references = References(checkpoints, folder)
    trial = try_scenario(fault.scenario, fault.plant, references, pool, folder / "planted")
    reference = references.get(fault.scenario.reference, pool)
    location = locate(reference, open_trace(folder / "planted"), trial.verdict)
    console.print(f"planted  {fault.id}: {fault.breaks} (as in {fault.source})", highlight=False)
    console.print(f"found    {'nothing' if location is None else location.sentence}", highlight=False)
    result = Result() if fault.pointed(trial.verdict) else Result("failure", f"{fault.id} was not pointed at")
    return Suite("planted", (Case("planted", fault.id, result),), time.monotonic() - started)
