"""A whole campaign from its file: a small one end to end, the refusal to accept, resuming, and verifying."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from oracle.campaign.acceptance import read_acceptance
from oracle.campaign.calibration import read_calibration
from oracle.campaign.campaign import TIMING
from oracle.campaign.candidates import candidates_for
from oracle.campaign.content import read_content
from oracle.campaign.plan import Tries, read_plan
from oracle.campaign.record import write_record
from oracle.campaign.refusal import CampaignError
from oracle.campaign.timing import Timing
from oracle.campaign.work import read_collected
from oracle.report import frontier as frontier_module
from oracle.report.frontier import Dot, frontier
from suites.cpu.command import invoke
from wanref.caching.profile import read_profile, write_profile
from wanref.checkpoint import open_checkpoint

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
CAMPAIGNS = ROOT / "fixtures" / "campaigns"
SMALL = CAMPAIGNS / "small.toml"


def edited(folder: Path, old: str, new: str) -> Path:
    """The small plan with one change, in another folder."""
    text = SMALL.read_text()
    assert old in text
    path = folder / "plan.toml"
    path.write_text(text.replace(old, new).replace('"../', f'"{CAMPAIGNS.parent}/'))
    return path


Small = tuple[Path, int, str, Path]
"""A campaign's folder, its exit code, what it printed, and its file."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The small campaign with one step of twelve reused, which passes on pairs that it has not seen."""
    folder = tmp_path_factory.mktemp("small")
    plan = edited(tmp_path_factory.mktemp("plan"), "computed = [6, 7, 8, 9, 10]", "computed = [8, 11]")
    for what in ("calibration", "acceptance"):
        # A fake, since what a busy machine measures must not decide what is tested here: three pairs, each .7.
        fake = Timing(1.0, 0.7, 0.7, 0.69, 0.71, 0.66, 0.68, 3, "pp1cfg1", 1, False)
        write_record(folder / f"timing-{what}-pp1cfg1.json", TIMING, fake.as_json())
    done = invoke("campaign", "run", plan, folder, COLUMNS="140")
    return folder, done.exit_code, done.stdout, plan


# The file.


