"""The noise band: what may be said of a subject that does not repeat bitwise.

Under "the candidate does what the base does" the runs are exchangeable: which of them are called head is arbitrary.
So every way of calling as many of the runs head is tried, and the true one must stand out among them (a permutation
test: exact for any law of the noise). The statistic is the largest over all keys (Westfall and Young 1993, maxT), so
that a thousand keys make no false alarm, and the keys named outside are judged at that same level.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

K = TypeVar("K", bound=Hashable)
Floats = npt.NDArray[np.float64]
Distances = tuple[K, Floats | None]
"""A key, and (runs, runs) distances there, the base's first; None where a head run is not finite."""
Kind = Literal["decisions changed", "outside noise", "same within noise", "too noisy to say"]

FEWEST_BASE_RUNS = 5
MOST_RELABELLINGS = 5_000  # beyond, so many are drawn; the p value stays valid, as the true one is among them
_CHUNK, _TINY = 1 << 18, float(np.finfo(np.float64).tiny)


class BandError(ValueError):
    """The runs are no evidence: too few, not finite in the base, or not of the same keys, shapes and dtypes."""


class RunView(Protocol[K]):
    """One run. Arrays are asked for key by key, in the order of `keys`, and not kept."""

    @property
    def keys(self) -> Sequence[K]: ...

    @property
    def decisions(self) -> Mapping[K, str]: ...

    def array(self, key: K, /) -> npt.NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class MappedRun(Generic[K]):
    """A run from mappings, lazy ones too; its keys in the order of `arrays`."""

    arrays: Mapping[K, npt.NDArray[Any]]
    decisions: Mapping[K, str] = field(default_factory=dict)

    @property
    def keys(self) -> Sequence[K]:
        return tuple(self.arrays)

    def array(self, key: K, /) -> npt.NDArray[Any]:
        return self.arrays[key]


@dataclass(frozen=True, slots=True)
class KeyBand(Generic[K]):
    """One key: mean distances relative to the base's rms, the statistic, and the head's distance at the alarm level."""

    key: K
    base: float
    head: float
    statistic: float
    visible: float


