"""What a cache saves: native and cached requests in turn on one loaded engine, with nothing recorded.

A file of its own, apart from every quality table: seconds differ from run to run, and quality must not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oracle.campaign.ideal import Pace, cached_blocks, ideal_ratio, measure_pace, native_blocks
from oracle.campaign.observing import synchronise
from oracle.campaign.refusal import CampaignError
from wanref.topology import Topology, parse_topology

if TYPE_CHECKING:
    from wanref.caching.base import Decision
    from wanref.caching.spec import CacheSpec
    from wanref.output import Output
    from wanref.pipeline import WanReference
    from wanref.request import Request
    from wanref.schedule import Schedule

RESAMPLES = 10_000
CONFIDENCE = 0.95
"""Of the bootstrap interval, whose upper end the latency gate reads."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, natively and cached in turn on one rank: seconds of both, the schedules that they ran, and what the

    cache decided there. The control has no cache, and a schedule of its own.
    """

    native: float
    cached: float
    native_schedule: Schedule
    cached_schedule: Schedule
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class RankTiming:
    """What one rank saw. recording: whether anything observed the engine in any of the timed runs."""

    samples: tuple[Sample, ...]
    pace: Pace
    topology: str
    layers: int
    threads: int
    recording: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians in seconds of `samples` pairs, and their ratio cached / native with its interval `low` to `high`.

    blocks: block calls on the longest way, cached over native. ideal: the ratio that these hits would give if the cache
    cost nothing, so that `ratio - ideal` is what it costs. A timing with `recording` is refused by the gates.
    """

    native: float
    cached: float
    ratio: float
    low: float
    high: float
    blocks: float
    ideal: float
    samples: int
    topology: str
    threads: int
    recording: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def timing_of(content: Mapping[str, Any]) -> Timing:
    """From `as_json`. Raises CampaignError for anything else."""
    try:
        return Timing(**content)
    except TypeError as error:
        raise CampaignError(f"timing: {dict(content)!r} is not one: {error}.") from None


def time_requests(
    engine: WanReference,
    requests: Sequence[Request],
    cache: CacheSpec | None,
    steps: int | None = None,
    warm_ups: int = 1,
) -> RankTiming:
    """On each rank: every request natively and cached, which of them first in turn.

    steps: of the control instead, which has no cache and takes fewer. warm_ups: pairs of runs before, which are not
    timed. Raises CampaignError if an observer or a cache is mounted: the one would be timed too, the other would make
    the native runs cached ones.
    """
    import torch

    if engine.observer is not None:
        raise CampaignError("timing: an observer is mounted on the engine. Take it off: recording is no part of it.")
    if engine.cache is not None:
        raise CampaignError(f"timing: cache={engine.cache.method!r} is mounted on the engine. Unmount it.")
    if not requests:
        raise CampaignError("timing: requests=[] is not accepted: give at least one.")
    if (cache is None) == (steps is None):
        raise CampaignError(f"timing: cache={cache!r} and steps={steps!r} are not accepted: give one of the two.")

    def run(request: Request, cached: bool) -> tuple[float, Output]:
        if not cached:
            return _time(engine, request, None)
        return _time(engine, request if steps is None else replace(request, steps=steps), cache)

    for _ in range(warm_ups):
        for cached in (False, True):
            run(requests[0], cached)
    pace = measure_pace(engine, requests[0])
    samples, recording = [], False
    for number, request in enumerate(requests):
        runs: dict[bool, tuple[float, Output]] = {}
        # Every other pair the other way round: what the second of two runs gains or pays is then shared by both kinds.
        for cached in (False, True) if number % 2 == 0 else (True, False):
            recording |= engine.observer is not None
            runs[cached] = run(request, cached)
        (native, native_output), (seconds, output) = runs[False], runs[True]
        samples.append(Sample(native, seconds, native_output.schedule, output.schedule, tuple(output.decisions)))
    return RankTiming(
        samples=tuple(samples),
        pace=pace,
        topology=str(engine.topology),
        layers=int(engine.checkpoint.transformer["num_layers"]),
        threads=torch.get_num_threads(),
        recording=recording,
    )


def summarise(ranks: Sequence[RankTiming], seed: int = 0) -> Timing:
    """One timing from those of all ranks: a run takes as long as its slowest rank. Raises CampaignError."""
    topology, layers = parse_topology(ranks[0].topology), ranks[0].layers
    if len(ranks) != topology.world_size or {(r.topology, len(r.samples)) for r in ranks} != {
        (ranks[0].topology, len(ranks[0].samples))
    }:
        raise CampaignError(f"timing: {len(ranks)} ranks are not one run of {topology}'s {topology.world_size}.")
    runs = list(zip(*(rank.samples for rank in ranks), strict=True))
    native = np.array([max(sample.native for sample in run) for run in runs])
    cached = np.array([max(sample.cached for sample in run) for run in runs])
    whole = {native_blocks(sample.native_schedule, topology, layers) for run in runs for sample in run}
    if len(whole) != 1:
        raise CampaignError("timing: the requests are not of one schedule: time those of one step count and guidance.")
    blocks = sum(_blocks(run, topology, layers) for run in runs) / (len(runs) * min(whole))
    low, high = bootstrap(native, cached, seed)
    return Timing(
        native=float(np.median(native)),
        cached=float(np.median(cached)),
        ratio=float(np.median(cached) / np.median(native)),
        low=low,
        high=high,
        blocks=blocks,
        ideal=ideal_ratio(min(whole), blocks, [rank.pace for rank in ranks]),
        samples=len(runs),
        topology=str(topology),
        threads=ranks[0].threads,
        recording=any(rank.recording for rank in ranks),
    )


def bootstrap(native: npt.NDArray[Any], cached: npt.NDArray[Any], seed: int = 0) -> tuple[float, float]:
    """Percentile interval of median(cached) / median(native), by drawing whole pairs again; the same for a seed.

    Raises CampaignError for a run that took no time, or none that is a number.
    """
    if len(native) != len(cached) or not len(native):
        raise CampaignError(f"timing: {len(native)} native and {len(cached)} cached runs are not pairs.")
    for times in (native, cached):
        if not (np.isfinite(times).all() and (times > 0).all()):
            raise CampaignError(f"timing: seconds={times.tolist()} are not all finite and above 0.")
    drawn = np.random.default_rng(seed).integers(len(native), size=(RESAMPLES, len(native)))
    ratios = np.median(cached[drawn], axis=1) / np.median(native[drawn], axis=1)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _blocks(run: Sequence[Sample], topology: Topology, layers: int) -> int:
    """Of one cached request, from all ranks, or of the control."""
    decisions = [decision for sample in run for decision in sample.decisions]
    if decisions:
        return cached_blocks(decisions, topology)
    return native_blocks(run[0].cached_schedule, topology, layers)


def _time(engine: WanReference, request: Request, spec: CacheSpec | None) -> tuple[float, Output]:
    """Seconds of one request. Mounting is set-up and is not timed; what a cache does at a request's begin is."""
    if spec is not None:
        engine.mount(spec)
    try:
        synchronise(engine)
        started = time.perf_counter()
        output = engine(request)
        synchronise(engine)
        return time.perf_counter() - started, output
    finally:
        engine.unmount()
