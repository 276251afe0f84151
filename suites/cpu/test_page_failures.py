"""The page of a verification that went wrong: it says so first, and it is written whatever is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oracle.evidence.trace import TraceError
from oracle.report.page import MOST_FAILING
from oracle.verdict.matrix import FAILURE, MATRIX, judge_matrix, read_matrix
from suites.paged import CACHE, FOLDER, Node, page_of, record_small, with_events
from suites.traced import Event

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

pytestmark = pytest.mark.cpu

OTHER_BYTES = "0" * 31 + "1"


@pytest.fixture(scope="module")
def verified(ranks: RankPool, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_small(ranks, tiny(layout="dual"), tmp_path_factory.getbasetemp() / FOLDER)


@pytest.fixture
def copy(verified: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(verified, tmp_path / "traces"))


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def words(page: Node, topology: str) -> list[str]:
    """What the matrix says of a topology: no cache and the cache, each by expert."""
    lines = page.one("table", class_="matrix").one("tbody").all("tr", data_topology=topology)
    return [cell.one("span", class_="word").text for cell in lines[0].all("td")]


def test_one_claim_that_fails_is_the_first_line_and_its_sentence_stands_with_its_run(
    verified: Path, tmp_path: Path
) -> None:
    def foreign(event: Event) -> Event:
        if event["kind"] == "decision" and event["verdict"] == "reuse" and event["expert"] == "low":
            event["origins"][0]["branch"] = "uncond" if event["branch"] == "cond" else "cond"
        return event

    folder = with_events(verified, tmp_path / "traces", f"pp1cfg1/{CACHE}-cached", foreign)
    page = page_of(folder, tmp_path)
    (row,) = [row for row in judge_matrix(read_matrix(folder), folder, {}) if not row.verdict.holds]
    assert "reused a residual of the uncond branch" in row.sentence
    assert page.one("h1").text == f"1 of 7 claims fails: {row.sentence}"
    assert [line.text for line in page.one("ol", class_="failing").all("li")] == [f"pp1cfg1 · {CACHE} · cached"]
    assert page.one("article", id=f"run-pp1cfg1-{CACHE}").one("p", class_="sentence").text == f"cached: {row.sentence}"
    assert words(page, "pp1cfg1") == ["holds", "holds", "holds", "fails"]
    assert words(page, "pp2cfg1") == ["holds"] * 4
    verdicts = {each.attributes["id"]: each.attributes["data-verdict"] for each in page.all("article")}
    assert verdicts == {f"run-pp1cfg1-{CACHE}": "fails", f"run-pp2cfg1-{CACHE}": "holds"}
    (line,) = page.all("tr", data_claim="", data_verdict="fails")
    assert line.one("summary").text == f"{len(row.verdict.findings)} findings"
    assert [each.text for each in line.all("li")] == [f"{each} ({each.layer})" for each in row.verdict.findings]


def test_of_many_claims_that_fail_the_first_ones_are_listed_and_the_rest_are_counted(
    copy: Path, tmp_path: Path
) -> None:
    plain = json.loads((copy / MATRIX).read_text())
    rewrite(copy / MATRIX, run=[*plain["run"], *(f"pp{n}cfg1" for n in range(3, 13))])
    page = page_of(copy, tmp_path)
    failing = [row for row in judge_matrix(read_matrix(copy), copy, {}) if not row.verdict.holds]
    assert len(failing) == 10 * 4
    assert page.one("h1").text.startswith("40 of 47 claims fail; the first: trace=")
    assert len(page.one("ol", class_="failing").all("li")) == MOST_FAILING
    assert page.one("p", class_="more").text == f"and {40 - MOST_FAILING} more: all claims"


def test_a_topology_whose_ranks_failed_is_shown_with_what_became_of_each(copy: Path, tmp_path: Path) -> None:
    rewrite(copy / MATRIX, failed={"pp2cfg1": "rank 1 died: exit code -9"})
    shutil.rmtree(copy / "pp2cfg1" / f"{CACHE}-cached")
    (copy / "pp2cfg1" / FAILURE).write_text("rank 1 died: exit code -9\n<stack>")
    page = page_of(copy, tmp_path)
    assert page.one("h1").text == "1 of 4 claims fails: rank 1 died: exit code -9"
    assert words(page, "pp2cfg1") == ["fails", "fails", "not run", "not run"]
    assert page.one("pre").raw == "rank 1 died: exit code -9\n<stack>"
    assert [each.attributes["id"] for each in page.all("article")] == [f"run-pp1cfg1-{CACHE}"]


def test_what_a_verification_that_was_cut_short_lacks_is_a_claim_that_fails(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "pp2cfg1")
    page = page_of(copy, tmp_path)
    assert page.one("h1").text.startswith("4 of 7 claims fail; the first: trace=")
    assert words(page, "pp2cfg1") == ["fails"] * 4
    for part in (copy / "pp1cfg1").iterdir():
        shutil.rmtree(part)
    empty = page_of(copy, tmp_path)
    assert empty.one("h1").text.startswith("7 of 7 claims fail")
    assert "No cached run left a trace." in empty.text
    assert words(empty, "pp1cfg1") == ["fails"] * 2  # no schedule says which experts there are


def test_evidence_of_another_revision_is_marked_stale_and_runs_that_differ_are_named(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oracle.report.environment.checked_out", lambda subject, folder: "b" * 40)
    for manifest in copy.glob("*/*/manifest.json"):
        subject = {"name": "wanref", "version": "1.2.3", "revision": "b" * 40, "dirty": True}
        rewrite(manifest, subject=subject, host="secret-host")
    fresh = page_of(copy, tmp_path)
    assert fresh.all("p", class_="stale") == []
    assert facts(fresh)["subject"] == ["wanref 1.2.3 at bbbbbbb with uncommitted changes"]
    assert facts(fresh)["threads"] == ["1"]
    assert "secret-host" not in fresh.raw

    other = copy / "pp2cfg1" / "native" / "manifest.json"
    rewrite(other, threads=2, subject={"name": "wanref", "version": "1.2.3", "revision": "a" * 40, "dirty": False})
    page = page_of(copy, tmp_path)
    assert page.one("p", class_="stale").text == "Stale. wanref: recorded at aaaaaaa, this tree is bbbbbbb"
    assert facts(page)["threads"][1] == "2 in pp2cfg1/native"


def facts(page: Node) -> dict[str, list[str]]:
    shown = page.one("dl", class_="facts").elements
    return {name.text: [p.text for p in value.all("p")] for name, value in zip(shown[::2], shown[1::2], strict=True)}


def wanref(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which then says whether torch was imported."""
    program = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules));"
        "import oracle.commands.report; from oracle.cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_the_command_writes_the_page_beside_the_traces_without_torch(copy: Path) -> None:
    done = wanref("report", copy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["7 of 7 claims hold", f"page     {copy / 'report.html'}", "False"]
    assert (copy / "report.html").read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("folder", "output", "says"),
    [
        (".", "page.html", "folder={folder!r} is not accepted: matrix.json: "),
        ("traces", "page.pdf", "output={output!r} is not accepted: give NAME.html in a folder that exists."),
        ("traces", "none/page.html", "output={output!r} is not accepted: give NAME.html in a folder that exists."),
    ],
)
def test_the_command_refuses_what_it_cannot_read_or_write(copy: Path, folder: str, output: str, says: str) -> None:
    given, target = copy.parent / folder, copy.parent / output
    done = wanref("report", given, "--output", target)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {says.format(folder=str(given), output=str(target))}")
    assert not target.exists()


def test_a_matrix_of_another_version_is_refused_and_one_of_this_says_what_was_asked(copy: Path) -> None:
    recorded = read_matrix(copy)
    assert recorded.run == ("pp1cfg1", "pp2cfg1")
    assert recorded.caches[CACHE]["method"] == "teacache"
    assert recorded.caches[CACHE]["options"]["threshold"] == "0.25"
    assert recorded.request["steps"] == 6
    assert "guidance_scale_2" not in recorded.request
    rewrite(copy / MATRIX, schema=2)
    with pytest.raises(TraceError, match="schema 2; this reader knows 1"):
        read_matrix(copy)
