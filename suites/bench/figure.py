"""One figure of the bench: a median of repetitions, its spread, and what it should reach."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap


class BytesDiffer(AssertionError):
    """Two runs that were timed against each other did not do the same work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`values` are ratios, one a repetition, unless the name ends in the unit of an absolute one.

    at_least, at_most: the target, if there is one. note: what bounds the figure, or what it leaves out.
    """

    name: str
    values: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def reached(self) -> bool:
        return (self.at_least is None or self.median >= self.at_least) and (
            self.at_most is None or self.median <= self.at_most
        )


def interleave(repetitions: int, runs: Mapping[str, Callable[[], float]]) -> dict[str, tuple[float, ...]]:
    """Call each of `runs`, which returns its seconds, in turn: what slows the machine for a while slows all alike."""
    rounds = [{name: run() for name, run in runs.items()} for _ in range(repetitions)]
    return {name: tuple(times[name] for times in rounds) for name in runs}


def ratios(over: tuple[float, ...], under: tuple[float, ...]) -> tuple[float, ...]:
    """The ratio within each repetition."""
    return tuple(a / b for a, b in zip(over, under, strict=True))


def interval(values: tuple[float, ...]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    if len(set(values)) == 1:
        return values[0], values[0]
    found = bootstrap((np.array(values),), np.median, method="percentile", rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def beside(ours: tuple[float, ...], theirs: tuple[float, ...]) -> str:
    """Ours over theirs within each repetition: above only if the whole interval of its median is."""
    low, high = interval(ratios(ours, theirs))
    verdict = "above" if low > 1 else "below" if high < 1 else "level with"
    return f"{verdict} {statistics.median(theirs):.3f} ({low:.3f} to {high:.3f} of it)"


def require_same(digests: Mapping[str, str]) -> None:
    """Raise BytesDiffer unless all of these digests are the same."""
    if len(set(digests.values())) > 1:
        raise BytesDiffer(
            "the outputs differ: " + ", ".join(f"{name} {digest[:8]}" for name, digest in digests.items())
        )