@pytest.mark.parametrize("name", ["micro", "small", "wan2.1-t2v-1.3b"])
def test_the_committed_campaigns_are_read_and_share_no_prompt(name: str) -> None:
    plan = read_plan(CAMPAIGNS / f"{name}.toml")
    assert not {*plan.calibration.prompts} & {*plan.acceptance.prompts}
    assert not {*plan.calibration.seeds} & {*plan.acceptance.seeds}
    if name != "small":
        assert (len(plan.calibration.pairs), len(plan.acceptance.pairs)) == (48, 36)
        assert plan.topologies == ("pp1cfg1", "pp1cfg2", "pp2cfg1", "pp2cfg2")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[setting]", "depth = 3\n[setting]", "unexpected keyword argument 'depth'"),
        ("steps = 12", "stride = 12", "unexpected keyword argument 'stride'"),
        ('topologies = ["pp1cfg1"]', "topologies = []", "topologies is empty"),
        ('topologies = ["pp1cfg1"]', 'topologies = ["pp1"]', "pp1"),
        ("round_size = 3", "round_size = 2", "round_size=2 does not divide"),
        ("../prompts/acceptance.json", "../prompts/calibration.json", "is in calibration and in acceptance"),
        ("../prompts/acceptance.json", "../prompts/lost.json", "acceptance: FileNotFoundError"),
        ("seeds = [101]", "seed = 101", "give prompts (a file), seeds"),
    ],
)
def test_a_file_that_is_no_campaign_is_refused_by_name(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(CampaignError) as refused:
        read_plan(edited(tmp_path, old, new))
    assert says in str(refused.value)
    done = invoke("campaign", "run", tmp_path / "plan.toml", tmp_path / "out")
    assert done.exit_code == 2
    assert not (tmp_path / "out").exists()


# What is tried.


def test_equal_schedules_are_tried_once_and_every_candidate_has_a_name(small: Small) -> None:
    files = sorted((small[0] / "collected" / "pp1").glob("*.safetensors"))
    runs = [read_collected(read_content(file)) for file in files]
    tries = Tries(computed=(6, 8), weights=(1.0, 1.0), teacache=(0.1,), cache_dit=(0.2,))
    found = candidates_for(tries, runs, 12)
    assert len({candidate.name for candidate in found}) == len(found)
    assert {candidate.method for candidate in found} == {"fixed", "teacache", "cache-dit", "control"}
    assert sum(candidate.method == "fixed" for candidate in found) == 4
    with pytest.raises(CampaignError, match="reuse='cubic' is not accepted"):
        candidates_for(replace(tries, reuse=("cubic",)), runs, 12)
    with pytest.raises(CampaignError, match="signal='hidden' is not accepted"):
        candidates_for(replace(tries, signals=("hidden",)), runs, 12)


# End to end.


def test_a_small_campaign_calibrates_freezes_accepts_and_says_what_came_of_it(small: Small) -> None:
    folder, code, told, _ = small
    calibration = read_calibration(folder / "calibration-pp1.json")
    assert calibration.passed
    assert {row["candidate"]["method"] for row in calibration.table} == {"fixed", "control"}
    profile = read_profile(folder / "profiles" / "small-pp1cfg1.json")
    evidence = folder / "profiles" / "small-pp1cfg1-acceptance.json"
    acceptance = read_acceptance(evidence)
    gates = json.loads(evidence.read_text())["gates"]
    assert set(gates) == {"mean_ssim", "worst_ssim", "temporal_error", "latency"}
    assert gates == {name: outcome.as_json() for name, outcome in acceptance.outcomes().items()}
    assert (profile.qualified, acceptance.passed, code) == (True, True, 0)
    assert (folder / "profiles" / "small-pp1cfg1-worth.json").is_file()
    assert told.count("passed") + told.count("failed") >= 4


def test_a_campaign_that_is_run_again_does_nothing_twice_and_one_that_lost_a_file_makes_it_again(
    small: Small, tmp_path: Path
) -> None:
    shutil.copytree(small[0], tmp_path / "again")
    lost = sorted((tmp_path / "again" / "rows").rglob("*.safetensors"))[0]
    content, kept = lost.read_bytes(), (tmp_path / "again" / "calibration-pp1.json").read_bytes()
    lost.unlink()
    (tmp_path / "again" / "calibration-pp1.json").unlink()
    others = {path: path.stat().st_mtime_ns for path in (tmp_path / "again").rglob("*.safetensors")}
    done = invoke("campaign", "run", small[3], tmp_path / "again", COLUMNS="140")
    assert done.exit_code == small[1], done.output
    assert lost.read_bytes() == content
    assert (tmp_path / "again" / "calibration-pp1.json").read_bytes() == kept
    assert {path: path.stat().st_mtime_ns for path in others} == others


def test_where_calibration_failed_nothing_is_accepted_and_the_profile_says_so_in_itself(tmp_path: Path) -> None:
    plan = edited(tmp_path, "computed = [6, 7, 8, 9, 10]", "computed = [2]\ncontrol = false")
    done = invoke("campaign", "run", plan, tmp_path / "out", COLUMNS="140")
    assert done.exit_code == 1, done.output
    assert "not accepted" in done.stdout
    assert not read_calibration(tmp_path / "out" / "calibration-pp1.json").passed
    assert not list((tmp_path / "out" / "profiles").glob("*-acceptance.json"))
    profile = read_profile(tmp_path / "out" / "profiles" / "small-pp1cfg1.json")
    assert profile.calibrated_on.startswith("DIAGNOSTIC: calibration did not pass")
    assert not profile.qualified
    # What was selected as the closest is timed, for real.
    timing = json.loads((tmp_path / "out" / "timing-calibration-pp1cfg1.json").read_text())
    assert 0 < timing["ratio"] < 1.5
    assert timing["samples"] == 3


def test_a_profile_is_verified_by_renders_and_one_that_was_edited_is_not(small: Small, tmp_path: Path) -> None:
    shutil.copytree(small[0] / "profiles", tmp_path / "profiles")
    path = tmp_path / "profiles" / "small-pp1cfg1.json"
    done = invoke("campaign", "verify", small[3], path, COLUMNS="140")
    assert "3 of 3 pairs are byte for byte as they were accepted" in done.stdout
    assert done.exit_code == (0 if read_profile(path).qualified else 1)
    profile = read_profile(path)
    write_profile(path, replace(profile, options={**profile.options, "reuse": "plain"}))
    wrong = invoke("campaign", "verify", small[3], path, COLUMNS="140")
    assert wrong.exit_code == 1
    assert "its options is not that of its evidence" in wrong.stdout
    assert "0 of 3 pairs" in wrong.stdout


# The page.


def test_the_page_has_the_gates_every_candidate_every_video_and_all_of_it_in_one_file(
    small: Small, tmp_path: Path
) -> None:
    folder = small[0]
    done = invoke("campaign", "report", small[3], folder, "--output", tmp_path / "page.html", COLUMNS="140")
    assert done.exit_code == 0, done.output
    page = html.unescape((tmp_path / "page.html").read_text())
    calibration = read_calibration(folder / "calibration-pp1.json")
    for row in calibration.table:
        assert row["candidate"]["name"] in page
    assert calibration.digest() in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    acceptance = read_acceptance(folder / "profiles" / "small-pp1cfg1-acceptance.json")
    for row in acceptance.rows:
        assert f"<td>{row.metrics.ssim:.4f}</td><td>{row.metrics.temporal_error:.3f}</td>" in page
    assert page.count("data:video/mp4;base64,") == 2 * 3
    assert f"{acceptance.outcomes()['latency'].value:.4f}" in page


def test_a_folder_in_which_nothing_was_calibrated_has_no_page(tmp_path: Path) -> None:
    done = invoke("campaign", "report", SMALL, tmp_path, COLUMNS="140")
    assert done.exit_code == 2
    assert "nothing was calibrated there at PP 1" in " ".join(done.stderr.replace("│", " ").split())


def dots(svg: str) -> list[tuple[str, float, float]]:
    found = re.findall(r'<circle class="dot ([\w ]+)" cx="([\d.]+)" cy="([\d.]+)"', svg)
    return [(kind, float(x), float(y)) for kind, x, y in found]


def test_less_work_is_further_left_less_error_further_down_and_the_selected_one_is_on_top() -> None:
    given = [Dot(0.3, 0.05, "selected", "a"), Dot(0.5, 0.02, "passed", "b"), Dot(0.2, 0.2, "failed", "c")]
    drawn = dots(frontier("work", "error", given, 0.1))
    assert [kind for kind, _, _ in drawn] == ["passed", "failed", "selected"]
    places = {kind: (x, y) for kind, x, y in drawn}
    assert places["failed"][0] < places["selected"][0] < places["passed"][0]
    assert places["failed"][1] < places["selected"][1] < places["passed"][1]


def test_what_is_far_above_the_gate_is_drawn_at_the_top_and_says_where_it_is() -> None:
    svg = frontier("work", "error", [Dot(0.1, 9.0, "failed", "temporal error 9")], 0.1)
    ((_, _, y),) = dots(svg)
    assert y == frontier_module.TOP
    assert "temporal error 9" in svg
    assert "gate 0.1" in svg


def test_status_says_what_is_there_and_what_was_run_again(small: Small, tmp_path: Path) -> None:
    done = invoke("campaign", "status", small[0])
    assert done.exit_code == 0, done.output
    assert re.search(r"rows +\d+ shards", done.stdout)
    assert "calibration-pp1.json" in done.stdout
    empty = invoke("campaign", "status", tmp_path)
    assert empty.exit_code == 2
    assert "no shard of a campaign is in it" in " ".join(empty.stderr.replace("│", " ").split())


# What is committed.


@pytest.mark.parametrize("topology", ["pp1cfg1", "pp1cfg2", "pp2cfg1", "pp2cfg2"])
def test_a_committed_profile_is_qualified_by_evidence_that_names_its_calibration_and_its_gates_follow_from_its_rows(
    topology: str,
) -> None:
    plan, profiles = read_plan(CAMPAIGNS / "micro.toml"), ROOT / "fixtures" / "profiles"
    profile = read_profile(profiles / f"micro-{topology}.json")
    acceptance = read_acceptance(profiles / f"micro-{topology}-acceptance.json")
    calibration = read_calibration(profiles / f"micro-{topology[:3]}-calibration.json")
    assert profile.qualified
    assert replace(acceptance.profile, qualified=True) == profile
    assert profile.identity.topology == topology
    assert profile.identity.checkpoint == open_checkpoint(ROOT / "fixtures" / "micro").identity()
    assert calibration.passed
    assert calibration.digest() in profile.calibrated_on
    assert calibration.digest() == acceptance.calibration
    assert calibration.pairs == plan.calibration.pairs
    assert acceptance.pairs == plan.acceptance.pairs
    assert len(acceptance.rows) == 36
    assert {name: outcome.passed for name, outcome in acceptance.outcomes().items()} == dict.fromkeys(
        ("mean_ssim", "worst_ssim", "temporal_error", "latency"), True
    )
    assert acceptance.revision.dirty is False
    told = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {topology} | 1"))
    for name, places in (("mean_ssim", 4), ("worst_ssim", 4), ("temporal_error", 4), ("latency", 3)):
        assert f" {acceptance.outcomes()[name].value:.{places}f}"[1:].lstrip("0") in told, name


def test_a_committed_profile_renders_again_what_its_evidence_says(tmp_path: Path) -> None:
    """One round of pairs. On another kind of CPU the bytes are others, and the gates must hold all the same."""
    profile = ROOT / "fixtures" / "profiles" / "micro-pp1cfg1.json"
    done = invoke("campaign", "verify", CAMPAIGNS / "micro.toml", profile, "--first", "1", COLUMNS="140")
    assert done.exit_code == 0, done.output
    assert done.stdout.count(": passed") == 4
    assert re.search(r"\d of 4 pairs are byte for byte", done.stdout)
