"""A run of the pytest plugin that only warns, and failures that a project waives for a while."""

import re
import subprocess
from datetime import date
from pathlib import Path

import pytest

from oracle.report.waivers import WaiverError, applies, read_waivers
from suites.outside import CACHES, SAYS, Project, make_project

pytestmark = pytest.mark.cpu


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "theirs")


def test_a_run_that_only_warns_fails_no_test_and_says_what_would_have_failed(project: Project) -> None:
    project.write(test_theirs=CACHES)
    run = project.pytest("--oracle-warn", "--junitxml", "junit.xml", "-n", "2", "-W", "error")
    assert run.returncode == pytest.ExitCode.OK, run.stdout
    assert "2 passed, 1 warning" in run.stdout
    assert f"NotEquivalentWarning: {SAYS}" in run.stdout
    assert dict(project.cases()["test_wrong"].properties)["oracle.warning"].startswith(SAYS)
    assert "oracle.warning" not in dict(project.cases()["test_right"].properties)


def waiver(**changes: str | None) -> str:
    given = {"test": '"test_theirs.py::*"', "says": '"of the uncond"', "reason": '"slot 7"', "until": "2999-01-31"}
    lines = [f"{name} = {value}" for name, value in {**given, **changes}.items() if value is not None]
    return "\n".join(["[[waiver]]", *lines, ""])


def run_waived(project: Project, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    project.write(test_theirs=CACHES)
    (project.folder / "waivers.toml").write_text(text)
    return project.pytest("--oracle-waivers", "waivers.toml", "--junitxml", "junit.xml", "-rx", *arguments)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_waived_failure_says_why_and_until_when_and_a_waiver_that_matched_nothing_is_reported(
    project: Project, workers: str
) -> None:
    text = waiver() + waiver(says='"of a later step"') + waiver(test='"test_theirs.py::test_[wrong]"')
    run = run_waived(project, text, "-n", workers)
    assert run.returncode == pytest.ExitCode.OK, run.stdout
    assert "1 passed, 1 xfailed" in run.stdout
    result = project.cases()["test_wrong"].result
    assert result.kind == "skipped"
    assert result.message.startswith(f"waiver 1, until 2999-01-31: slot 7 ({SAYS}")
    assert [line for line in run.stdout.splitlines() if line.startswith("oracle:")] == [
        "oracle: waiver 2 (test_theirs.py::*) waived nothing: its tests ran, and none failed so",
        "oracle: waiver 3 (test_theirs.py::test_[wrong]) waived nothing: no test of its name ran",
    ]


def test_a_waived_failure_fails_where_expected_failures_are_to_be_shown(project: Project) -> None:
    run = run_waived(project, waiver(), "--runxfail")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert SAYS in run.stdout


def test_a_waiver_that_has_ended_waives_nothing_and_says_so(project: Project) -> None:
    run = run_waived(project, waiver(until="2001-01-31"))
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "waiver 1, until 2001-01-31: slot 7 - it has ended" in run.stdout
    assert "oracle: waiver 1 (test_theirs.py::*) has ended on 2001-01-31" in run.stdout


def test_a_waiver_holds_to_the_end_of_its_last_day(tmp_path: Path) -> None:
    file = tmp_path / "waivers.toml"
    file.write_text(waiver(until="2027-01-31"))
    waivers = read_waivers(file)
    told = ("test_theirs.py::test_x", f"{SAYS}.")
    assert applies(waivers, *told, date(2027, 1, 31)) == waivers[0]
    assert applies(waivers, *told, date(2027, 2, 1)) is None
    assert applies(waivers, "test_other.py::test_x", SAYS, date(2027, 1, 1)) is None


def test_a_file_of_waivers_that_is_not_accepted_ends_the_run_before_any_test(project: Project) -> None:
    run = run_waived(project, waiver(reason=None))
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--oracle-waivers: waivers.toml: waiver 1: reason is missing: give a text." in run.stderr
    assert "passed" not in run.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (waiver(reason='""'), "waiver 1: reason is ''"),
        (waiver() + waiver(until=None), "waiver 2: until is missing"),
        (waiver(until='"soon"'), "waiver 1: until is 'soon': give a date, as 2027-01-31"),
        (waiver(until="2027-01-31T00:00:00"), "until is datetime.datetime(2027, 1, 31, 0, 0): give a date"),
        (waiver(says=None), "waiver 1: says is missing"),
        (waiver(owner='"me"'), "waiver 1: owner is not accepted: give test, says, reason, until"),
        ("[[waver]]\n", "waver is not accepted"),
        ("waiver = 1\n", "waiver is not accepted"),
        ("[[waiver\n", "waivers.toml"),
    ],
)
def test_a_waiver_needs_a_test_a_sentence_a_reason_and_an_end(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "waivers.toml"
    file.write_text(text)
    with pytest.raises(WaiverError, match=re.escape(says)):
        read_waivers(file)