@dataclass(frozen=True, slots=True)
class BandVerdict(Generic[K]):
    """What may be said. `key` is where: the first outside, changed, or too noisy; None for `same within noise`.

    `attainable` is the smallest rate of false alarms that so few runs allow; `visible` the smallest head-to-base
    distance, at the least noisy key, that would have been an alarm (0: any difference; inf: none).
    """

    kind: Kind
    reason: str
    key: K | None = None
    p_value: float = 1.0
    statistic: float = 0.0
    alarm_rate: float = 0.05
    attainable: float = 1.0
    visible: float = math.inf
    keys: tuple[KeyBand[K], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        place = {"outside noise": f" from {self.key} on"}.get(self.kind, f" at {self.key}")
        return f"{self.kind}{'' if self.key is None else place} ({self.reason})"


def judge_band(
    base: Sequence[RunView[K]], head: Sequence[RunView[K]], alarm_rate: float = 0.05, must_see: float = 0.1
) -> BandVerdict[K]:
    """Judge `head` against `base`, all with their decisions locked to one schedule; decisions before tensors.

    `must_see` is a relative distance: where even that would not be an alarm, the verdict is `too noisy to say`.
    Raises BandError for fewer than 5 base runs, no head run, base runs that decide differently, and arrays that are
    missing, empty, not floating, of another shape or dtype, or (in the base) not finite.
    """
    if len(base) < FEWEST_BASE_RUNS or not head:
        raise BandError(f"{len(base)} base and {len(head)} head runs: at least {FEWEST_BASE_RUNS} and 1 are needed.")
    expected = base[0].decisions
    for number, run in enumerate((*base, *head)):
        key = next((k for k in (*expected, *run.decisions) if expected.get(k) != run.decisions.get(k)), None)
        if key is not None and number < len(base):
            raise BandError(f"base runs 0 and {number} decide differently at {key}: lock them to one schedule first.")
        if key is not None:
            was, now = expected.get(key, "nothing"), run.decisions.get(key, "nothing")
            return BandVerdict("decisions changed", f"head run {number - len(base)}: {was} became {now}", key)
    return judge_distances(measure_distances(base, head), len(base), len(head), alarm_rate, must_see)


def measure_distances(base: Sequence[RunView[K]], head: Sequence[RunView[K]]) -> Iterator[Distances[K]]:
    """Yield each key's distances in order of execution, d(a, b) = rms(a - b) / mean rms of the base, in float64.

    Only one key's arrays are held at a time. Ends after the first key at which a head run is not finite.
    """
    runs = (*base, *head)
    names = [f"base run {i}" for i in range(len(base))] + [f"head run {i}" for i in range(len(head))]
    keys = tuple(base[0].keys)
    if not keys or len(set(keys)) < len(keys):
        raise BandError("a run without keys, or with one twice, is no evidence.")
    for name, run in zip(names, runs, strict=True):
        if tuple(run.keys) != keys:
            odd = next((k for k in (*keys, *run.keys) if k not in set(keys) & set(run.keys)), "their order")
            raise BandError(f"{name} has other keys than base run 0: {odd}.")
    for key in keys:
        arrays = [np.asarray(run.array(key)) for run in runs]
        for name, array in zip(names, arrays, strict=True):
            if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
                raise BandError(f"{name}, {key}: {array.dtype}{array.shape}, not as {names[0]}.")
            if not array.size or array.dtype.kind != "f":
                raise BandError(f"{name}, {key}: {array.dtype}{array.shape} is empty or not floating.")
        finite = [bool(np.isfinite(array).all()) for array in arrays]
        if not all(finite[: len(base)]):
            raise BandError(f"{names[finite.index(False)]}, {key}: not finite, so there is no band.")
        yield key, _pairs(arrays, len(base), key) if all(finite) else None
        if not all(finite):
            return


def judge_distances(
    distances: Iterable[Distances[K]], base: int, head: int, alarm_rate: float = 0.05, must_see: float = 0.1
) -> BandVerdict[K]:
    """Judge what `measure_distances` measured: `base` runs first, then `head` runs. See `judge_band`."""
    if not 1 / MOST_RELABELLINGS <= alarm_rate < 1:
        raise BandError(f"alarm_rate={alarm_rate}: give one between {1 / MOST_RELABELLINGS} and 1.")
    labels = _relabellings(base, head)
    largest = np.zeros(len(labels))  # of all keys' scores, for each relabelling
    rows: list[tuple[K, float, float, float, float]] = []
    unfinite: K | None = None
    for key, pairs in distances:
        if pairs is None:
            unfinite = key
            break
        ratios, apart, within = _ratios(pairs, labels)
        # How far a ratio strays from 1 by chance makes the keys comparable.
        strays = np.abs(ratios[np.isfinite(ratios) & (ratios != 1)] - 1)
        spread = float(np.median(strays)) if strays.size else 1.0
        # One-sided: a head nearer to the base than the base's own runs is no alarm.
        scores = np.maximum(ratios - 1, 0) / spread
        np.maximum(largest, scores, out=largest)
        rows.append((key, within, apart, float(scores[0]), spread))
    # An alarm is a score that no more than `allowed` of the relabellings reach, the true one among them.
    allowed = math.floor(alarm_rate * len(labels) + 1e-9)
    level = float(np.sort(largest)[::-1][allowed]) if allowed else math.inf
    bands = tuple(KeyBand(*row[:4], row[1] * (1 + level * row[4]) if level < math.inf else math.inf) for row in rows)
    p_value = float(np.mean(largest >= largest[0]))
    visible = min((band.visible for band in bands if band.visible > 0), default=0.0)
    numbers = {"p_value": p_value, "statistic": float(largest[0]), "attainable": 1 / len(labels), "visible": visible}

    def verdict(kind: Kind, reason: str, key: K | None = None, **changes: float) -> BandVerdict[K]:
        return BandVerdict(kind, reason, key, keys=bands, alarm_rate=alarm_rate, **{**numbers, **changes})

    for band in bands:
        if band.statistic > level:
            reason = f"p={p_value:.3g}; head is {band.head:.3g} away, base within {band.base:.3g}"
            return verdict("outside noise", reason, band.key)
    if unfinite is not None:
        return verdict("outside noise", "a head run is not finite", unfinite, p_value=0.0, statistic=math.inf)
    if not allowed:
        enough = next(h for h in range(1, 1000) if math.comb(base + h, h) * alarm_rate >= 1)
        reason = (
            f"{base}+{head} runs allow a rate of {1 / len(labels):.3g} at best, not {alarm_rate}; {enough} head runs do"
        )
        return verdict("too noisy to say", reason)
    for band in bands:
        # Not an alarm: one run in so many may be the first to show a rare flip. Nor in a band of no width.
        if band.base == 0 < band.head:
            return verdict("too noisy to say", "base repeats bitwise here, some head runs do not", band.key)
        if band.visible > must_see:
            reason = f"only a distance of {band.visible:.3g} would be seen here, and {must_see} must be"
            return verdict("too noisy to say", reason, band.key)
    return verdict("same within noise", f"p={p_value:.3g}; {visible:.3g} would have been seen")


def _pairs(arrays: Sequence[npt.NDArray[Any]], base: int, key: object) -> Floats:
    """Distances of each pair, summed over chunks, so that no whole array is widened to float64."""
    flat = [array.reshape(-1) for array in arrays]
    power, size, square = 0.0, flat[0].size, (len(flat), len(flat))
    squares, differ = np.zeros(square), np.zeros(square, dtype=bool)
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, size, _CHUNK):
            chunk = np.stack([array[start : start + _CHUNK].astype(np.float64) for array in flat])
            power += float(np.square(chunk[:base]).sum()) / base
            for i in range(len(flat) - 1):
                gaps = chunk[i + 1 :] - chunk[i]
                squares[i, i + 1 :] += np.square(gaps).sum(axis=1)
                differ[i, i + 1 :] |= gaps.any(axis=1)
        scaled = np.sqrt(squares / size) / (math.sqrt(power / size) or 1.0)
    if not (math.isfinite(power) and np.isfinite(scaled).all()):
        raise BandError(f"{key}: the squares overflow float64.")
    # Zero means equal and nothing else: a difference too small to be squared is the smallest there is.
    distances = np.where(differ, np.maximum(scaled, _TINY), 0.0)
    return np.asarray(distances + distances.T)


