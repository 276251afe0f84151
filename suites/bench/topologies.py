"""Every topology over one rank: real ranks over gloo, one thread each."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist
import transformers

from oracle.evidence.ranks import RankPool
from suites.bench.figure import Figure, interleave, ratios, require_same
from suites.bench.subject import digest, request
from wanref import WanReference, parse_topology

REPETITIONS = 3
IDEALS = {"pp2cfg1": 4 / 3, "pp1cfg2": 2.0, "pp2cfg2": 2.0}
"""With two branches and even stages, at any number of cores. pp2cfg1: three half-passes stand in the way of a step's
end instead of four. pp2cfg2: each chain has one branch, so that its two stages take turns."""

TARGETS = {"pp2cfg1": 1.25, "pp1cfg2": 1.85}


def measure(checkpoint: Path) -> list[Figure]:
    """Seconds of a request, on the rank that takes longest, without loading."""
    with RankPool() as pool:
        _seconds(pool, "pp2cfg2", checkpoint, {}, steps=1)  # what a process does once is not measured
        digests: dict[str, str] = {}
        runs = {name: partial(_seconds, pool, name, checkpoint, digests) for name in ("pp1cfg1", *IDEALS)}
        times = interleave(REPETITIONS, runs)
    return [
        Figure(
            name=f"{name}_speedup",
            values=ratios(times["pp1cfg1"], times[name]),
            at_least=TARGETS.get(name),
            note=_limits(name),
        )
        for name in IDEALS
    ]


def _limits(name: str) -> str:
    ranks, cores = parse_topology(name).world_size, len(os.sched_getaffinity(0))
    note = f"ideal {IDEALS[name]:.2f}"
    if ranks > cores:
        note += f"; {ranks} ranks on {cores} cores: at most {min(cores, IDEALS[name]):.2f} here"
    return note


def _seconds(pool: RankPool, name: str, checkpoint: Path, digests: dict[str, str], steps: int | None = None) -> float:
    ranks = pool.run(parse_topology(name).world_size, _run_on_rank, name, checkpoint, steps)
    if steps is None:
        digests.update({f"{name} rank {rank}": latents for rank, (_, latents) in enumerate(ranks)})
        require_same(digests)
    return max(seconds for seconds, _ in ranks)


def _run_on_rank(name: str, checkpoint: Path, steps: int | None) -> tuple[float, str]:
    transformers.utils.logging.disable_progress_bar()
    engine = WanReference.from_pretrained(checkpoint, topology=name)
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    output = engine(request() if steps is None else request(steps))
    return time.perf_counter() - started, digest(output.latents)
