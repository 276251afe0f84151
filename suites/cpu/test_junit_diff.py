"""`wanref junit diff` and `summary`: which failures are new, gone or the same, and what a file has, in short."""

from pathlib import Path

import pytest
from click.testing import Result as Ended
from typer.testing import CliRunner

from oracle.commands.junit import junit
from oracle.report.junit import Case, Result, Suite, read_report, write_report
from oracle.report.junit_diff import diff_reports
from oracle.report.junit_summary import markdown_lines, summarise, text_lines
from oracle.report.stale import stale
from oracle.report.volatile import stable

pytestmark = pytest.mark.cpu

PASSED, SKIPPED = Result(), Result("skipped", "no GPU", "pytest.skip")


def fails(message: str = "rank 0, step 3: other bytes") -> Result:
    return Result("failure", message, "", "traceback")


def report(**results: Result) -> tuple[Suite, ...]:
    return (Suite("pytest", tuple(Case("suites.test_x", name, result) for name, result in results.items())),)


def command(*arguments: object) -> Ended:
    return CliRunner().invoke(junit, [str(each) for each in arguments])


def changes(base: tuple[Suite, ...], head: tuple[Suite, ...]) -> dict[str, tuple[str, str]]:
    return {each.identity.partition("::")[2]: (each.change, each.note) for each in diff_reports(base, head)}


# Differences.


@pytest.mark.parametrize(
    ("was", "now", "change", "note"),
    [
        (PASSED, fails(), "new", "passed before"),
        (SKIPPED, fails(), "new", "was skipped before"),
        (None, fails(), "new", "was not run before"),
        (fails(), fails(), "same", ""),
        (fails(), fails("rank 1, step 3: other bytes"), "changed", "before: failure: rank 0, step 3: other bytes"),
        (fails(), Result("error", fails().message), "changed", "before: failure: rank 0, step 3: other bytes"),
        (fails(), PASSED, "gone", "passes"),
        (fails(), SKIPPED, "gone", "was skipped: no GPU"),
        (fails(), None, "gone", "was not run"),
        (PASSED, PASSED, None, ""),
        (PASSED, SKIPPED, None, ""),
    ],
)
def test_a_failure_is_new_changed_the_same_or_gone(
    was: Result | None, now: Result | None, change: str | None, note: str, tmp_path: Path
) -> None:
    base = report(**({"test_a": was} if was else {}))
    head = report(**({"test_a": now} if now else {}))
    assert changes(base, head) == ({"test_a": (change, note)} if change else {})
    for name, suites in (("base.xml", base), ("head.xml", head)):
        write_report(tmp_path / name, suites)
    done = command("diff", tmp_path / "base.xml", tmp_path / "head.xml")
    assert done.exit_code == (change in ("new", "changed"))
    if change:
        assert f"1 {change}" in done.output
        assert f"{change:8} suites.test_x::test_a" in done.output


def test_the_same_sixteen_fail_on_main(tmp_path: Path) -> None:
    def folder(run: int) -> str:
        return f"/tmp/pytest-of-ci/pytest-{run}/test_a0"

    base = report(**{f"test_a[{n}]": fails(f"{folder(3)}/trace: other bytes ({n})") for n in range(16)})
    head = report(**{f"test_a[{n}]": fails(f"{folder(9)}/trace: other bytes ({n})") for n in range(16)}, test_b=PASSED)
    write_report(tmp_path / "base.xml", base)
    write_report(tmp_path / "head.xml", head)
    done = command("diff", tmp_path / "base.xml", tmp_path / "head.xml")
    assert done.exit_code == 0
    assert done.output.endswith("0 new, 0 changed, 16 same, 0 gone\n")


def test_parameters_and_classes_tell_tests_apart() -> None:
    base, head = report(**{"test_a[1]": fails()}), report(**{"test_a[2]": fails()})
    assert changes(base, head) == {"test_a[1]": ("gone", "was not run"), "test_a[2]": ("new", "was not run before")}
    other = (Suite("pytest", (Case("suites.test_y", "test_a[1]", fails()),)),)
    assert {each.identity: each.change for each in diff_reports(base, other)} == {
        "suites.test_x::test_a[1]": "gone",
        "suites.test_y::test_a[1]": "new",
    }


def test_a_test_that_passes_at_last_is_no_failure() -> None:
    flaky = (Suite("pytest", (Case("suites.test_x", "test_a", PASSED, retries=(fails(),)),)),)
    assert diff_reports(report(test_a=PASSED), flaky) == ()


def test_failures_without_a_message_are_told_by_their_first_line() -> None:
    base, head = (
        report(test_a=Result("failure", "", "", "\n one\ntwo")),
        report(test_a=Result("failure", "", "", "other")),
    )
    (found,) = diff_reports(base, head)
    assert (found.change, found.says, found.note) == ("changed", "failure: other", "before: failure: one")


