"""`wanref junit merge`: the files of ranks, workers and attempts become one, without loss or doubles, in a form that
Jenkins and GitLab read."""

import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result as Ended
from typer.testing import CliRunner

from oracle.commands.junit import junit
from oracle.report.junit import Case, JUnitError, Result, Suite, cases_of, read_report, write_report
from oracle.report.junit_merge import merge_reports, ranks_words
from suites.outside import make_project
from suites.schema import count_problems, schema_problems

pytestmark = pytest.mark.cpu

FAILED = Result("failure", "rank 0, step 3: other bytes", "AssertionError", "the whole\ntraceback")
DIED = Result("error", "worker 'gw1' crashed", "Crash", "it crashed")
SAYS = FAILED.message
SKIPPED = Result("skipped", "no GPU", "pytest.skip", "test_x.py:1: no GPU")
PASSED = Result()


def command(*arguments: object) -> Ended:
    return CliRunner().invoke(junit, [str(each) for each in arguments])


def suite(*cases: Case, **about: Any) -> tuple[Suite, ...]:
    return (Suite("pytest", cases, **about),)


def one(*results: Result, **about: Any) -> tuple[Suite, ...]:
    """A file that has these results of one test."""
    return suite(*(Case("suites.test_x", "test_a[1]", result) for result in results), **about)


def merged(files: dict[str, tuple[Suite, ...]], ranks: int | None = None) -> Case:
    (case,) = cases_of(merge_reports({Path(name): suites for name, suites in files.items()}, ranks))
    return case


# Reading and writing.

FULL = Case(
    "suites.test_x",
    'test_a[<&"é]',
    FAILED,
    retries=(DIED, Result("failure", "again", "AssertionError", "another")),
    time=1.25,
    properties=(("oracle.topology", "pp2cfg2"), ("oracle.hits", "3")),
    file="suites/test_x.py",
    line="7",
    out="printed\n",
    err="warned\n",
)


def test_what_is_written_is_read_again_and_keeps_to_the_schema(tmp_path: Path) -> None:
    flaky = Case("suites.test_x", "test_b", PASSED, retries=(FAILED, DIED), time=0.5)
    about = {"time": 2.5, "timestamp": "2026-12-01T06:00:00.5+00:00", "hostname": "here", "properties": (("a", "b"),)}
    suites = (Suite("pytest", (FULL, flaky, Case("suites.test_x", "test_c", SKIPPED)), **about), Suite("other", ()))
    write_report(tmp_path / "new" / "junit.xml", suites)
    assert read_report(tmp_path / "new" / "junit.xml") == suites
    assert schema_problems(tmp_path / "new" / "junit.xml") == []
    assert count_problems(tmp_path / "new" / "junit.xml") == []
    tags = Counter(node.tag for node in ElementTree.parse(tmp_path / "new" / "junit.xml").iter())
    assert {tag: tags[tag] for tag in ("rerunError", "rerunFailure", "flakyError", "flakyFailure")} == dict.fromkeys(
        ("rerunError", "rerunFailure", "flakyError", "flakyFailure"), 1
    )


