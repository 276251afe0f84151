"""Acceptance: a frozen profile on prompts and seeds that calibration never saw, and the evidence file of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from oracle.campaign.calibration import Calibration
from oracle.campaign.freeze import DIAGNOSTIC
from oracle.campaign.gates import Outcome, judge, passed
from oracle.campaign.metrics import SSIM_SETTINGS, TEMPORAL_FLOOR
from oracle.campaign.pair import Pair, Row, prompt_digest, row_of
from oracle.campaign.record import digest_of, read_record, write_record
from oracle.campaign.refusal import CampaignError
from oracle.campaign.timing import Timing, timing_of
from oracle.evidence.revision import Revision
from wanref.caching.profile import CacheProfile, ProfileIdentity

SCHEMA = "wanref.campaign.acceptance/1"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What was measured of one profile. calibration: digest of the record that let it in. revision: of the code."""

    profile: CacheProfile
    calibration: str
    pairs: tuple[Pair, ...]
    rows: tuple[Row, ...]
    timing: Timing
    revision: Revision

    def outcomes(self) -> dict[str, Outcome]:
        """Every gate, taken from the rows and the timing. Raises CampaignError for what is no evidence."""
        return judge(self.rows, self.pairs, self.timing)

    @property
    def passed(self) -> bool:
        """Whether all of the gates passed."""
        return passed(self.outcomes())

    def as_json(self) -> dict[str, Any]:
        profile = asdict(replace(self.profile, qualified=False))
        profile["identity"]["latent_shape"] = list(self.profile.identity.latent_shape)
        return {
            "profile": profile,
            "calibration": self.calibration,
            "gates": {name: outcome.as_json() for name, outcome in self.outcomes().items()},
            "passed": self.passed,
            "metrics": {"ssim": dict(SSIM_SETTINGS), "temporal_floor": TEMPORAL_FLOOR},
            "timing": self.timing.as_json(),
            "revision": asdict(self.revision),
            "pairs": [asdict(pair) for pair in self.pairs],
            "rows": [row.as_json() for row in self.rows],
        }


def admit(profile: CacheProfile, calibration: Calibration, found: ProfileIdentity, pairs: Sequence[Pair]) -> None:
    """Raise CampaignError unless this profile may be accepted on these pairs, in the run `found`.

    Calibration must have passed, by its rows; the profile be what it selected, and name it; the run be the profile's;
    no prompt and no seed be one of calibration's.
    """
    if not calibration.passed:
        raise CampaignError(f"accept: calibration {calibration.name!r} did not pass. There is nothing to accept.")
    selected = calibration.selected
    if selected is None or (profile.method, dict(profile.options)) != (selected.method, selected.as_json()["options"]):
        raise CampaignError(f"accept: the profile is not what calibration {calibration.name!r} selected.")
    if calibration.digest() not in profile.calibrated_on:
        raise CampaignError(f"accept: the profile does not name the evidence of calibration {calibration.name!r}.")
    if profile.calibrated_on.startswith(DIAGNOSTIC):
        raise CampaignError("accept: the profile is a diagnostic one: its calibration did not pass every gate.")
    differing = [
        f"{field.name}: the profile has {getattr(profile.identity, field.name)!r}, this run is {value!r}"
        for field in fields(ProfileIdentity)
        if (value := getattr(found, field.name)) != getattr(profile.identity, field.name)
    ]
    if differing:
        raise CampaignError(f"accept: the profile is for another run. {'; '.join(differing)}.")
    check_disjoint(calibration, pairs)


def check_disjoint(calibration: Calibration, pairs: Sequence[Pair]) -> None:
    """Raise CampaignError, with the first, for a prompt or a seed that calibration has used. Prompts go by digest."""
    seen = {prompt_digest(prompt) for prompt in calibration.prompts}
    for pair in pairs:
        if prompt_digest(pair.prompt) in seen:
            raise CampaignError(f"accept: prompt={pair.prompt!r} was calibrated on. Give prompts of their own.")
        if pair.seed in calibration.seeds:
            raise CampaignError(f"accept: seed={pair.seed} was calibrated on. Give seeds of their own.")


def accept(
    profile: CacheProfile,
    calibration: Calibration,
    found: ProfileIdentity,
    pairs: Sequence[Pair],
    rows: Sequence[Row],
    timing: Timing,
    revision: Revision,
) -> Acceptance:
    """What came of it, once admitted: `passed` says whether it met the gates. Raises CampaignError for no evidence."""
    admit(profile, calibration, found, pairs)
    if timing.topology != found.topology:
        raise CampaignError(f"accept: the timing is of {timing.topology}, not of {found.topology}.")
    acceptance = Acceptance(profile, calibration.digest(), tuple(pairs), tuple(rows), timing, revision)
    acceptance.outcomes()
    return acceptance


def qualify(profile: CacheProfile, acceptance: Acceptance) -> CacheProfile:
    """The profile as one that a campaign passed with. Raises CampaignError unless this acceptance is its and passed."""
    if replace(acceptance.profile, qualified=profile.qualified) != profile:
        raise CampaignError("qualify: the acceptance is of another profile.")
    if not acceptance.passed:
        failed = [name for name, outcome in acceptance.outcomes().items() if not outcome.passed]
        raise CampaignError(f"qualify: the acceptance did not pass {', '.join(failed)}.")
    return replace(profile, qualified=True)


def acceptance_path(folder: Path, name: str, topology: str) -> Path:
    """Where a profile's evidence lies, beside it."""
    return folder / f"{name}-{topology}-acceptance.json"


def write_acceptance(path: Path, acceptance: Acceptance) -> None:
    """Write the evidence whole."""
    write_record(path, SCHEMA, acceptance.as_json())


def read_acceptance(path: Path) -> Acceptance:
    """Raises CampaignError for a file that is none, or whose gates do not follow from its rows and timing."""
    body = read_record(path, SCHEMA)
    try:
        profile = dict(body["profile"])
        identity = dict(profile["identity"])
        profile["identity"] = ProfileIdentity(**{**identity, "latent_shape": tuple(identity["latent_shape"])})
        acceptance = Acceptance(
            profile=CacheProfile(**profile),
            calibration=body["calibration"],
            pairs=tuple(Pair(**pair) for pair in body["pairs"]),
            rows=tuple(row_of(row) for row in body["rows"]),
            timing=timing_of(body["timing"]),
            revision=Revision(**body["revision"]),
        )
    except (KeyError, TypeError) as error:
        raise CampaignError(f"{path.name}: {type(error).__name__}: {error}.") from error
    if digest_of(acceptance.as_json()) != digest_of(body):
        raise CampaignError(f"{path.name}: its gates do not follow from its rows and its timing.")
    return acceptance
