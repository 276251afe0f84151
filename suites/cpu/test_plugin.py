"""The pytest plugin, from a project that is not this one, in which wanref's wheel is installed."""

import re
import shlex
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oracle.evidence.ranks import Outcome, RanksFailed
from oracle.evidence.reader import open_trace
from oracle.plugin import _did_not_end
from oracle.verdict.compare import compare
from oracle.verdict.localise import locate
from suites.outside import CACHES, ROOT, SAYS, Project, make_project

pytestmark = pytest.mark.cpu


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "theirs")


def steady(output: str) -> list[str]:
    """Without times and addresses, and without the list of installed plugins, which pytest itself prints."""
    lines = re.sub(r"=* ?.* in \d+\.\d+s( =*)?| at 0x\w+", "", output).splitlines()
    return [line for line in lines if not line.startswith("plugins:")]


# Unless a fixture is used, nothing changes.

UNUSED = """
    import pytest

    @pytest.mark.parametrize("value", [2, 1])
    def test_b(value, capsys, tmp_path):
        print(value)
        assert list(tmp_path.iterdir()) == []

    class TestA:
        def test_fails(self):
            raise TimeoutError("took too long")
"""
PRINTS_IMPORTS = """
    import sys

    def pytest_unconfigure():
        print("imported:", *sorted(n for n in sys.modules if n.split(".")[0] in ("oracle", "wanref", "torch", "numpy")))
"""


@pytest.mark.parametrize("arguments", [["--collect-only", "-q"], ["-v"], ["--markers"]])
def test_a_project_that_uses_no_fixture_sees_nothing_of_the_plugin(project: Project, arguments: list[str]) -> None:
    project.write(test_theirs=UNUSED)
    here, without = project.pytest(*arguments), project.pytest(*arguments, "-p", "no:oracle")
    assert here.returncode == without.returncode
    assert steady(here.stdout) == steady(without.stdout)
    assert here.stderr == without.stderr


def test_the_plugin_comes_with_the_wheel_and_imports_nothing_before_a_fixture_is_used(project: Project) -> None:
    project.write(test_theirs=UNUSED, conftest=PRINTS_IMPORTS)
    run = project.pytest("-s", "--junitxml", "junit.xml")
    assert re.search(r"^plugins:.*\bwanref-", run.stdout, re.MULTILINE)
    assert re.search(r"imported: oracle oracle.plugin$", run.stdout, re.MULTILINE), run.stdout
    assert project.cases()["test_fails"].result.kind == "failure"
    assert not any(case.properties for case in project.cases().values())


def test_fixtures_and_options_of_a_project_come_before_those_of_the_plugin(project: Project) -> None:
    test = "def test_own(topology, checkpoint):\n    print('ran', topology, checkpoint)\n"
    project.write(test_theirs=test, conftest=(ROOT / "conftest.py").read_text())
    run = project.pytest("-s", "--topology", "pp2cfg1", "--oracle-topology", "pp1cfg2")
    assert f"ran pp2cfg1 {project.folder / 'fixtures' / 'micro'}" in run.stdout


def test_topology_and_checkpoint_are_what_the_options_say(project: Project) -> None:
    project.write(test_theirs="def test_asks(topology, checkpoint):\n    print('ran', topology, checkpoint)\n")
    run = project.pytest("-s", "--oracle-topology", "pp2cfg2", "--oracle-checkpoint", "some/where")
    assert "ran pp2cfg2 some/where" in run.stdout
    assert "no checkpoint: pass --oracle-checkpoint PATH_OR_HUB_ID" in project.pytest("-rs").stdout


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("--oracle-topology", "pp0cfg1", "is not accepted"),
        ("--oracle-level", "everything", "decisions, digest, stats, tensor"),
        ("--oracle-traces", "engine.py", "an existing or a new folder"),
    ],
)
def test_an_option_that_cannot_be_had_is_refused_before_anything_runs(
    project: Project, option: str, value: str, accepted: str
) -> None:
    project.write(test_theirs=CACHES)
    run = project.pytest(f"{option}={value}")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    for part in (option, repr(value), accepted):
        assert part in run.stderr
    assert "passed" not in run.stdout


# Recordings and verdicts.

