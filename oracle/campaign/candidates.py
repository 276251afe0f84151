"""What a campaign tries at one PP, from what was collected: the control, fixed schedules, TeaCache, Cache-DiT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from oracle.campaign.candidate import Candidate, controls, fixed_candidate
from oracle.campaign.collect import Collected
from oracle.campaign.fit import fit_all, teacache_options
from oracle.campaign.plan import Tries
from oracle.campaign.refusal import CampaignError
from oracle.campaign.reuse_error import reuse_errors
from oracle.campaign.schedule_search import ReuseSchedule, search_schedules
from wanref.caching.residual import Reuse
from wanref.caching.teacache import Signal
from wanref.topology import BRANCHES, Branch


def candidates_for(tries: Tries, runs: Sequence[Collected], steps: int) -> tuple[Candidate, ...]:
    """Each of a name of its own. Equal schedules are tried once. Raises CampaignError for a rule that is not known."""
    found: dict[tuple[str, str], Candidate] = {}
    for candidate in (*_fixed(tries, runs), *_teacache(tries, runs), *_cache_dit(tries, runs)):
        found.setdefault((candidate.method, repr(sorted(candidate.options.items()))), candidate)
    return (*found.values(), *(controls(steps) if tries.control else ()))


def _fixed(tries: Tries, runs: Sequence[Collected]) -> Iterator[Candidate]:
    """Both branches of a stage at the same steps: what changes between steps is mostly common to both, and cancels in
    what guidance makes of them. Each stage has its own steps, of one number: a chain is as slow as its slowest."""
    stages = range(len(runs[0].tracks))
    guided = any(step.guided for step in runs[0].schedule)
    branches: tuple[Branch, ...] = BRANCHES if guided else ("cond",)
    for reuse in tries.reuse:
        if reuse not in get_args(Reuse):
            raise CampaignError(f"tries: reuse={reuse!r} is not accepted: give {', '.join(get_args(Reuse))}.")
        errors = [reuse_errors(runs, stage, "both") for stage in stages]
        for power in tries.weights:
            searched = [search_schedules(each, reuse, each.weights**power) for each in errors]  # type: ignore[arg-type]
            for computed in tries.computed:
                if not all(computed in each for each in searched):
                    continue
                schedules: dict[tuple[int, Branch], ReuseSchedule] = {
                    (stage, branch): searched[stage][computed] for stage in stages for branch in branches
                }
                name = f"{reuse}, {computed} computed, |d sigma|^{power:g}"
                yield fixed_candidate(name, schedules, reuse)  # type: ignore[arg-type]


def _teacache(tries: Tries, runs: Sequence[Collected]) -> Iterator[Candidate]:
    for signal in tries.signals if tries.teacache else ():
        if signal not in get_args(Signal):
            raise CampaignError(f"tries: signal={signal!r} is not accepted: give {', '.join(get_args(Signal))}.")
        fits = fit_all(runs, signal)  # type: ignore[arg-type]
        for reuse in tries.reuse:
            for threshold in tries.teacache:
                options = teacache_options(fits, threshold, first=2, last=1, reuse=reuse)
                yield Candidate(f"teacache {signal} {threshold:g}, {reuse}", "teacache", options)


def _cache_dit(tries: Tries, runs: Sequence[Collected]) -> Iterator[Candidate]:
    """The low-noise expert by the same rule: its own defaults are for another model."""
    both = len({step.expert for step in runs[0].schedule}) > 1
    for order in tries.taylorseer:
        for threshold in tries.cache_dit:
            options = {"threshold": threshold, "max_warmup_steps": 4, "taylorseer_order": order}
            low = {f"low_{name}": value for name, value in options.items()} | {"low_max_cached_steps": -1}
            name = f"cache-dit {threshold:g}" + (f", TaylorSeer {order}" if order else "")
            yield Candidate(name, "cache-dit", {**options, **(low if both else {})})
