"""A profile held against its evidence, and its evidence against renders that are made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from oracle.campaign.acceptance import Acceptance, acceptance_path, read_acceptance
from oracle.campaign.campaign import Report, natives_of
from oracle.campaign.content import read_content
from oracle.campaign.gates import Outcome, judge, quality_gates
from oracle.campaign.pair import Row
from oracle.campaign.plan import Plan
from oracle.campaign.shards import Executor, path_of, run_graph
from oracle.campaign.work import read_rows, rows_shard
from wanref.caching.profile import CacheProfile, read_profile
from wanref.caching.spec import CacheSpec


@dataclass(frozen=True, slots=True)
class Verified:
    """wrong: what does not hold, in sentences; none where the profile is what it says. outcomes: of the gates, from
    what was rendered now. alike: how many of `rendered` pairs came out byte for byte as they were accepted; on another
    kind of CPU they do not, and the gates are what counts."""

    profile: CacheProfile
    wrong: tuple[str, ...]
    outcomes: dict[str, Outcome]
    rendered: int
    alike: int


def verify_profile(
    plan: Plan, path: Path, folder: Path, executor: Executor, report: Report, first: int | None = None
) -> Verified:
    """Render the acceptance pairs again, natively and with the profile, and judge them. folder: for the renders.

    first: only so many rounds of pairs. Raises CampaignError, or ProfileError, for files that are none.
    """
    profile = read_profile(path)
    acceptance = read_acceptance(acceptance_path(path.parent, plan.name, profile.identity.topology))
    wrong = list(_of_files(plan, profile, acceptance))
    setting = plan.setting_of(profile.identity.topology)
    natives = natives_of(setting, plan.acceptance.pairs, plan.round_size, "native")[:first]
    cache = CacheSpec(profile.method, profile.options)
    cached = [
        rows_shard(setting, cache, None, native, folder, f"rows/{index:03d}") for index, native in enumerate(natives)
    ]
    run_graph([*natives, *cached], folder, executor, lambda done: report("renders", done))
    rows: list[Row] = []
    for shard in cached:
        found = read_rows(read_content(path_of(shard.name, folder), shard.key))
        if not isinstance(found, list):
            return Verified(profile, (*wrong, f"the cache was refused: {found.reason}"), {}, len(rows), 0)
        rows += found
    outcomes = judge(rows, [row.pair for row in rows], acceptance.timing)
    wrong += [
        f"{gate.name} is {outcomes[gate.name].value:.4f} in what was rendered now, and the limit is {gate.limit:g}"
        for gate in quality_gates()
        if profile.qualified and not outcomes[gate.name].passed
    ]
    return Verified(profile, tuple(wrong), outcomes, len(rows), _alike(rows, acceptance.rows))


def _of_files(plan: Plan, profile: CacheProfile, acceptance: Acceptance) -> list[str]:
    wrong = []
    theirs = replace(acceptance.profile, qualified=profile.qualified)
    for field in fields(CacheProfile):
        if getattr(theirs, field.name) != getattr(profile, field.name):
            wrong.append(f"its {field.name} is not that of its evidence")
    if profile.qualified and not acceptance.passed:
        failed = [name for name, outcome in acceptance.outcomes().items() if not outcome.passed]
        wrong.append(f"it says that it is qualified, and its evidence fails {', '.join(failed)}")
    if acceptance.pairs != plan.acceptance.pairs:
        wrong.append(f"its evidence is of {len(acceptance.pairs)} pairs that are not the plan's")
    return wrong


def _alike(now: Sequence[Row], accepted: Sequence[Row]) -> int:
    kept = {row.pair: (row.native, row.cached) for row in accepted}
    return sum(kept.get(row.pair) == (row.native, row.cached) for row in now)
