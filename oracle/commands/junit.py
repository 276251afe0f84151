"""`wanref junit ...`: merges, sums up and compares JUnit files. torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wanref.cli import console, usage_errors

junit = typer.Typer(help="Work with JUnit files.", no_args_is_help=True, rich_markup_mode="markdown")

FileArgument = Annotated[Path, typer.Argument(help="A JUnit file.")]


@junit.command(epilog="Example: `wanref junit merge junit.xml junit-rank0.xml junit-rank1.xml --ranks 2`")
def merge(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Where the merged file is written.")],
    files: Annotated[list[Path], typer.Argument(metavar="IN...", help="JUnit files; rank 3's is named *rank3*.")],
    ranks: Annotated[int | None, typer.Option(help="How many ranks there were: one that left no file counts.")] = None,
    strict: Annotated[
        bool, typer.Option(help="For Jenkins' xUnit plugin: a test's properties become lines of its output.")
    ] = False,
) -> None:
    """Make one file of those of ranks, workers and attempts.

    A test of several ranks becomes one case, as bad as the worst of them; attempts of one rank become retries of it.
    """
    from oracle.report import junit as report
    from oracle.report.junit_merge import merge_reports
    from oracle.report.junit_summary import summarise

    with usage_errors():
        given = [file.resolve() for file in files]
        for file in given:
            if given.count(file) > 1 or file == output.resolve():
                what = "it is given twice" if given.count(file) > 1 else "it is OUT as well"
                raise ValueError(f"file={str(file)!r} is not accepted: {what}, and would count as another attempt.")
        if ranks is not None and ranks < 1:
            raise ValueError(f"ranks={ranks} is not accepted: give at least 1.")
        suites = merge_reports({file: report.read_report(file) for file in files}, ranks)
    report.write_report(output, report.strict(suites) if strict else suites)
    _say(f"{output}: {len(files)} files, {summarise(suites).headline}")


@junit.command(epilog="Example: `wanref junit summary junit.xml --markdown >> $GITHUB_STEP_SUMMARY`")
def summary(
    file: FileArgument,
    markdown: Annotated[bool, typer.Option(help="Markdown, for the page of a CI job.")] = False,
) -> None:
    """Say in short what a file has: counts, failures with their sentences, skips with their reasons, the slowest."""
    from oracle.report.junit import read_report
    from oracle.report.junit_summary import markdown_lines, subjects_of, summarise, text_lines
    from oracle.report.stale import checked_out, describe_revision

    with usage_errors():
        suites = read_report(file)
    subjects = [describe_revision(each, checked_out(each.name, Path.cwd())) for each in subjects_of(suites)]
    for line in (markdown_lines if markdown else text_lines)(summarise(suites), subjects):
        _say(line)


@junit.command(epilog="Example: `wanref junit diff main.xml head.xml`")
def diff(
    base: Annotated[Path, typer.Argument(help="JUnit file of what was there before.")],
    head: Annotated[Path, typer.Argument(help="JUnit file of what is there now.")],
) -> None:
    """Say which failures are new, gone or the same. Exit code 1 only for new ones.

    A test that failed before and fails with another message counts as new: it may be another fault.
    """
    from oracle.report.junit import read_report
    from oracle.report.junit_diff import diff_reports

    with usage_errors():
        failures = diff_reports(read_report(base), read_report(head))
    for each in failures:
        _say(f"{each.change:8} {each.identity}: {each.says}{f' ({each.note})' if each.note else ''}")
    counts = {change: sum(each.change == change for each in failures) for change in ("new", "changed", "same", "gone")}
    _say(", ".join(f"{count} {change}" for change, count in counts.items()))
    if any(each.is_new for each in failures):
        raise typer.Exit(1)


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
