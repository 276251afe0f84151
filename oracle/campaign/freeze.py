"""From a calibration to a profile: what the selected candidate is, for which run it holds, and on what evidence."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from oracle.campaign.calibration import Calibration
from oracle.campaign.gates import GATES, Outcome, check_timing
from oracle.campaign.refusal import CampaignError
from oracle.campaign.timing import Timing
from wanref.caching.profile import CacheProfile, ProfileIdentity
from wanref.plan import latents_shape
from wanref.resolver import resolve
from wanref.schedule import build_schedule, make_solver
from wanref.topology import parse_topology

if TYPE_CHECKING:
    from wanref.pipeline import WanReference
    from wanref.request import Request

DIAGNOSTIC = "DIAGNOSTIC"
"""What the `calibrated_on` of a profile begins with whose calibration did not pass."""


def identity_for(engine: WanReference, request: Request) -> ProfileIdentity:
    """The identity of this request on this engine, without running it. Raises ValueError for one that it refuses."""
    resolved = resolve(request, engine.defaults, engine.checkpoint)
    schedule = build_schedule(resolved, engine.checkpoint, make_solver(resolved, engine.checkpoint, engine.device))
    return ProfileIdentity(
        checkpoint=engine.checkpoint.identity(),
        device=engine.device.type,
        dtype=str(engine.dtype).removeprefix("torch."),
        topology=str(engine.topology),
        latent_shape=latents_shape(resolved, engine.checkpoint),
        schedule=schedule.digest(),
    )


def freeze(
    calibration: Calibration, identity: ProfileIdentity, timing: Timing | None, diagnostic: bool = False
) -> CacheProfile:
    """The profile of the selected candidate for `identity`, a run of the calibrated PP; not qualified until accepted.

    timing: of that candidate in that topology. diagnostic: write it even though a gate was not met, and say so in it.
    Raises CampaignError otherwise, and for an identity that was not calibrated.
    """
    check_same_run(calibration, identity)
    if calibration.selected is None:
        raise CampaignError(f"freeze: calibration {calibration.name!r} has no candidate that was tried on all pairs.")
    failures = _failures(calibration, identity, timing)
    if failures and not diagnostic:
        raise CampaignError(
            f"freeze: calibration {calibration.name!r} did not pass: {'; '.join(failures)}. "
            "Give --diagnostic for a profile that says so in itself."
        )
    evidence = f"{calibration.name}, {len(calibration.pairs)} pairs, evidence {calibration.digest()}"
    if failures:
        evidence = f"{DIAGNOSTIC}: calibration did not pass ({'; '.join(failures)}): {evidence}"
    options = json.loads(json.dumps(calibration.selected.options))
    return CacheProfile(calibration.selected.method, options, identity, evidence, qualified=False)


def check_same_run(calibration: Calibration, identity: ProfileIdentity) -> None:
    """Raise CampaignError, with both values, unless `identity` is the calibrated one, but for its CFG.

    At equal PP cached runs are the same bit for bit across CFG, so quality holds for both; PP makes other stages.
    """
    mine, theirs = calibration.identity, identity
    if parse_topology(mine.topology).pp == parse_topology(theirs.topology).pp:
        mine = replace(mine, topology=theirs.topology)
    differing = [
        f"{field.name}: calibrated {getattr(mine, field.name)!r}, asked {getattr(theirs, field.name)!r}"
        for field in fields(ProfileIdentity)
        if getattr(mine, field.name) != getattr(theirs, field.name)
    ]
    if differing:
        raise CampaignError(f"calibration {calibration.name!r} is for another run. {'; '.join(differing)}.")


def _failures(calibration: Calibration, identity: ProfileIdentity, timing: Timing | None) -> list[str]:
    """Which gates of calibration were not met, in words."""
    try:
        outcomes: dict[str, Outcome] = calibration.outcomes()
    except CampaignError as refusal:
        return [str(refusal)]
    failures = [f"{name} {outcome.value:.4g}" for name, outcome in outcomes.items() if not outcome.passed]
    if timing is None:
        return [*failures, "latency was not measured"]
    check_timing(timing)
    if timing.topology != identity.topology:
        raise CampaignError(f"freeze: the timing is of {timing.topology}, not of {identity.topology}.")
    (latency,) = [gate for gate in GATES if gate.of == "latency"]
    if not latency.passes(timing.high):
        failures.append(f"latency {timing.high:.4g}")
    return failures
