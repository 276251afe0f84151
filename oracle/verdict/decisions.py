"""An independent replay of every cache decision, from the numbers that a run recorded. Shares no code with the caches.

A rule is restated here from its public description, so that a slip in the cache and one in its replay would have to be
the same slip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """What the rule says of one call: whether it reuses, and its accumulator afterwards."""

    reuses: bool
    accumulated: float


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
    """Rule on each call of one (request, expert, branch, stage), from the signal's relative changes, in order.

    A computed call empties the accumulator; a reused one adds the rescaled change to it.
    """
    rulings: list[Ruling] = []
    total = 0.0
    for call, change in enumerate(changes):
        low, high = terms.calibrated or (-np.inf, np.inf)
        at_an_end = call < max(terms.ends[0], 1) or call >= len(changes) - terms.ends[1]
        must_compute = change is None or at_an_end or not low <= change <= high
        if change is not None and not must_compute:
            scaled = float(np.polyval(np.asarray(terms.coefficients, dtype=np.float64), change))
            scaled = {"signed": scaled, "abs": abs(scaled), "clamp": max(0.0, scaled)}[terms.sign]
            total = total + scaled
            if terms.cap is not None:
                total = min(total, terms.cap * terms.threshold)
            must_compute = not total < terms.threshold
        if must_compute:
            total = 0.0
        rulings.append(Ruling(not must_compute, total))
    return rulings


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
    """Rule on each call of one (request, expert, branch, stage).

    `differences` are the recorded relative differences, None where none was taken. Raises ValueError where one is
    missing though the gates before it are open, or is there though one is closed: then the record is not of this rule.
    """
    rulings: list[Ruling] = []
    total, reused, in_a_row = 0.0, 0, 0
    for call, difference in enumerate(differences):
        warmup = min(terms.warmup, _leading_ones(terms.mask)) if terms.mask else terms.warmup
        masked = call < len(terms.mask) and terms.mask[call] == 1
        reuses = False
        compares = False
        if call >= warmup and not masked:
            if terms.mask and terms.static:
                reuses = True
            elif not (0 <= terms.most <= reused or 0 <= terms.most_in_a_row <= in_a_row):
                compares = terms.threshold > 0 and call > 0
        if compares:
            if difference is None:
                raise ValueError(f"call {call}: the rule compares here, but no difference was recorded")
            reuses = terms.threshold >= 1 or difference < terms.threshold
            total += difference if difference > 0 else 0.0
        elif difference is not None:
            raise ValueError(f"call {call}: a difference was recorded, but the rule does not compare here")
        reused, in_a_row = (reused + 1, in_a_row + 1) if reuses else (reused, 0)
        rulings.append(Ruling(reuses, total))
    return rulings


def _leading_ones(mask: Sequence[int]) -> int:
    return next((index for index, digit in enumerate(mask) if digit == 0), len(mask))