# What changes from run to run.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("/tmp/pytest-of-a/pytest-3/test_x0/native: gone", "/home/b/pytest-11/test_x1/native: gone"),
        ("in '/tmp/tmpab12cd_x/a.xml'", "in '/tmp/tmpzz99yy00/a.xml'"),
        ("digest 0f3a9b1c and 77aabb01ee", "digest 1111222aaa and 77aabb01ef"),
        ("<object at 0x7f4a3e9181d0>", "<object at 0x7fdf4241fe10>"),
        ("took 3.1 s, then 200ms", "took 12 s, then 1.5ms"),
        ("at 2026-12-01T06:00:00.5+00:00 (06:00:01)", "at 2027-01-31 07:11:12 (7:11:13)"),
        ("process 4711 (pid=12) ended", "process 9 (pid=13) ended"),
        ("127.0.0.1:43211 refused", "127.0.0.1:53000 refused"),
        ("worker 'gw0' crashed", "worker 'gw13' crashed"),
        ("1b4e28ba-2fa1-11d2-883f-0016d3cca427 is gone", "6fa459ea-ee8a-3ca4-894e-db77e160355e is gone"),
    ],
)
def test_what_changes_from_run_to_run_makes_no_other_failure(one: str, other: str) -> None:
    assert one != other
    assert stable(one) == stable(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("rank 0, stage 1, step 3", "rank 0, stage 1, step 4"),
        ("1 of 12 elements differ", "2 of 12 elements differ"),
        ("other bytes (rms 0.5, and 0.25 there)", "other bytes (rms 0.5, and 0.75 there)"),
        ("no /a/b/c.txt", "no /a/b/d.txt"),
        ("assert 1/2 == a/b", "assert 1/3 == a/b"),
        ("cond", "uncond"),
        ("1234567 keys", "7654321 keys"),
        ("request 1 of process", "request 2 of process"),
    ],
)
def test_what_tells_two_failures_apart_stays(one: str, other: str) -> None:
    assert stable(one) != stable(other)


# Summaries.

FULL = (
    Suite(
        "pytest",
        (
            Case("suites.test_x", "test_slow", PASSED, time=3.0),
            Case("suites.test_x", "test_fails[`a|b`]", fails("`output`: <1> of *2* differ\nmore"), time=0.5),
            Case("suites.test_x", "test_dies", Result("error", "worker 'gw0' crashed")),
            Case("suites.test_x", "test_skip", SKIPPED),
            Case("suites.test_y", "test_skip", SKIPPED),
            Case("suites.test_x", "test_flaky", PASSED, retries=(fails(),)),
            Case("suites.test_x", "test_warned", PASSED, properties=(("oracle.warning", "step 1: other bytes"),)),
        ),
        time=4.25,
    ),
)


def test_a_summary_has_counts_failures_skips_with_reasons_and_the_slowest() -> None:
    assert list(text_lines(summarise(FULL), ["engine 1.0 at abc1234"]))[:8] == [
        "7 tests: 3 passed, 2 skipped, 1 failed, 1 in error in 4.2 s",
        "subject  engine 1.0 at abc1234",
        "failure  suites.test_x::test_fails[`a|b`]: `output`: <1> of *2* differ",
        "error    suites.test_x::test_dies: worker 'gw0' crashed",
        "warning  suites.test_x::test_warned: step 1: other bytes",
        "retried  suites.test_x::test_flaky: 1 failed before: rank 0, step 3: other bytes",
        "skipped  2: no GPU",
        "slowest  3.00 s suites.test_x::test_slow",
    ]


def test_a_markdown_summary_shows_every_sentence_as_it_is(tmp_path: Path) -> None:
    write_report(tmp_path / "junit.xml", FULL)
    done = command("summary", tmp_path / "junit.xml", "--markdown")
    assert done.exit_code == 0
    assert done.output.splitlines() == list(markdown_lines(summarise(read_report(tmp_path / "junit.xml"))))
    assert done.output.splitlines()[:6] == [
        "### 7 tests: 3 passed, 2 skipped, 1 failed, 1 in error in 4.2 s",
        "",
        "**Failures**",
        "",
        r"- `` suites.test_x::test_fails[`a|b`] ``: \`output\`: &lt;1&gt; of \*2\* differ",
        "- `suites.test_x::test_dies` (error): worker 'gw0' crashed",
    ]
    for title in ("Warnings", "Retried", "Skipped", "Slowest"):
        assert f"**{title}**" in done.output


def test_a_file_without_tests_has_shown_nothing(tmp_path: Path) -> None:
    write_report(tmp_path / "junit.xml", (Suite("pytest", ()),))
    assert command("summary", tmp_path / "junit.xml").output == "no test was run: nothing was shown\n"


def test_evidence_is_stale_where_it_is_of_another_revision_and_of_none_where_nobody_knows() -> None:
    here, there = "abc1234" + "0" * 33, "def5678" + "0" * 33
    assert stale(here, there) == "recorded at abc1234, this tree is def5678"
    assert stale(here, here) is stale(here[:7], here) is stale(here, None) is stale(None, here) is None
