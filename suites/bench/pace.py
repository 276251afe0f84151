"""A run's CPU time beside the pace of the machine in that very run.

A shared machine runs the same instructions at speeds that differ by a third within a minute, which no order of the runs
evens out. The pace is what the heart of a block took in the same run: from its self-attention's first projection to the
end of its feed-forward. No cache and no recorder has code in there, so what they cost is never part of the pace, and a
run's time in paces is the work that it did.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """CPU seconds of one run, the block calls in it, and the mean seconds of a whole one and of its heart (the pace).

    All but `seconds` are 0 in a run without a block call.
    """

    seconds: float
    calls: int
    seconds_a_block: float
    pace: float

    @property
    def paced(self) -> float:
        """The run's time in paces."""
        return self.seconds / self.pace


def time_run(blocks: Sequence[torch.nn.Module], run: Callable[[], Any]) -> tuple[Timing, Any]:
    """Time `run`, which calls these blocks, and return what it returned.

    A block's time is what passes between its feed-forward and that of the next block in the same call of the stack.
    """
    starts: list[float] = []
    fed: list[tuple[int, float]] = []
    ends: list[float] = []
    handles = []
    for index, block in enumerate(blocks):
        query, ffn = block.get_submodule("attn1.to_q"), block.get_submodule("ffn")
        handles += [
            query.register_forward_pre_hook(lambda *_: starts.append(time.process_time())),
            ffn.register_forward_pre_hook(lambda *_, index=index: fed.append((index, time.process_time()))),
            ffn.register_forward_hook(lambda *_: ends.append(time.process_time())),
        ]
    try:
        started = time.process_time()
        output = run()
        seconds = time.process_time() - started
    finally:
        for handle in handles:
            handle.remove()
    between = [then - now for (i, now), (j, then) in pairwise(fed) if j == i + 1]
    hearts = [end - start for start, end in zip(starts, ends, strict=True)]
    return Timing(seconds, len(fed), _mean(between), _mean(hearts)), output


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else 0.0