def _relabellings(base: int, head: int) -> npt.NDArray[np.bool_]:
    """(relabellings, runs): who is called head. The true one comes first."""
    if math.comb(base + head, head) <= MOST_RELABELLINGS:
        heads = np.array(list(combinations(reversed(range(base + head)), head)))
        labels = np.zeros((len(heads), base + head), dtype=bool)
        np.put_along_axis(labels, heads, True, axis=1)
        return labels
    true = np.arange(base + head) >= base
    return np.array([true, *map(np.random.default_rng(0).permutation, [true] * (MOST_RELABELLINGS - 1))])


def _ratios(pairs: Floats, labels: npt.NDArray[np.bool_]) -> tuple[Floats, float, float]:
    """Mean head-to-base distance over mean distance within base, for each relabelling; both means of the true one.

    Below 1 for a head less noisy than the base. Where the base does not differ: infinite if every head run does, or 1.
    """
    heads = labels.astype(np.float64)
    bases = 1 - heads
    from_base = bases @ pairs
    base, head = int(bases[0].sum()), int(heads[0].sum())
    apart = (from_base * heads).sum(axis=1) / (base * head)
    within = (from_base * bases).sum(axis=1) / (base * (base - 1))
    all_differ = ((from_base > 0) | ~labels).all(axis=1)
    ratios: Floats = np.where(all_differ, np.inf, 1.0)
    np.divide(apart, within, out=ratios, where=within > 0)
    # Rounded, so that relabellings that tie do so whatever the order of the sums.
    return ratios.round(9), float(apart[0]), float(within[0])
