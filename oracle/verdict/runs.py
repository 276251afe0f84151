"""Traces of subjects that do not repeat, several a side: the noise band, on logical keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy.typing as npt

from oracle.evidence.reader import Trace
from oracle.evidence.trace import TraceError
from oracle.verdict.align import Aligned, DecisionKey, align
from oracle.verdict.band import BandVerdict, judge_band
from wanref.observe import TensorKey

Place = TensorKey | DecisionKey
FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class TraceRun:
    """One trace as the band sees a run: its values in the order of execution, and its decisions."""

    aligned: Aligned

    @cached_property
    def keys(self) -> Sequence[Place]:
        aligned = self.aligned
        return [
            key for key in aligned.ordered if (owner := aligned.owner(key)) is not None and owner.record.dtype in FLOATS
        ]

    @cached_property
    def decisions(self) -> Mapping[Place, str]:
        return {key: decision.verdict for key, decision in sorted(self.aligned.decisions.items())}

    def array(self, key: Place, /) -> npt.NDArray[Any]:
        assert isinstance(key, TensorKey)
        owner = self.aligned.owner(key)
        assert owner is not None
        return self.aligned.array(key, owner.rank)


def compare_runs(
    base: Sequence[Trace], head: Sequence[Trace], locked: Trace | None = None, alarm_rate: float = 0.05
) -> BandVerdict[Place]:
    """Whether `head` is within the noise of `base`: at least 5 runs of it, and 2 of the head for an alarm rate of 5 %.

    locked: the trace whose decisions every run was to replay; a base that did not is no base. Runs of base and head
    should take turns, so that a machine that drifts is not taken for a difference. Raises TraceError for a trace with
    holes or without tensors, and BandError for runs that are no evidence.
    """
    runs = [[_open(trace) for trace in side] for side in (base, head)]
    schedule = TraceRun(align(locked)) if locked is not None else None
    if schedule is not None:
        for number, run in enumerate(runs[0]):
            if run.decisions != schedule.decisions:
                raise TraceError(f"base run {number} ({run.aligned.trace.folder}) did not keep to the locked schedule.")
    return judge_band(runs[0], runs[1], alarm_rate)


def _open(trace: Trace) -> TraceRun:
    aligned = align(trace)
    if aligned.holes:
        raise TraceError(f"{trace.folder}: {aligned.holes[0]}; a run with holes is no evidence.")
    if trace.manifest["level"] != "tensor":
        raise TraceError(f"{trace.folder}: recorded at level {trace.manifest['level']!r}; the band needs 'tensor'.")
    return TraceRun(aligned)
