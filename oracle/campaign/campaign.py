"""A campaign from its plan to qualified profiles: collect, search, freeze, accept, in one folder that can be resumed.

Quality is searched once a PP and accepted in every topology. Seconds lie in files of their own, taken when nothing else
runs; what is there is never taken again, so that a resumed campaign has the quality tables of an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oracle.campaign.acceptance import (
    Acceptance,
    accept,
    acceptance_path,
    admit,
    qualify,
    read_acceptance,
    write_acceptance,
)
from oracle.campaign.calibration import Calibration, calibrate, read_calibration, write_calibration
from oracle.campaign.candidate import CONTROL, candidate_of
from oracle.campaign.candidates import candidates_for
from oracle.campaign.content import read_content
from oracle.campaign.freeze import freeze
from oracle.campaign.identity import identity_shard, read_identity
from oracle.campaign.pair import Pair
from oracle.campaign.plan import Plan
from oracle.campaign.record import read_record, write_record
from oracle.campaign.refusal import CampaignError
from oracle.campaign.search import search
from oracle.campaign.setting import Setting, open_engine, request_of
from oracle.campaign.shards import Executor, Progress, Shard, path_of, run_graph
from oracle.campaign.timing import RankTiming, Timing, summarise, time_requests, timing_of
from oracle.campaign.work import collect_shard, evaluator, key_of, native_shard, read_collected, read_rows, rows_shard
from oracle.campaign.worth import Point, judge_worth
from oracle.evidence.ranks import RankPool
from oracle.evidence.revision import revision_of
from wanref.caching.profile import ProfileIdentity, write_profile
from wanref.caching.spec import CacheSpec
from wanref.topology import parse_topology

TIMING = "wanref.campaign.timing/1"
WORTH = "wanref.campaign.worth/1"
Report = Callable[[str, Progress], object]
"""Told what is being done, and how far it is."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one topology. refused: why nothing was accepted, "" where it was; worth: beside the control."""

    topology: str
    profile: Path | None
    acceptance: Acceptance | None
    refused: str
    worth: str


def run_campaign(plan: Plan, folder: Path, executor: Executor, pool: RankPool, report: Report) -> list[Ended]:
    """All of it; what is in `folder` already is not done again. pool: for timings, which have the machine alone.

    Raises ShardsFailed where renders failed, which another run tries again.
    """
    calibrations = {pp: calibrate_stages(plan, pp, folder, executor, report) for pp in plan.stages}
    return [
        accept_topology(plan, topology, calibrations[_pp(topology)], folder, executor, pool, report)
        for topology in plan.topologies
    ]


