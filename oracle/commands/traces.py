"""`wanref trace ...`: looks into recorded traces. torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wanref.cli import console, usage_errors

traces = typer.Typer(help="Look into recorded traces.", no_args_is_help=True, rich_markup_mode="markdown")

TraceArgument = Annotated[Path, typer.Argument(help="Folder of a trace.")]


@traces.command(epilog="Example: `wanref trace validate traces/pp2cfg1/native`")
def validate(folder: TraceArgument) -> None:
    """Hold a trace against the published schema. Exit code 1 if anything is wrong or missing."""
    from oracle.evidence.reader import open_trace
    from oracle.evidence.validate import check_trace
    from oracle.verdict.align import align

    with usage_errors():
        trace = open_trace(folder)
        problems = list(dict.fromkeys([*check_trace(folder), *map(str, align(trace).holes)]))
    for problem in problems:
        console.print(problem, markup=False, highlight=False, soft_wrap=True)
    if problems:
        console.print(f"{len(problems)} problems in {folder}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)
    events = sum(len(records) for records in trace.records.values())
    console.print(f"{folder}: valid, {events} events of {trace.world_size} ranks", highlight=False, soft_wrap=True)


@traces.command(epilog="Example: `wanref trace show traces/pp2cfg1/native`")
def show(folder: TraceArgument) -> None:
    """Show a trace as tables of steps x blocks, with the decisions of a cache."""
    from oracle.evidence.reader import open_trace
    from oracle.report.tables import LEGEND, trace_tables
    from oracle.verdict.align import align

    with usage_errors():
        aligned = align(open_trace(folder))
    for table in trace_tables(aligned):
        console.print(table)
    console.print(LEGEND, highlight=False)
    for hole in aligned.holes:
        console.print(f"[bold red]missing[/] {hole}", highlight=False, soft_wrap=True)


@traces.command(epilog="Example: `wanref trace log engine.log --against traces/native`")
def log(
    file: Annotated[Path, typer.Argument(help="What an engine printed, with Cache-DiT's context lines.")],
    against: Annotated[Path, typer.Option(help="A trace of the run, whose schedule the caches must fit.")],
    request: Annotated[int, typer.Option(help="Which request of the trace.", min=0)] = 0,
) -> None:
    """Hold the caches that an engine logged against the schedule that it ran. Exit code 1 if one does not fit."""
    from oracle.evidence.context_line import read_context_lines
    from oracle.evidence.reader import open_trace
    from oracle.verdict.align import align
    from oracle.verdict.logged import check_contexts

    with usage_errors():
        aligned = align(open_trace(against))
        if request not in aligned.requests:
            raise ValueError(f"request={request} is not accepted: {against} has {len(aligned.requests)} requests.")
        with file.open(encoding="utf-8", errors="replace") as lines:
            facts = list(read_context_lines(lines))
        if not facts:
            raise ValueError(f"file={str(file)!r} is not accepted: it has no context line of Cache-DiT.")
        grid = aligned.topology
        layers = len(grid.blocks(0, aligned.manifest["layers"]))
        schedule = aligned.requests[request].schedule or ()
        findings = list(check_contexts(facts, schedule, layers, grid.cfg))
    for finding in findings:
        console.print(f"{finding.spot.expert}: {finding.says}", highlight=False, soft_wrap=True, markup=False)
    if findings:
        raise typer.Exit(1)
    console.print(f"{len(facts)} context lines fit their schedule", highlight=False)
