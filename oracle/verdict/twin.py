"""The triplet, native, mounted and forced, cached: recorded on one engine in one process group, and judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oracle.evidence.reader import open_trace
from oracle.verdict.align import Aligned, DecisionKey, align
from oracle.verdict.compare import compare
from oracle.verdict.finding import Finding, Spot, Verdict
from wanref.files import write_each, write_video

if TYPE_CHECKING:
    from oracle.evidence.trace import Level
    from wanref import Output, Request, WanReference
    from wanref.caching.spec import CacheSpec

NATIVE, AGAIN = "native", "native-again"
TIMESTEP_SIGNALS = ("timestep_embedding", "timestep_projection")

VIDEO, DIFFERENCE = "video.mp4", "difference.mp4"
FPS = 16
"""Frames a second of the videos that are kept: the rate that Wan was trained at."""
GAIN = 4
"""By which the difference is made visible. It is one for all, so that two videos of it can be held side by side."""


def forced_folder(cache: str) -> str:
    return f"{cache}-forced"


def cached_folder(cache: str) -> str:
    return f"{cache}-cached"


def record_triplets(
    engine: WanReference, request: Request, caches: Mapping[str, CacheSpec], folder: Path, level: Level = "digest"
) -> None:
    """On every rank: the request native, then forced and cached under each cache, then native on the used engine.

    The rank that has the video keeps it beside each trace, and beside a cached one its difference from the native.
    """
    from oracle.evidence.probe import record

    native = record(engine, request, folder / NATIVE, level)
    _keep(native, folder / NATIVE)
    for name, cache in caches.items():
        for part, forced in ((forced_folder(name), True), (cached_folder(name), False)):
            engine.mount(replace(cache, forced=forced))
            try:
                output = record(engine, request, folder / part, level)
            finally:
                engine.unmount()
            _keep(output, folder / part)
            if not forced:
                _keep_difference(native, output, folder / part)
    _keep(record(engine, request, folder / AGAIN, level), folder / AGAIN)


def _keep(output: Output, folder: Path) -> None:
    if output.video is not None:
        write_each(folder / VIDEO, output.video, _write)


def _keep_difference(native: Output, output: Output, folder: Path) -> None:
    """From the pixels, not from two MP4s: those differ by what their compression lost, too."""
    if native.video is not None and output.video is not None:
        amplified = np.minimum(GAIN * np.abs(output.video - native.video), 1)
        write_each(folder / DIFFERENCE, amplified, _write)


def _write(path: Path, frames: np.ndarray) -> None:
    write_video(path, frames, FPS)


@dataclass(frozen=True, slots=True)
class Loops:
    """Where the rule decides otherwise on its own output (closed loop) than on unharmed inputs (open loop)."""

    calls: int
    differing: tuple[DecisionKey, ...]


def judge_triplet(folder: Path, cache: str) -> tuple[dict[str, Verdict], Loops]:
    """Verdicts by contract of one cache's triplet, and its open-loop schedule beside the closed-loop one."""
    native, forced = open_trace(folder / NATIVE), open_trace(folder / forced_folder(cache))
    cached = open_trace(folder / cached_folder(cache))
    loops = compare_loops(align(forced), align(cached))
    verdict = compare(forced, cached, "cached")
    if loops.differing and _by_timestep_alone(cached.manifest["cache"] or {}):
        request, step, branch, stage = loops.differing[0]
        says = "the rule decides by the timestep alone, but decided otherwise than on unharmed inputs"
        finding = Finding("decisions", "decision", Spot(request, step, None, branch, None, stage), says)
        verdict = replace(verdict, findings=(*verdict.findings, finding))
    return {"forced": compare(native, forced, "forced"), "cached": verdict}, loops


def compare_loops(forced: Aligned, cached: Aligned) -> Loops:
    """The forced run's shadow decisions against the cached run's."""
    keys = sorted(forced.decisions.keys() | cached.decisions.keys())
    differing = []
    for key in keys:
        a, b = forced.decisions.get(key), cached.decisions.get(key)
        if a is None or b is None or a.ruled != b.verdict:
            differing.append(key)
    return Loops(len(keys), tuple(differing))


def _by_timestep_alone(cache: Mapping[str, Any]) -> bool:
    return cache.get("method") == "fixed" or cache.get("options", {}).get("signal") in TIMESTEP_SIGNALS


def recorded_schedule(aligned: Aligned, stages: int) -> str:
    """A cached run's decisions as the `steps` of the cache `fixed`, for a topology of `stages` pipeline stages.

    Raises ValueError where that topology cannot do the same: its stages hold blocks of recorded ones that disagree.
    """
    from wanref.topology import Topology

    layers = aligned.manifest["layers"]
    steps: dict[tuple[int, str], list[int]] = {}
    places = sorted({(key[1], key[2]) for key in aligned.decisions})
    for stage in range(stages):
        blocks = Topology(stages).blocks(stage, layers)
        held = sorted({aligned.stage_of(block) for block in blocks})
        for step, branch in places:
            verdicts = {d.verdict for s in held if (d := aligned.decisions.get((0, step, branch, s))) is not None}
            if len(verdicts) > 1:
                raise ValueError(
                    f"stages={stages}: stage {stage} would hold the recorded stages {held}, of which at step {step} "
                    f"({branch}) one reused and one computed. Replay on a topology of {aligned.topology.pp} stages."
                )
            if verdicts == {"reuse"}:
                steps.setdefault((stage, branch), []).append(step)
    return "/".join(f"{s}.{branch}={'+'.join(map(str, listed))}" for (s, branch), listed in sorted(steps.items()))
