"""An independent replay of every cache decision, from the numbers that a run recorded. Shares no code with the caches.

A rule is restated here from its public description, so that a slip in the cache and one in its replay would have to be
the same slip.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

FORCED_ENDS = {
    ("teacache", "timestep_projection"): (5, 0),
    ("teacache", "timestep_embedding"): (1, 1),
    ("sglang", "timestep_projection"): (5, 0),
    ("sglang", "timestep_embedding"): (1, 1),
    ("trt-llm", "timestep_projection"): (5, 0),
    ("trt-llm", "timestep_embedding"): (1, 1),
    ("vllm-omni", "modulated_input"): (1, 0),
}
"""(dialect, signal) to how many steps at the beginning and at the end are always computed."""
SIGNS = {"teacache": "signed", "sglang": "signed", "trt-llm": "abs", "vllm-omni": "abs"}
CAPS = {"trt-llm": 2.0}


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the rule says of one call: whether it reuses, and its accumulator afterwards.

    rescaled: what was added to the accumulator before it was judged, None where nothing was. why: the same in words.
    """

    reuses: bool
    accumulated: float
    rescaled: float | None = field(default=None, compare=False)
    why: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class TeaCacheTerms:
    """One expert's rule on one stage. ends: steps always computed at the beginning and the end; cap: in thresholds."""

    coefficients: tuple[float, ...]
    threshold: float
    sign: str
    ends: tuple[int, int]
    cap: float | None = None
    calibrated: tuple[float, float] | None = None


def teacache_terms(dialect: str, signal: str, coefficients: Sequence[float], threshold: float) -> TeaCacheTerms:
    """The terms of a public engine."""
    ends = FORCED_ENDS[dialect, signal]
    return TeaCacheTerms(tuple(coefficients), threshold, SIGNS[dialect], ends, CAPS.get(dialect))


def replay_teacache(terms: TeaCacheTerms, changes: Sequence[float | None]) -> list[Ruling]:
    """Rule on each call of one (request, expert, branch, stage), from the signal's relative changes, in order."""
    return list(rule_teacache(terms, changes, len(changes)))


def rule_teacache(terms: TeaCacheTerms, changes: Sequence[float | None], count: int) -> Iterator[Ruling]:
    """The same, call by call. count: calls of the whole request, of which `changes` may be the first few.

    A computed call empties the accumulator; a reused one adds the rescaled change to it. Only the first call has no
    change: raises ValueError where another has none.
    """
    low, high = terms.calibrated or (-np.inf, np.inf)
    first, last = max(terms.ends[0], 1), terms.ends[1]
    total = 0.0
    for call, change in enumerate(changes):
        if change is None and call:
            raise ValueError(f"no change of the signal was recorded for call {call}, and the rule goes by it")
        scaled = None
        if change is None or call < first:
            why = f"of {count} calls the first {first} are computed"
        elif call >= count - last:
            why = f"of {count} calls the last {last} are computed"
        elif not low <= change <= high:
            why = f"the change {change:.6g} is outside the calibrated range, {low:.6g} to {high:.6g}"
        else:
            scaled = float(np.polyval(np.asarray(terms.coefficients, dtype=np.float64), change))
            scaled = {"signed": scaled, "abs": abs(scaled), "clamp": max(0.0, scaled)}[terms.sign]
            total = total + scaled
            if terms.cap is not None:
                total = min(total, terms.cap * terms.threshold)
            why = f"accumulated {total:.6g} of at most {terms.threshold:.6g}"
        reuses = scaled is not None and total < terms.threshold
        total = total if reuses else 0.0
        yield Ruling(reuses, total, scaled, why)


@dataclass(frozen=True, slots=True)
class DBCacheTerms:
    """One expert's DBCache, without what changes no decision. mask: 1 computes, 0 may (or, static, must) reuse."""

    threshold: float
    warmup: int = 8
    most: int = -1
    most_in_a_row: int = -1
    mask: tuple[int, ...] = ()
    static: bool = False


def replay_dbcache(terms: DBCacheTerms, differences: Sequence[float | None]) -> list[Ruling]:
    """Rule on each call of one (request, expert, branch, stage), from the recorded relative differences, in order."""
    return list(rule_dbcache(terms, differences))


def rule_dbcache(terms: DBCacheTerms, differences: Sequence[float | None]) -> Iterator[Ruling]:
    """The same, call by call. A difference is None where none was taken.

    Raises ValueError where one is missing though the gates before it are open, or is there though one is closed: then
    the record is not of this rule.
    """
    warmup = min(terms.warmup, _leading_ones(terms.mask)) if terms.mask else terms.warmup
    total, reused, in_a_row = 0.0, 0, 0
    for call, difference in enumerate(differences):
        reuses = compares = False
        if call < warmup:
            why = f"the first {warmup} calls are computed"
        elif call < len(terms.mask) and terms.mask[call] == 1:
            why = "the mask computes here"
        elif terms.mask and terms.static:
            reuses, why = True, "the mask reuses here"
        elif 0 <= terms.most <= reused:
            why = f"{reused} reused of at most {terms.most}"
        elif 0 <= terms.most_in_a_row <= in_a_row:
            why = f"{in_a_row} reused in a row of at most {terms.most_in_a_row}"
        else:
            compares = terms.threshold > 0 and call > 0
            why = "there is nothing to compare with" if terms.threshold > 0 else "the threshold is 0"
        if compares:
            if difference is None:
                raise ValueError(f"no difference was recorded for call {call}, at which the rule compares")
            reuses = terms.threshold >= 1 or difference < terms.threshold
            why = f"difference {difference:.6g} of at most {terms.threshold:.6g}"
            total += difference if difference > 0 else 0.0
        elif difference is not None:
            raise ValueError(f"a difference was recorded for call {call}, at which the rule does not compare: {why}")
        reused, in_a_row = (reused + 1, in_a_row + 1) if reuses else (reused, 0)
        yield Ruling(reuses, total, why=why)


def rule_fixed(reused: Collection[int], steps: Sequence[int]) -> Iterator[Ruling]:
    """Rule on the calls at these steps by a given schedule: the steps that reuse."""
    for step in steps:
        yield Ruling(step in reused, 0.0, why=f"steps {', '.join(map(str, sorted(reused))) or 'none'} reuse")


def _leading_ones(mask: Sequence[int]) -> int:
    return next((index for index, digit in enumerate(mask) if digit == 0), len(mask))