def calibrate_stages(plan: Plan, pp: int, folder: Path, executor: Executor, report: Report) -> Calibration:
    """Search at one PP, with branches on one chain, and the record of it."""
    setting = plan.setting_of(f"pp{pp}cfg1")
    pairs = plan.calibration.pairs
    natives = natives_of(setting, pairs, plan.round_size, f"calibration/pp{pp}")
    every = max(1, len(pairs) // plan.collected)
    one = plan.setting_of("pp1cfg1")
    collected = [
        collect_shard(one, pair, pp, f"collected/pp{pp}/{index:03d}")
        for index, pair in enumerate(pairs[::every][: plan.collected])
    ]
    run_graph([*natives, *collected], folder, executor, lambda at: report(f"native renders, pp{pp}", at))
    runs = [read_collected(read_content(path_of(shard.name, folder), shard.key)) for shard in collected]
    candidates = candidates_for(plan.tries, runs, setting.steps)
    total = len(candidates) * len(natives)
    seen = [0]

    def advance(shards: Executor) -> Executor:
        return _Counted(shards, lambda: report(f"candidates, pp{pp}", Progress(_count(seen), 0, total)))

    searched = search(
        candidates, pairs, evaluator(setting, natives, folder, advance(executor)), round_size=plan.round_size
    )
    identity = _identity(setting, pairs[0], folder, executor)
    calibration = calibrate(f"{plan.name}-pp{pp}", identity, plan.calibration.prompts, plan.calibration.seeds, searched)
    write_calibration(calibration_path(folder, pp), calibration)
    return read_calibration(calibration_path(folder, pp))


def accept_topology(
    plan: Plan,
    topology: str,
    calibration: Calibration,
    folder: Path,
    executor: Executor,
    pool: RankPool,
    report: Report,
) -> Ended:
    """Freeze what calibration selected, try it on pairs that it has not seen, and write the profile with its evidence.

    A calibration that did not pass leaves a diagnostic profile, and nothing is accepted.
    """
    setting, pairs = plan.setting_of(topology), plan.acceptance.pairs
    identity = _identity(setting, pairs[0], folder, executor)
    profile_path = folder / "profiles" / f"{plan.name}-{topology}.json"
    profile_path.parent.mkdir(parents=True, exist_ok=True)
    selected = None if calibration.selected is None else calibration.selected.cache
    if selected is None:
        return Ended(topology, None, None, "no candidate was tried on all pairs", "")
    at = plan.calibration.pairs[: plan.timed]
    timing = _timed(setting, at, selected, None, folder / f"timing-calibration-{topology}.json", pool)
    try:
        profile = freeze(calibration, identity, timing)
        admit(profile, calibration, identity, pairs)
    except CampaignError as refusal:
        write_profile(profile_path, freeze(calibration, identity, timing, diagnostic=True))
        return Ended(topology, profile_path, None, str(refusal), "")
    natives = natives_of(setting, pairs, plan.round_size, f"acceptance/{topology}")
    cached = [
        rows_shard(setting, selected, None, native, folder, f"accepted/{topology}/{index:03d}", keep_frames=True)
        for index, native in enumerate(natives)
    ]
    run_graph([*natives, *cached], folder, executor, lambda done: report(f"acceptance, {topology}", done))
    rows = []
    for shard in cached:
        found = read_rows(read_content(path_of(shard.name, folder), shard.key))
        if not isinstance(found, list):
            return Ended(topology, None, None, found.reason, "")
        rows += found
    own = _timed(setting, pairs[: plan.timed], selected, None, folder / f"timing-acceptance-{topology}.json", pool)
    acceptance = accept(profile, calibration, identity, pairs, rows, own, revision_of("oracle", "wanref"))
    write_acceptance(acceptance_path(folder / "profiles", plan.name, topology), acceptance)
    acceptance = read_acceptance(acceptance_path(folder / "profiles", plan.name, topology))
    write_profile(profile_path, qualify(profile, acceptance) if acceptance.passed else profile)
    worth = _worth(plan, setting, calibration, acceptance, folder, pool)
    return Ended(topology, profile_path, acceptance, "", worth)


def calibration_path(folder: Path, pp: int) -> Path:
    return folder / f"calibration-pp{pp}.json"


def natives_of(setting: Setting, pairs: Sequence[Pair], size: int, name: str) -> list[Shard]:
    """Native shards of all pairs, `size` a shard."""
    return [
        native_shard(setting, pairs[start : start + size], f"{name}/{start // size:03d}")
        for start in range(0, len(pairs), size)
    ]


def time_on_rank(setting: Setting, pairs: Sequence[Pair], cache: CacheSpec | None, steps: int | None) -> RankTiming:
    """For ranks."""
    return time_requests(open_engine(setting), [request_of(setting, pair) for pair in pairs], cache, steps)


def _pp(topology: str) -> int:
    return parse_topology(topology).pp


def _identity(setting: Setting, pair: Pair, folder: Path, executor: Executor) -> ProfileIdentity:
    """Of a topology, from its own ranks: kept as a shard, since only an engine knows it."""
    shard = identity_shard(setting, pair, key_of("identity", setting.key()))
    run_graph([shard], folder, executor)
    return read_identity(read_content(path_of(shard.name, folder), shard.key))


def _timed(
    setting: Setting, pairs: Sequence[Pair], cache: CacheSpec | None, steps: int | None, path: Path, pool: RankPool
) -> Timing:
    if not path.exists():
        ranks = pool.run(setting.world_size, time_on_rank, setting, pairs, cache, steps, timeout=3600)
        write_record(path, TIMING, summarise(ranks).as_json())
    return timing_of(read_record(path, TIMING))


def _worth(
    plan: Plan, setting: Setting, calibration: Calibration, acceptance: Acceptance, folder: Path, pool: RankPool
) -> str:
    """Beside the control at the same latency, on calibration's pairs, where both were rendered."""
    points = []
    for row in calibration.table:
        candidate = candidate_of(row["candidate"])
        if candidate.method != CONTROL:
            continue
        path = folder / f"timing-control-{candidate.steps}-{setting.topology}.json"
        timing = _timed(setting, plan.calibration.pairs[:3], None, candidate.steps, path, pool)
        told = row["outcomes"]
        points.append(Point(timing.ratio, told["mean_ssim"]["value"], told["temporal_error"]["value"]))
    if not points:
        return "the control was not run"
    outcomes = calibration.outcomes()
    mine = Point(acceptance.timing.ratio, outcomes["mean_ssim"].value, outcomes["temporal_error"].value)
    verdict = judge_worth(mine, points) if acceptance.passed else "not qualified"
    body = {"cache": mine.as_json(), "controls": [point.as_json() for point in points], "verdict": verdict}
    write_record(folder / "profiles" / f"{plan.name}-{setting.topology}-worth.json", WORTH, body)
    return verdict


def _count(seen: list[int]) -> int:
    seen[0] += 1
    return seen[0]


@dataclass(frozen=True, slots=True)
class _Counted:
    """An executor that tells of each shard that is done."""

    executor: Executor
    tell: Callable[[], object]

    def run(self, shards: Sequence[Shard]):  # type: ignore[no-untyped-def]
        for done in self.executor.run(shards):
            self.tell()
            yield done
