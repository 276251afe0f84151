"""What tests of campaigns share: clips, rows and timings made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.campaign.metrics import Metrics
from oracle.campaign.pair import Calls, Pair, Row, pairs_of
from oracle.campaign.timing import Timing
from wanref.caching.profile import ProfileIdentity

PAIRS = pairs_of(["a red square", "a blue circle"], [17, 29])
IDENTITY = ProfileIdentity("c" * 64, "cpu", "float32", "pp1cfg1", (1, 4, 2, 4, 4), "5" * 64)


def clip(frames: int = 5, side: int = 24, seed: int = 0) -> npt.NDArray[np.float64]:
    """A smooth pattern that moves, away from 0 and 1 so that it can be shifted."""
    rng = np.random.default_rng(seed)
    phase = rng.random(3) * 6
    y, x, t = np.meshgrid(np.arange(side), np.arange(side), np.arange(frames), indexing="ij")
    channels = [np.sin(x / 3 + t / 2 + phase[0]), np.cos(y / 4 - t / 3 + phase[1]), np.sin((x + y) / 5 + t + phase[2])]
    return 0.5 + 0.3 * np.stack(channels, axis=-1).transpose(2, 0, 1, 3)


def metrics_of(ssim: float = 0.99, temporal: float = 0.02, latent: float = 0.01) -> Metrics:
    return Metrics(ssim, temporal, latent, 0.5, 0.5, 0.5, 0.5)


def calls_of(computed: int = 4, reused: int = 6, branch: str = "cond") -> Calls:
    """Calls of a stack of two blocks."""
    return Calls("high", branch, 0, computed, reused, 2 * computed, 2 * (computed + reused))


def row_of_metrics(pair: Pair, **options: Any) -> Row:
    """A sound row; `ssim`, `temporal`, `latent`, `calls`, `begun` or `ended` otherwise."""
    calls = options.pop("calls", (calls_of(), calls_of(branch="uncond")))
    states = {moment: options.pop(moment, moment) for moment in ("begun", "ended")}
    return Row(pair, metrics_of(**options), calls, **states, native="n", cached="c")


def rows_of(pairs: Sequence[Pair] = PAIRS, **options: Any) -> list[Row]:
    return [row_of_metrics(pair, **options) for pair in pairs]


def timing_at(high: float = 0.6, topology: str = "pp1cfg1", recording: bool = False) -> Timing:
    return Timing(
        native=1.0,
        cached=high,
        ratio=high,
        low=high,
        high=high,
        blocks=0.4,
        ideal=0.5,
        samples=4,
        topology=topology,
        threads=1,
        recording=recording,
    )
