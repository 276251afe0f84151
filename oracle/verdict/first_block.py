"""The decisions of a first-block cache, replayed from what was seen to enter and leave its blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.evidence.subjects import FirstBlockRule
from oracle.verdict.align import Aligned
from oracle.verdict.decisions import DBCacheTerms, replay_dbcache
from wanref.observe import TensorKey

Array = npt.NDArray[Any]


def replay_first_block(aligned: Aligned, rule: FirstBlockRule) -> tuple[str | None, int]:
    """What is wrong first, None if nothing is, and how many decisions were held against the rule.

    The trace is of level `tensor`, of one stage. Raises TraceError where a value is missing.
    """
    terms = DBCacheTerms(rule.threshold, rule.warmup, -1, -1, (), False)
    tracks: dict[tuple[str, str], list[int]] = {}
    for _, step, branch, _ in sorted(aligned.decisions):
        expert = next(each["expert"] for each in aligned.requests[0].schedule or () if each["index"] == step)
        tracks.setdefault((expert, branch), []).append(step)
    for (expert, branch), steps in tracks.items():
        verdicts = [aligned.decisions[0, step, branch, 0].verdict for step in steps]
        changes = _changes(aligned, rule, expert, branch, steps, verdicts)
        given = [None if call < max(rule.warmup, 1) else change for call, change in enumerate(changes)]
        for step, verdict, ruling, change in zip(steps, verdicts, replay_dbcache(terms, given), changes, strict=True):
            if verdict != ("reuse" if ruling.reuses else "compute"):
                return f"step {step}, {branch}: {verdict}, where its first block changed by {change:.4g}", 0
    return None, len(aligned.decisions)


def _changes(
    aligned: Aligned, rule: FirstBlockRule, expert: str, branch: str, steps: list[int], verdicts: list[str]
) -> list[float | None]:
    """By how much the first block's residual has changed since the last call that computed, of each call."""

    def value(step: int, block: int | str) -> Array:
        key = TensorKey(0, step, expert, branch, block)  # type: ignore[arg-type]
        owner = aligned.owner(key)
        return aligned.array(key, 0 if owner is None else owner.rank)

    last = aligned.manifest["layers"] - 1
    changes: list[float | None] = []
    computed: Array | None = None
    others: Array | None = None
    for step, verdict in zip(steps, verdicts, strict=True):
        leaves = value(step, 0)
        if rule.folded and verdict == "reuse" and others is not None:
            leaves = leaves - others
        residual = leaves - value(step, "embed")
        changes.append(None if computed is None else _change(computed, residual))
        if verdict == "compute":
            computed, others = residual, value(step, last) - leaves
    return changes


def _change(before: Array, now: Array) -> float:
    return float(np.abs(now - before).mean() / np.abs(before).mean())
