"""Whether a cache is worth it: its quality against the control's, fewer steps and no cache, at the same latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from oracle.campaign.refusal import CampaignError

Verdict = Literal["qualified", "qualified, not worth it"]


@dataclass(frozen=True, slots=True)
class Point:
    """A measured way to spend time: latency ratio to the native render, mean SSIM and temporal error."""

    ratio: float
    ssim: float
    temporal_error: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


NATIVE = Point(1.0, 1.0, 0.0)


def control_at(ratio: float, controls: Sequence[Point]) -> Point:
    """The control's quality at a latency: linear between its measured points and the native render.

    Below the fastest of them it is that one's, which is more than the control reaches there. Raises CampaignError
    without a point.
    """
    if not controls:
        raise CampaignError("control: no point was measured: every campaign runs the control.")
    points = sorted([*controls, NATIVE], key=lambda point: point.ratio)
    if ratio <= points[0].ratio:
        return Point(ratio, points[0].ssim, points[0].temporal_error)
    for below, above in pairwise(points):
        if ratio <= above.ratio:
            share = (ratio - below.ratio) / (above.ratio - below.ratio) if above.ratio > below.ratio else 1.0
            return Point(
                ratio,
                below.ssim + share * (above.ssim - below.ssim),
                below.temporal_error + share * (above.temporal_error - below.temporal_error),
            )
    return Point(ratio, NATIVE.ssim, NATIVE.temporal_error)


def judge_worth(cache: Point, controls: Sequence[Point]) -> Verdict:
    """Of a cache that passed the gates: it must be at least as good as the control in both, and better in one."""
    control = control_at(cache.ratio, controls)
    no_worse = cache.ssim >= control.ssim and cache.temporal_error <= control.temporal_error
    better = cache.ssim > control.ssim or cache.temporal_error < control.temporal_error
    return "qualified" if no_worse and better else "qualified, not worth it"
