"""What recording costs: traced over untraced time, at each level, on one rank.

CPU time (see `suites.bench.pipeline`) in paces of the run that it is of (see `suites.bench.pace`).
Waiting for the disk is not CPU time; at level `tensor`, the only one that waits for it, the figure leaves it out.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch

from oracle.evidence.probe import record
from oracle.evidence.trace import LEVELS, Level
from suites.bench.figure import Figure, interleave, ratios, require_same
from suites.bench.pace import time_run
from suites.bench.subject import digest, request
from wanref import WanReference

REPETITIONS = 5
TARGETS = {"decisions": 1.01, "digest": 1.05, "stats": 1.10}


def measure(checkpoint: Path) -> list[Figure]:
    """A request of both branches at every step, on the mid-size model."""
    torch.set_num_threads(1)
    engine = WanReference.from_pretrained(checkpoint)
    engine(request(steps=1))  # what a process does once is not measured
    engine.checkpoint.identity()
    blocks = engine.stages["high"].stack.blocks
    digests: dict[str, str] = {}

    def once(level: Level | None) -> float:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            timing, output = time_run(
                blocks, lambda: engine(request()) if level is None else record(engine, request(), trace, level)
            )
        digests[str(level)] = digest(output.latents)
        require_same(digests)
        return timing.paced

    times = interleave(REPETITIONS, {str(level): partial(once, level) for level in (None, *LEVELS)})
    return [
        Figure(
            name=f"trace_{level}_overhead",
            values=ratios(times[level], times["None"]),
            at_most=TARGETS.get(level),
        )
        for level in LEVELS
    ]
