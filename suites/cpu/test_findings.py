"""Findings about other people's libraries: each script is short, needs no wanref, and shows what it says."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

from oracle.evidence.mounts import mounts
from oracle.evidence.ranks import RankPool
from oracle.verdict.findings import Finding, findings, show

pytestmark = pytest.mark.cpu

MOST_LINES = 30


def test_there_is_a_finding_about_most_subjects_and_each_is_about_a_known_one() -> None:
    known = {"diffusers", *mounts(8)}
    told = {subject for finding in findings() for subject in finding.subjects}
    assert told <= known
    assert len(told) >= 6


def run_script(script: Path) -> tuple[object, str]:
    """For a process of its own, which has imported the libraries: a script's exit code, and what it said."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code, out.getvalue()


@pytest.mark.parametrize("finding", findings(), ids=lambda finding: finding.script.stem)
def test_a_script_is_short_needs_no_wanref_and_shows_what_it_says(finding: Finding) -> None:
    text = finding.script.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert not re.search(r"import (wanref|oracle)|from (wanref|oracle)", text)
    assert finding.says.endswith(".")
    with RankPool() as pool:
        ((code, said),) = pool.run(1, run_script, finding.script)
    assert code == 1, f"{finding.says} It is mended, or never was: {said}"
    assert said.strip()


def test_a_finding_is_shown_by_its_script_alone() -> None:
    (finding,) = (each for each in findings("faster-cache"))
    shown = show(finding)
    assert (shown.shown, shown.told) == (True, "IndexError: tuple index out of range")


@pytest.mark.parametrize(
    ("text", "shown", "told"),
    [
        ("print('fine')", False, "fine"),
        ("print('wrong'); raise SystemExit(1)", True, "wrong"),
        ("raise SystemExit(1)", None, "it said nothing"),
        ("print('wrong'); 1 / 0", None, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_script_that_ends_otherwise_than_it_says_shows_nothing(
    tmp_path: Path, text: str, shown: bool | None, told: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    result = show(Finding(script, "", ()))
    assert (result.shown, result.told) == (shown, told)