def test_nested_suites_and_a_file_of_one_suite_are_read(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    inner = '<testsuite name="inner"><testcase classname="c" name="b"><failure>no</failure></testcase></testsuite>'
    file.write_text(f'<testsuite name="outer"><testcase classname="c" name="a"/>{inner}</testsuite>')
    outer, nested = read_report(file)
    assert ([c.name for c in outer.cases], [c.name for c in nested.cases]) == (["a"], ["b"])
    assert nested.cases[0].result == Result("failure", "", "", "no")


@pytest.mark.parametrize(
    "text", [None, "", "<testsuites", "<html/>", '<testsuites><testsuite time="soon"/></testsuites>']
)
def test_a_file_that_is_no_junit_file_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "junit.xml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(JUnitError, match=re.escape(f"file={str(file)!r} is not accepted")):
        read_report(file)
    for verb in (("summary", file), ("diff", file, file), ("merge", tmp_path / "out.xml", file)):
        assert command(*verb).exit_code == 2
    assert not (tmp_path / "out.xml").exists()


def test_the_strict_form_keeps_to_what_the_xunit_plugin_of_jenkins_accepts_and_loses_nothing(tmp_path: Path) -> None:
    write_report(tmp_path / "wide.xml", suite(FULL))
    assert schema_problems(tmp_path / "wide.xml", strict=True), "properties, file and line are beyond it"
    done = command("merge", tmp_path / "strict.xml", tmp_path / "wide.xml", "--strict")
    assert done.exit_code == 0, done.output
    assert schema_problems(tmp_path / "strict.xml", strict=True) == []
    (case,) = cases_of(read_report(tmp_path / "strict.xml"))
    assert case.out == "[[PROPERTY|oracle.topology=pp2cfg2]]\n[[PROPERTY|oracle.hits=3]]\nprinted\n"
    assert case.result == FULL.result


# Ranks.


@pytest.mark.parametrize(
    ("results", "kind", "message"),
    [
        ([PASSED, PASSED, PASSED, PASSED], "passed", ""),
        ([PASSED, SKIPPED, PASSED, PASSED], "skipped", "rank 1: no GPU"),
        ([SKIPPED, FAILED, PASSED, FAILED], "failure", f"ranks 1 and 3: {SAYS}\nrank 0: no GPU"),
        (
            [DIED, FAILED, FAILED, FAILED],
            "error",
            f"rank 0: {DIED.message}\nranks 1 to 3: {SAYS}",
        ),
    ],
)
def test_a_test_of_several_ranks_is_as_bad_as_the_worst_and_names_the_ranks(
    results: list[Result], kind: str, message: str
) -> None:
    case = merged({f"junit-rank{rank}.xml": one(result) for rank, result in enumerate(results)})
    assert (case.result.kind, case.result.message) == (kind, message)
    assert case.property("oracle.ranks") == "0, 1, 2, 3"
    for rank, result in enumerate(results):
        assert (f"rank {rank}:\n{result.text}" in case.result.text) == (result.kind != "passed")


def test_a_rank_that_left_no_result_is_an_error_of_every_test_that_lacks_it(tmp_path: Path) -> None:
    here, there = Case("c", "here"), Case("c", "there")
    files = {"junit-rank0.xml": suite(here, there), "junit-rank2.xml": suite(here)}
    for name, suites in files.items():
        write_report(tmp_path / name, suites)
    known = {case.name: case.result for case in cases_of(merge_reports({Path(n): s for n, s in files.items()}))}
    assert known["here"].kind == "passed"
    assert (known["there"].kind, known["there"].message) == ("error", "rank 2: has no result of this test")

    done = command("merge", tmp_path / "out.xml", *(tmp_path / name for name in files), "--ranks", 4)
    assert done.exit_code == 0
    told = {case.name: case.result for case in cases_of(read_report(tmp_path / "out.xml"))}
    assert told["here"].message == "ranks 1 and 3: has no result of this test"
    assert told["there"].message == "ranks 1 to 3: has no result of this test"
    assert count_problems(tmp_path / "out.xml") == []


def test_the_rank_of_a_file_is_in_its_name_or_in_a_property_of_its_tests() -> None:
    def told(rank: str) -> tuple[Suite, ...]:
        return suite(Case("c", "a", FAILED, properties=(("oracle.rank", rank), ("oracle.hits", rank))), Case("c", "b"))

    result = merge_reports({Path("first.xml"): told("0"), Path("second.xml"): told("1")})
    a, b = cases_of(result)
    assert (a.property("oracle.ranks"), b.property("oracle.ranks")) == ("0, 1", "0, 1")
    assert dict(a.properties) == {"oracle.ranks": "0, 1", "rank0.oracle.hits": "0", "rank1.oracle.hits": "1"}


def test_properties_that_all_ranks_have_alike_are_kept_once() -> None:
    def told(hits: str) -> tuple[Suite, ...]:
        return suite(Case("c", "a", properties=(("oracle.topology", "pp2cfg1"), ("oracle.hits", hits))))

    case = merged({"rank0.xml": told("3"), "rank1.xml": told("4")})
    alike = ("oracle.topology", "pp2cfg1")
    assert case.properties == (("oracle.ranks", "0, 1"), alike, ("rank0.oracle.hits", "3"), ("rank1.oracle.hits", "4"))


@pytest.mark.parametrize(
    ("files", "ranks", "says"),
    [
        ({"junit.xml": one(PASSED)}, 2, "ranks=2 is not accepted: the files name no rank"),
        ({"rank0.xml": one(PASSED), "rank2.xml": one(PASSED)}, 2, "the files tell of ranks 0 and 2"),
        (
            {"rank0.xml": one(PASSED), "junit.xml": one(PASSED)},
            None,
            "of rank 0 and in files that name no rank",
        ),
        (
            {"junit.xml": suite(*(Case("c", n, properties=(("oracle.rank", n),)) for n in "01"))},
            None,
            "its tests are of ranks 0, 1",
        ),
    ],
)
def test_files_that_do_not_fit_each_other_are_refused(
    files: dict[str, tuple[Suite, ...]], ranks: int | None, says: str
) -> None:
    with pytest.raises(JUnitError, match=re.escape(says)):
        merged(files, ranks)


def test_a_file_never_counts_twice(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    write_report(file, one(PASSED))
    (tmp_path / "link.xml").symlink_to(file)
    before, out = file.read_bytes(), tmp_path / "out.xml"
    for arguments in ((out, file, file), (out, file, tmp_path / "link.xml"), (file, file)):
        assert command("merge", *arguments).exit_code == 2
    assert file.read_bytes() == before
    assert command("merge", out, file, "--ranks", 0).exit_code == 2
    assert not out.exists()


def test_ranks_are_told_in_few_words() -> None:
    assert [ranks_words(ranks) for ranks in ([2], [0, 1], [0, 1, 2], [0, 2, 3])] == [
        "rank 2",
        "ranks 0 and 1",
        "ranks 0 to 2",
        "ranks 0, 2 and 3",
    ]


# Attempts.


@pytest.mark.parametrize(
    ("attempts", "result", "retries"),
    [
        ([FAILED, PASSED], PASSED, [FAILED]),
        ([FAILED, DIED, PASSED], PASSED, [FAILED, DIED]),
        ([FAILED, DIED], FAILED, [DIED]),
        ([PASSED, FAILED], FAILED, []),
        ([FAILED, SKIPPED], FAILED, []),
        ([SKIPPED, PASSED], PASSED, []),
        ([SKIPPED, SKIPPED], SKIPPED, []),
    ],
)
def test_attempts_of_one_test_are_kept_as_surefire_keeps_them(
    attempts: list[Result], result: Result, retries: list[Result], tmp_path: Path
) -> None:
    files = {f"junit-{number}.xml": one(attempt) for number, attempt in enumerate(attempts)}
    case = merged(files)
    assert (case.result, list(case.retries)) == (result, retries)
    write_report(tmp_path / "out.xml", suite(case))
    assert schema_problems(tmp_path / "out.xml", strict=True) == []
    assert [retry.text for retry in cases_of(read_report(tmp_path / "out.xml"))[0].retries] == [r.text for r in retries]


def test_attempts_are_in_the_order_of_their_times_and_without_them_as_they_are_given() -> None:
    first, second = "2026-12-01T06:00:00+00:00", "2026-12-01T06:05:00+00:00"
    files = {"a-retry.xml": one(PASSED, timestamp=second), "b.xml": one(FAILED, timestamp=first)}
    assert merged(files).result == PASSED
    assert merged({name: one(suites[0].cases[0].result) for name, suites in files.items()}).result == FAILED


def test_attempts_of_ranks_are_settled_rank_by_rank() -> None:
    files = {"rank0-1.xml": one(FAILED), "rank0-2.xml": one(PASSED), "rank1.xml": one(DIED)}
    case = merged(files)
    assert (case.result.kind, case.result.message) == ("error", "rank 1: worker 'gw1' crashed")
    assert [retry.message for retry in case.retries] == [f"rank 0: {FAILED.message}"]


def test_a_failure_and_the_error_of_its_teardown_are_one_case_and_no_retry() -> None:
    torn = Result("error", 'failed on teardown with "boom"', "", "boom")
    case = merged({"junit.xml": one(FAILED, torn)})
    assert (case.result.kind, case.retries) == ("error", ())
    assert case.result.message == f"{torn.message}\n{FAILED.message}"
    assert case.result.text == "boom\n\nthe whole\ntraceback"


def test_a_run_lasts_as_long_as_its_slowest_rank() -> None:
    files = {
        "rank0-a.xml": one(PASSED, time=2.0),
        "rank0-b.xml": one(PASSED, time=3.0),
        "rank1.xml": one(PASSED, time=4.0),
    }
    (result,) = merge_reports({Path(name): suites for name, suites in files.items()})
    assert result.time == 5.0


# 4 ranks x 2 workers, each a real run.

TESTS = """
    import os
    import pytest

    RANK = int(os.environ["RANK"])

    @pytest.mark.parametrize("value", range(6))
    def test_passes(value):
        pass

    def test_fails_on_one_rank():
        assert RANK != 1, "other bytes"

    def test_fails_everywhere():
        assert False, "wrong"

    def test_is_for_rank_0():
        if RANK:
            pytest.skip("rank 0 has the video")

    def test_dies_on_one_rank():
        if RANK == 2:
            os._exit(3)
"""


def test_four_ranks_of_two_workers_become_one_file_without_loss_or_doubles(tmp_path: Path) -> None:
    project = make_project(tmp_path / "theirs").write(test_ranks=TESTS)
    (project.folder / "pytest.ini").write_text("[pytest]\njunit_family = xunit1\n")
    for rank in range(4):
        run = project.pytest("-n", "2", "--junitxml", "junit-rank$RANK.xml", RANK=str(rank), WORLD_SIZE="4")
        assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    files = [project.folder / f"junit-rank{rank}.xml" for rank in range(4)]
    out = project.folder / "junit.xml"
    done = command("merge", out, *files, "--ranks", 4)
    assert done.exit_code == 0, done.output
    assert "10 tests: 6 passed, 1 skipped, 2 failed, 1 in error" in done.output
    assert schema_problems(out) == count_problems(out) == []

    found = project.cases()
    assert len(cases_of(read_report(out))) == len(found) == 10
    assert {name for file in files for name in (case.name for case in cases_of(read_report(file)))} == set(found)
    assert all(case.property("oracle.ranks") == "0, 1, 2, 3" for case in found.values())
    results = {name: case.result for name, case in found.items()}
    assert results["test_fails_on_one_rank"].message.startswith("rank 1: AssertionError: other bytes")
    assert results["test_fails_everywhere"].message.startswith("ranks 0 to 3: AssertionError: wrong")
    assert results["test_fails_everywhere"].text.count("def test_fails_everywhere") == 4
    assert results["test_is_for_rank_0"].message == "ranks 1 to 3: rank 0 has the video"
    assert results["test_dies_on_one_rank"].kind == "error"
    assert results["test_dies_on_one_rank"].message.startswith("rank 2: ")
    assert found["test_passes[0]"].file == "test_ranks.py"

    strictly = project.folder / "strict.xml"
    assert command("merge", strictly, out, "--strict").exit_code == 0
    assert schema_problems(strictly, strict=True) == []


# The schema itself.

SUITE = '<testsuites><testsuite name="a" tests="{}" failures="0" errors="0"{}>{}</testsuite></testsuites>'
TWICE = '<flakyError type="a"><stackTrace/><stackTrace/></flakyError>'
BAD = {
    "another root": "<html/>",
    "an unknown element": SUITE.format(0, "", "<trait/>"),
    "an unknown attribute": '<testsuites colour="red"/>',
    "no name": '<testsuites><testsuite tests="0" failures="0" errors="0"/></testsuites>',
    "no number": SUITE.format("some", "", ""),
    "no time": '<testsuites time="1e-05"/>',
    "no date": SUITE.format(0, ' timestamp="now"', ""),
    "text": "<testsuites>text</testsuites>",
    "what is misplaced": '<testsuites><failure message="a"/></testsuites>',
    "what comes twice": SUITE.format(1, "", f'<testcase name="a" classname="b">{TWICE}</testcase>'),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_the_schema_refuses(tmp_path: Path, text: str) -> None:
    file = tmp_path / "junit.xml"
    file.write_text(text)
    assert len(schema_problems(file)) == 1


def test_counts_that_do_not_add_up_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    write_report(file, suite(FULL))
    assert count_problems(file) == []
    file.write_text(file.read_text().replace('failures="1"', 'failures="0"'))
    assert len(count_problems(file)) == 2
