"""Freezing and accepting: a profile passes by its evidence alone, and what could be mistaken for a pass is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
from oracle.campaign.candidate import Candidate
from oracle.campaign.freeze import freeze, identity_for
from oracle.campaign.pair import Pair, Row, pairs_of
from oracle.campaign.record import digest_of
from oracle.campaign.refusal import CampaignError
from oracle.campaign.search import search
from oracle.evidence.revision import Revision
from suites.campaigned import IDENTITY, PAIRS, calls_of, row_of_metrics, rows_of, timing_at
from suites.support import defaults, load_engine
from wanref.caching.error import CacheError
from wanref.caching.profile import CacheProfile, ProfileIdentity, read_profile, write_profile
from wanref.caching.spec import CacheSpec
from wanref.request import Request

pytestmark = pytest.mark.cpu

CANDIDATE = Candidate("every other", "fixed", {"steps": "*.*=1+3", "reuse": "linear"})
PROMPTS, SEEDS = ("a red square", "a blue circle"), (17, 29)
UNSEEN = pairs_of(["a green cross"], [101, 103])
REVISION = Revision("oracle", "0.1", "a" * 40, False)


def calibration_with(**options: Any) -> Calibration:
    """Of one candidate, on rows with these metrics."""
    searched = search([CANDIDATE], PAIRS, lambda work: [rows_of(item.pairs, **options) for item in work], drop=False)
    return calibrate("micro", IDENTITY, PROMPTS, SEEDS, searched)


@pytest.fixture
def calibration() -> Calibration:
    return calibration_with()


@pytest.fixture
def profile(calibration: Calibration) -> CacheProfile:
    return freeze(calibration, IDENTITY, timing_at())


def accepted(
    profile: CacheProfile, calibration: Calibration, rows: list[Row] | None = None, high: float = 0.5, **options: Any
) -> Acceptance:
    rows = rows_of(UNSEEN) if rows is None else rows
    options = {"pairs": UNSEEN, "found": IDENTITY, "timing": timing_at(high), **options}
    return accept(profile, calibration, rows=rows, revision=REVISION, **options)


# Calibrating.


def test_a_calibration_comes_back_from_its_file_and_says_the_same_every_time(
    calibration: Calibration, tmp_path: Path
) -> None:
    for name in ("one.json", "two.json"):
        write_calibration(tmp_path / name, calibration_with())
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    read = read_calibration(tmp_path / "one.json")
    assert read == calibration
    assert read.digest() == calibration.digest()
    assert read.passed


def test_what_passed_is_read_from_the_rows(calibration: Calibration, tmp_path: Path) -> None:
    failed = calibration_with(temporal=0.11)
    assert failed.selected == CANDIDATE, "what came closest is kept"
    assert not failed.passed
    write_calibration(tmp_path / "c.json", failed)
    body = json.loads((tmp_path / "c.json").read_text())
    assert body["passed"] is False
    # A record whose boolean was turned, and whose digest was made to fit.
    del body["schema"], body["digest"]
    body["passed"] = True
    schema = "wanref.campaign.calibration/1"
    (tmp_path / "c.json").write_text(json.dumps({"schema": schema, "digest": digest_of(body), **body}))
    with pytest.raises(CampaignError, match="what it says does not follow from its rows"):
        read_calibration(tmp_path / "c.json")


def test_a_calibration_that_lacks_a_pair_has_not_passed(calibration: Calibration) -> None:
    assert calibration.passed
    assert not replace(calibration, rows=calibration.rows[:-1]).passed
    assert not replace(calibration, selected=None).passed


# Freezing.


def test_a_profile_says_what_it_holds_for_and_on_which_evidence(
    profile: CacheProfile, calibration: Calibration, tmp_path: Path
) -> None:
    assert (profile.method, profile.options, profile.identity) == ("fixed", CANDIDATE.options, IDENTITY)
    assert calibration.digest() in profile.calibrated_on
    assert not profile.qualified, "not before it is accepted"
    write_profile(tmp_path / "p.json", profile)
    assert read_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("options", "high", "reason"),
    [
        ({"ssim": 0.94}, 0.5, "mean_ssim 0.94"),
        ({"temporal": 0.11}, 0.5, "temporal_error 0.11"),
        ({}, 0.91, "latency 0.91"),
        ({}, None, "latency was not measured"),
    ],
)
def test_what_did_not_pass_is_frozen_only_as_a_diagnostic_that_says_so(
    options: dict[str, float], high: float | None, reason: str
) -> None:
    calibration, timing = calibration_with(**options), None if high is None else timing_at(high)
    with pytest.raises(CampaignError, match=f"did not pass: {reason}.* Give --diagnostic"):
        freeze(calibration, IDENTITY, timing)
    profile = freeze(calibration, IDENTITY, timing, diagnostic=True)
    assert profile.calibrated_on.startswith(f"DIAGNOSTIC: calibration did not pass ({reason}")
    assert not profile.qualified
    with pytest.raises(CampaignError, match=r"did not pass|is a diagnostic one"):
        accepted(profile, calibration)


def test_calibration_holds_across_cfg_and_for_no_other_run(calibration: Calibration) -> None:
    wider = replace(IDENTITY, topology="pp1cfg2")
    assert freeze(calibration, wider, timing_at(topology="pp1cfg2")).identity == wider
    with pytest.raises(CampaignError, match="the timing is of pp1cfg1, not of pp1cfg2"):
        freeze(calibration, wider, timing_at())
    for field, value in (
        ("topology", "pp2cfg1"),
        ("checkpoint", "d" * 64),
        ("device", "cuda"),
        ("dtype", "bfloat16"),
        ("latent_shape", (1, 4, 2, 8, 8)),
        ("schedule", "6" * 64),
    ):
        with pytest.raises(CampaignError, match=f"is for another run. {field}: calibrated .*, asked "):
            freeze(calibration, replace(IDENTITY, **{field: value}), timing_at())


def test_a_timing_with_recording_on_freezes_nothing(calibration: Calibration) -> None:
    with pytest.raises(CampaignError, match="recording=True"):
        freeze(calibration, IDENTITY, timing_at(recording=True), diagnostic=True)


# Accepting.


def test_a_profile_that_meets_every_gate_is_qualified(
    profile: CacheProfile, calibration: Calibration, tmp_path: Path
) -> None:
    acceptance = accepted(profile, calibration)
    assert acceptance.passed
    path = acceptance_path(tmp_path, "micro", "pp1cfg1")
    assert path.name == "micro-pp1cfg1-acceptance.json"
    write_acceptance(path, acceptance)
    assert read_acceptance(path) == acceptance
    written = json.loads(path.read_text())
    assert written["gates"] == {
        "mean_ssim": {"value": 0.99, "limit": 0.95, "passed": True},
        "worst_ssim": {"value": 0.99, "limit": 0.90, "passed": True},
        "temporal_error": {"value": 0.02, "limit": 0.10, "passed": True},
        "latency": {"value": 0.5, "limit": 0.90, "passed": True},
    }
    assert [row["pair"] for row in written["rows"]] == [{"prompt": p.prompt, "seed": p.seed} for p in UNSEEN]
    qualified = qualify(profile, acceptance)
    assert qualified == replace(profile, qualified=True)
    with pytest.raises(CampaignError, match="of another profile"):
        qualify(replace(profile, options={"steps": "*.*=2"}), acceptance)


@pytest.mark.parametrize(
    ("metrics", "high", "failed"),
    [({"ssim": 0.94}, 0.5, "mean_ssim"), ({"temporal": 0.2}, 0.5, "temporal_error"), ({}, 0.95, "latency")],
)
def test_a_profile_that_fails_one_gate_is_not(
    profile: CacheProfile, calibration: Calibration, metrics: dict[str, float], high: float, failed: str, tmp_path: Path
) -> None:
    acceptance = accepted(profile, calibration, rows_of(UNSEEN, **metrics), high)
    assert not acceptance.passed
    with pytest.raises(CampaignError, match=f"did not pass {failed}"):
        qualify(profile, acceptance)
    write_acceptance(tmp_path / "a.json", acceptance)
    assert json.loads((tmp_path / "a.json").read_text())["gates"][failed]["passed"] is False


def test_a_stored_pass_is_not_believed(profile: CacheProfile, calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_acceptance(path, accepted(profile, calibration, rows_of(UNSEEN, temporal=0.2)))
    body = json.loads(path.read_text())
    schema = body.pop("schema")
    del body["digest"]
    body["passed"] = True
    body["gates"]["temporal_error"]["passed"] = True
    path.write_text(json.dumps({"schema": schema, "digest": digest_of(body), **body}))
    with pytest.raises(CampaignError, match="its gates do not follow from its rows"):
        read_acceptance(path)


def test_acceptance_starts_from_a_calibration_that_passed(profile: CacheProfile) -> None:
    failed = calibration_with(ssim=0.94)
    named = replace(profile, calibrated_on=f"micro, {failed.digest()}")
    with pytest.raises(CampaignError, match="calibration 'micro' did not pass"):
        accepted(named, failed)


def test_a_profile_that_calibration_did_not_select_is_refused(profile: CacheProfile, calibration: Calibration) -> None:
    with pytest.raises(CampaignError, match="is not what calibration 'micro' selected"):
        accepted(replace(profile, options={"steps": "*.*=1"}), calibration)
    with pytest.raises(CampaignError, match="does not name the evidence"):
        accepted(replace(profile, calibrated_on="elsewhere"), calibration)


@pytest.mark.parametrize(
    ("pairs", "match"),
    [
        ([Pair("a red square", 101)], "prompt='a red square' was calibrated on"),
        ([Pair("A  Red square ", 101)], "was calibrated on"),
        ([Pair("a green cross", 101), Pair("a green cross", 29)], "seed=29 was calibrated on"),
    ],
)
def test_what_calibration_has_seen_is_refused(
    profile: CacheProfile, calibration: Calibration, pairs: list[Pair], match: str
) -> None:
    with pytest.raises(CampaignError, match=match):
        accepted(profile, calibration, rows_of(pairs), pairs=pairs)


def test_a_profile_of_another_identity_is_refused(profile: CacheProfile, calibration: Calibration) -> None:
    for field, value in (("topology", "pp1cfg2"), ("schedule", "6" * 64)):
        found: ProfileIdentity = replace(IDENTITY, **{field: value})
        with pytest.raises(CampaignError, match=f"is for another run. {field}: the profile has"):
            admit(profile, calibration, found, UNSEEN)
    with pytest.raises(CampaignError, match="the timing is of pp2cfg1, not of pp1cfg1"):
        accepted(profile, calibration, timing=timing_at(topology="pp2cfg1"))


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (rows_of(UNSEEN[:1]), "1 of 2 pairs are missing"),
        (rows_of(UNSEEN, calls=(calls_of(10, 0),)), "no hit"),
        ([row_of_metrics(UNSEEN[0]), row_of_metrics(UNSEEN[1], ssim=float("nan"))], "is not finite"),
    ],
)
def test_what_is_no_evidence_is_refused(
    profile: CacheProfile, calibration: Calibration, rows: list[Row], match: str
) -> None:
    with pytest.raises(CampaignError, match=match):
        accepted(profile, calibration, rows)


def test_a_timing_with_recording_on_is_refused(profile: CacheProfile, calibration: Calibration) -> None:
    with pytest.raises(CampaignError, match="recording=True"):
        accepted(profile, calibration, timing=timing_at(recording=True))


# On an engine.


def test_an_identity_is_the_one_that_the_engine_checks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    engine = load_engine(tiny(), defaults=defaults())
    request = Request(prompt="a red circle", seed=1, output_type="latent")
    identity = identity_for(engine, request)
    for steps, fits in ((4, True), (5, False)):
        engine.mount(
            CacheSpec("fixed", CANDIDATE.options, CacheProfile("fixed", CANDIDATE.options, identity, "", True))
        )
        try:
            if fits:
                engine(request)
            else:
                with pytest.raises(CacheError, match="calibrated for another run"):
                    engine(replace(request, steps=steps))
        finally:
            engine.unmount()