LOST = """
    import subprocess

    import pytest

    def test_time_out(oracle):
        raise TimeoutError("no answer in 5 s")

    def test_hung_process(oracle):
        raise subprocess.TimeoutExpired("engine", 5)

    def test_pytest_timeout(oracle):
        pytest.fail("Timeout (>5.0s) from pytest-timeout.")

    def test_says_no(oracle):
        assert False, "no"
"""
CRASH = """
    import os

    def test_crash(oracle):
        os._exit(3)
"""


Ran = tuple[Project, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", params=["0", "2"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Tests that pass, fail, run out of time and, on a worker of xdist, die."""
    project = make_project(tmp_path_factory.mktemp("ran") / "theirs").write(test_caches=CACHES, test_lost=LOST)
    if request.param != "0":
        project.write(test_crash=CRASH)
    arguments = ("--oracle-traces", "traces", "--junitxml", "junit.xml", "-n", request.param)
    return project, project.pytest(*arguments)


def test_a_failure_is_the_verdicts_sentence_and_shows_where_to_look(ran: Ran) -> None:
    project, run = ran
    assert run.returncode == pytest.ExitCode.TESTS_FAILED

    traces = project.folder / "traces" / "test_wrong"
    one, other = open_trace(traces / "full"), open_trace(traces / "cached")
    verdict = compare(one, other, "cached")
    location = locate(one, other, verdict)
    assert location is not None
    assert location.sentence.startswith(SAYS)
    found = project.cases()
    assert found["test_wrong"].result.message == location.sentence
    assert f"next: {verdict.findings[1]}" in run.stdout
    assert f"FAILED test_caches.py::test_wrong - {SAYS}" in run.stdout

    (look,) = re.findall(r"wanref (trace show .*)", run.stdout)
    shown = project.wanref(*shlex.split(look))
    assert shown.returncode == 0, shown.stderr
    assert "reuse" in shown.stdout

    properties = dict(found["test_wrong"].properties)
    expected = {"contract": "cached", "verdict": "fails", "hits": "2", "misses": "2", "cache": "every-other-step"}
    expected |= {"topology": "pp1cfg1", "dtype": "float32", "subject": "engine", "version": "1.0"}
    expected |= {"first_divergence": "rank 0, stage 0, step 1, cond, block 1"}
    assert {name: properties[f"oracle.{name}"] for name in expected} == expected
    assert properties["oracle.digest.reference"] != properties["oracle.digest.candidate"]
    assert dict(found["test_right"].properties)["oracle.verdict"] == "holds"


def test_processes_that_a_test_starts_are_recorded_and_the_environment_is_as_before(project: Project) -> None:
    project.write(
        test_theirs="""
            import os, subprocess, sys

            def test_other_processes(oracle):
                before = dict(os.environ)
                command = [sys.executable, "-c", "import engine; engine.run()"]
                with oracle.recording("one") as one:
                    subprocess.run(command, check=True)
                with oracle.recording("other") as other:
                    subprocess.run(command, check=True)
                assert dict(os.environ) == before
                oracle.assert_equivalent(one, other)
        """
    )
    run = project.pytest("--oracle-traces", "traces", "--oracle-level", "tensor")
    assert "1 passed" in run.stdout, run.stdout
    assert open_trace(project.folder / "traces" / "test_other_processes" / "one").manifest["level"] == "tensor"


def test_what_was_not_recorded_fails_and_is_not_passed_over(project: Project) -> None:
    project.write(
        test_theirs="""
            def test_nothing(oracle):
                with oracle.recording("one") as one, oracle.recording("other") as other:
                    pass
                oracle.assert_equivalent(one, other)
        """
    )
    run = project.pytest("--junitxml", "junit.xml")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "manifest.json" in project.cases()["test_nothing"].result.message


def test_recordings_of_tests_that_fail_are_kept_and_those_of_others_are_not(project: Project) -> None:
    project.write(test_theirs=CACHES)
    project.pytest("--basetemp", "temporary")
    kept = {path.parent.parent.name for path in (project.folder / "temporary").rglob("manifest.json")}
    assert kept == {"test_wrong"}


def test_tests_of_one_name_keep_their_recordings_apart_and_a_second_run_replaces_its_own(project: Project) -> None:
    project.write(test_one=CACHES, test_two=CACHES)
    run = project.pytest("--oracle-traces", "traces", "-n", "2")
    assert "2 failed, 2 passed" in run.stdout, run.stdout
    folders = sorted(path.name for path in (project.folder / "traces").iterdir())
    assert folders == [f"test_{file}.py.test_{test}" for file in ("one", "two") for test in ("right", "wrong")]
    for _ in range(2):
        alone = project.pytest("--oracle-traces", "traces", "test_one.py::test_right")
        assert "1 passed" in alone.stdout, alone.stdout
    assert (project.folder / "traces" / "test_right" / "full").is_dir()


def test_a_recording_that_would_harm_another_file_is_refused(project: Project) -> None:
    project.write(
        test_theirs="""
            import pytest

            @pytest.mark.parametrize("names", [["a", "a"], ["../a"], ["notes"]], ids=["twice", "out", "notes"])
            def test_records(oracle, names):
                for name in names:
                    with oracle.recording(name):
                        pass
        """
    )
    notes = project.folder / "traces" / "test_records[notes]" / "notes"
    notes.mkdir(parents=True)
    (notes / "important.txt").write_text("mine")
    run = project.pytest("--oracle-traces", "traces")
    assert "3 failed" in run.stdout
    assert "recording='a' is not accepted: this test has recorded it already" in run.stdout
    assert "recording='../a' is not accepted: give a name" in run.stdout
    assert f"{notes} is there, and is no trace" in run.stdout
    assert (notes / "important.txt").read_text() == "mine"


# Twins.

TWINS = """
    import engine
    import pytest

    @pytest.mark.parametrize("wrong", ["never", "forced", "cached"])
    def test_twins(oracle, twins, wrong):
        three = twins(lambda kind: engine.run(kind, wrong=kind == wrong))
        assert [three.native.name, three.forced.name, three.cached.name] == ["native", "cache-forced", "cache-cached"]
        oracle.assert_twins(three)
"""


def test_twins_hold_where_the_forced_run_is_the_native_one_and_the_cached_run_reuses_what_is_its_own(
    project: Project,
) -> None:
    project.write(test_theirs=TWINS)
    run = project.pytest("--junitxml", "junit.xml")
    assert "2 failed, 1 passed" in run.stdout, run.stdout
    found = project.cases()
    assert "first differs at block 0" in found["test_twins[forced]"].result.message
    assert found["test_twins[cached]"].result.message.startswith(SAYS)
    properties = dict(found["test_twins[never]"].properties)
    assert (properties["oracle.contract"], properties["oracle.2.contract"]) == ("forced", "cached")
    assert properties["oracle.2.hits"] == "2"
    assert "oracle.2.contract" not in dict(found["test_twins[forced]"].properties)


# What did not come to an end.


def test_a_test_that_ran_out_of_time_is_an_error_and_one_that_says_no_is_a_failure(ran: Ran) -> None:
    found = ran[0].cases()
    assert found["test_says_no"].result.kind == "failure"
    for name in ("test_time_out", "test_hung_process", "test_pytest_timeout"):
        assert found[name].result.kind == "error"
    assert "no answer in 5 s" in found["test_time_out"].result.message


def test_a_worker_that_dies_leaves_an_error_in_the_one_file_of_all_workers(ran: Ran) -> None:
    project, run = ran
    found = project.cases()
    (suite,) = ElementTree.parse(project.folder / "junit.xml").getroot()
    if "test_crash" in found:
        assert found["test_crash"].result.kind == "error"
        assert "crashed while running" in found["test_crash"].result.message
    assert (suite.get("tests"), suite.get("failures")) == (str(len(found)), "2")
    assert suite.get("errors") == str(3 + run.stdout.count("FAILED test_crash.py::test_crash"))
    assert ("test_crash.py" in run.stdout) == ("test_crash" in found)


def test_a_rank_that_hung_or_died_is_no_answer_and_one_that_raised_is() -> None:
    assert _did_not_end(RanksFailed([Outcome("value"), Outcome("hung")]))
    assert _did_not_end(RanksFailed([Outcome("died")]))
    assert not _did_not_end(RanksFailed([Outcome("raised")]))
