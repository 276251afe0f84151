"""What the pytest plugin keeps apart or brings together: attempts at a test, ranks, and revisions of an engine."""

import re
import subprocess
from pathlib import Path

import pytest

from oracle.evidence.reader import open_trace
from oracle.report.junit import cases_of, read_report
from suites.outside import Project, make_project

pytestmark = pytest.mark.cpu


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "theirs")


RERUNS = """
    from _pytest.runner import runtestprotocol

    def pytest_runtest_protocol(item, nextitem):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if any(report.failed for report in reports):
            item._initrequest()
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        return True
"""
FLAKY = """
    def test_flaky(oracle, tries=[]):
        tries.append(None)
        oracle.assert_equivalent({"latents": [1.0]}, {"latents": [float(len(tries) - 1)]})
"""


def test_a_test_that_is_run_again_keeps_apart_what_its_attempts_found(project: Project) -> None:
    project.write(test_theirs=FLAKY, conftest=RERUNS)
    assert "1 passed" in project.pytest("--junitxml", "junit.xml").stdout
    properties = project.cases()["test_flaky"].properties
    assert [name for name, _ in properties if name.endswith("verdict")] == ["oracle.attempt1.verdict", "oracle.verdict"]
    assert dict(properties)["oracle.attempt1.verdict"] == "fails"
    assert dict(properties)["oracle.verdict"] == "holds"


RANKS = """
    import os
    from engine import run

    def test_on_ranks(oracle):
        with oracle.recording("parallel"):
            run(topology="pp2cfg1")
        with oracle.recording("again"):
            run(topology="pp2cfg1")
"""


def start_ranks(project: Project, *arguments: str) -> list[str]:
    ranks = ({"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2))
    return [project.pytest("--junitxml", "junit-rank$RANK.xml", *arguments, **rank).stdout for rank in ranks]


def test_ranks_record_into_one_trace_and_write_a_file_each_and_mix_with_no_earlier_run(project: Project) -> None:
    project.write(test_theirs=RANKS)
    for said in start_ranks(project, "--oracle-traces", "traces"):
        assert "1 passed" in said
    for name in ("parallel", "again"):
        trace = open_trace(project.folder / "traces" / "test_on_ranks" / name)
        assert all(trace.records[rank] for rank in range(2))
        assert not trace.holes
    for rank in range(2):
        (case,) = cases_of(read_report(project.folder / f"junit-rank{rank}.xml"))
        assert case.property("oracle.rank") == str(rank)
    merged = project.wanref("junit", "merge", "junit.xml", "junit-rank0.xml", "junit-rank1.xml", "--ranks", "2")
    assert merged.returncode == 0, merged.stderr
    assert project.cases()["test_on_ranks"].property("oracle.ranks") == "0, 1"
    for said in start_ranks(project, "--oracle-traces", "traces"):
        assert "pass a new folder as --oracle-traces" in said


def test_ranks_do_not_record_into_folders_of_their_own(project: Project) -> None:
    project.write(test_theirs=RANKS)
    said = project.pytest(RANK="1", WORLD_SIZE="2").stdout
    assert "ranks record into one folder: pass --oracle-traces DIR" in said


# Evidence of another revision.


def test_evidence_of_another_revision_is_marked_stale(project: Project) -> None:
    project.write(
        test_theirs="""
            import os
            import pytest
            from engine import run

            @pytest.mark.parametrize("age", ["old", "new"])
            def test_against(oracle, age):
                with oracle.recording("now") as now:
                    run(revision=os.environ["HERE"])
                oracle.assert_equivalent(f"golden/{age}", now)
        """
    )
    git = ["git", "-C", str(project.folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "engine.py"], ["commit", "-qm", "engine"]):
        subprocess.run([*git, *words], check=True)
    here = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    before = "abc1234" + "0" * 33
    for age, revision in (("old", before), ("new", here)):
        record = f"import engine; engine.run(revision={revision!r}, pull=0.1)"
        assert project.python("-c", record, ORACLE_TRACE=f"golden/{age}").returncode == 0
    run = project.pytest("--junitxml", "junit.xml", HERE=here)
    assert "2 failed" in run.stdout
    told = f"the reference was recorded at abc1234, this tree is {here[:7]}"
    assert re.findall(r"E +stale +(.*)", run.stdout) == [told]
    found = project.cases()
    assert dict(found["test_against[old]"].properties)["oracle.stale"] == told
    assert "oracle.stale" not in dict(found["test_against[new]"].properties)

    assert f"subject  engine 1.0 at {here[:7]}\n" in project.wanref("junit", "summary", "junit.xml").stdout
    junit = project.folder / "junit.xml"
    junit.write_text(junit.read_text().replace(here, before))
    summary = project.wanref("junit", "summary", "junit.xml").stdout
    assert f"engine 1.0 at abc1234, stale: recorded at abc1234, this tree is {here[:7]}" in summary
