"""The list of real fixes, and the parts of its replay that need no package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from suites.replay import __main__ as replay
from suites.replay.case import Case, read_cases
from suites.replay.scenarios import SCENARIOS

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def test_every_case_names_two_releases_a_source_and_a_scenario_that_is_there() -> None:
    cases = read_cases()
    assert len(cases) >= 6
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert Version(case.before) < Version(case.after), case.id
        assert case.scenario in SCENARIOS, case.id
        assert case.source.startswith("https://") or case.before in case.source, case.id


def test_no_scenario_knows_a_version() -> None:
    text = (ROOT / "suites" / "replay" / "scenarios.py").read_text()
    assert [case.id for case in read_cases() if case.before in text or case.after in text] == []


def test_the_published_score_has_every_case_of_the_list() -> None:
    page = (ROOT / "docs" / "replay.md").read_text()
    for case in read_cases():
        assert f"| {case.id} | {case.package} {case.before} → {case.after} |" in page, case.id


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_but_that_of_a_fault_which_came_back_is_clean_with_the_pinned_releases(
    name: str, tmp_path: Path
) -> None:
    found = list(SCENARIOS[name](tmp_path))
    # The fix of it was reverted, with a warning: see docs/replay.md.
    assert bool(found) == (name == "timesteps_and_sigmas"), found


def test_found_before_and_clean_after_is_right_and_nothing_else_is() -> None:
    assert replay.right({"before": ["wrong"], "after": []})
    assert not replay.right({"before": [], "after": []})
    assert not replay.right({"before": ["wrong"], "after": ["wrong"]})
    assert not replay.right({"before": [], "after": ["wrong"]})


def test_a_run_of_another_version_or_one_that_failed_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("id", "diffusers", "0.0.1", "0.0.2", "", "", "given_timesteps")
    monkeypatch.setattr(replay, "make_environment", lambda *_: Path(sys.executable))
    with pytest.raises(RuntimeError, match=r"asked for diffusers 0\.0\.1, and ran \d"):
        replay.find(case, "0.0.1", Path())
    failed = subprocess.CompletedProcess([], 1, "", "it fell over")
    monkeypatch.setattr(replay, "run_scenario", lambda *_: failed)
    with pytest.raises(RuntimeError, match="it fell over"):
        replay.find(case, "0.0.1", Path())
