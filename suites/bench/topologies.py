"""Every topology over one rank: real ranks over gloo, one thread each.

Beside them stands what two processes reach that never meet, each with one branch of the same request: cores share
memory and heat, and no topology of two ranks can be faster than that.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
import transformers

from oracle.evidence.ranks import RankPool
from suites.bench.figure import Figure, interleave, ratios, require_same
from suites.bench.subject import digest, request
from wanref import Request, WanReference, parse_topology

REPETITIONS = 5
IDEALS = {"pp2cfg1": 4 / 3, "pp1cfg2": 2.0, "pp2cfg2": 2.0}
"""With two branches and even stages, at any number of cores. pp2cfg1: three half-passes stand in the way of a step's
end instead of four. pp2cfg2: each chain has one branch, so that its two stages take turns."""

TARGETS = {"pp2cfg1": 1.25, "pp1cfg2": 1.85}


def measure(checkpoint: Path) -> list[Figure]:
    """Seconds of a request, on the rank that takes longest, without loading."""
    with RankPool() as pool, RankPool() as second:
        _seconds(pool, "pp2cfg2", checkpoint, {}, steps=1)  # what a process does once is not measured
        digests: dict[str, str] = {}
        runs = {name: partial(_seconds, pool, name, checkpoint, digests) for name in ("pp1cfg1", *IDEALS)}
        runs["apart"] = partial(_seconds_apart, (pool, second), checkpoint)
        times = interleave(REPETITIONS, runs)
    apart = Figure(
        name="two_processes_speedup",
        values=ratios(times["pp1cfg1"], times["apart"]),
        note="a branch each, unconnected: what this machine gives to two ranks",
    )
    return [
        Figure(
            name=f"{name}_speedup",
            values=ratios(times["pp1cfg1"], times[name]),
            at_least=TARGETS.get(name),
            note=_limits(name),
        )
        for name in IDEALS
    ] + [apart]


def _limits(name: str) -> str:
    ranks, cores = parse_topology(name).world_size, len(os.sched_getaffinity(0))
    note = f"ideal {IDEALS[name]:.2f}"
    if ranks > cores:
        note += f"; {ranks} ranks on {cores} cores: at most {min(cores, IDEALS[name]):.2f} here"
    return note


def _seconds(pool: RankPool, name: str, checkpoint: Path, digests: dict[str, str], steps: int | None = None) -> float:
    asked = request() if steps is None else request(steps)
    ranks = pool.run(parse_topology(name).world_size, _run_on_rank, name, checkpoint, asked)
    if steps is None:
        digests.update({f"{name} rank {rank}": latents for rank, (_, latents) in enumerate(ranks)})
        require_same(digests)
    return max(seconds for seconds, _ in ranks)


def _seconds_apart(pools: tuple[RankPool, RankPool], checkpoint: Path) -> float:
    half = replace(request(), guidance_scale=1.0)  # the cond branch alone
    with ThreadPoolExecutor(len(pools)) as threads:
        both = threads.map(lambda pool: pool.run(1, _run_on_rank, "pp1cfg1", checkpoint, half), pools)
        return max(seconds for ranks in both for seconds, _ in ranks)


def _run_on_rank(name: str, checkpoint: Path, asked: Request) -> tuple[float, str]:
    transformers.utils.logging.disable_progress_bar()
    engine = WanReference.from_pretrained(checkpoint, topology=name)
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    output = engine(asked)
    return time.perf_counter() - started, digest(output.latents)
