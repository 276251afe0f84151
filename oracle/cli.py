"""The `wanref` command, to which the oracle adds its verbs.

The console script points here, so that wanref itself needs no import of the oracle. torch is imported by the verbs that
run something, and not by those that read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from oracle.commands import audit, diff, report, verify  # noqa: F401  # each adds its verb to the command
from oracle.commands.campaign import campaign
from oracle.commands.junit import junit
from oracle.commands.traces import traces
from wanref.checkpoint import open_checkpoint
from wanref.cli import app, console, errors, usage_errors

MUTANTS = Path("artifacts/mutants.json")

app.add_typer(traces, name="trace")
app.add_typer(junit, name="junit")
app.add_typer(campaign, name="campaign")


def main() -> None:
    app(prog_name="wanref")


@app.command(epilog="Example: `wanref mutants --single fixtures/micro --dual fixtures/micro-dual`")
def mutants(
    single: Annotated[Path, typer.Option(help="Folder of a small checkpoint with one expert.")],
    dual: Annotated[Path, typer.Option(help="Folder of a small checkpoint with two experts.")],
    sample: Annotated[int | None, typer.Option(help="So many faults at random, of all kinds; default: all.")] = None,
    benign: Annotated[int, typer.Option(help="So many benign variants whose bytes must match, at random.")] = 300,
    bounded: Annotated[int, typer.Option(help="So many benign kernels in bf16, drawn at random.")] = 60,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    workers: Annotated[int, typer.Option(help="Pools of ranks at work at a time.")] = 2,
    output: Annotated[Path, typer.Option(help="Where the score is written, with a row for each.")] = MUTANTS,
) -> None:
    """Try the oracle: plant known faults, and run benign variants in which it must find nothing.

    Where bytes are claimed, and in bf16 beside other kernels, where only bounds are. Exit code 0 only if of both all
    faults were found, 95 % of them pointed at exactly, and there was no false alarm.
    """
    from oracle.faults.benign import draw_variants
    from oracle.faults.catalogue import BOUNDED_FAULTS, FAULTS
    from oracle.faults.kernels import draw_kernels
    from oracle.faults.score import sample_faults, score
    from oracle.report.mutants import score_table, write_score

    with usage_errors():
        open_checkpoint(single)
        open_checkpoint(dual)
        least = {"sample": 1, "benign": 0, "bounded": 0, "workers": 1}
        for name, value in {"sample": sample, "benign": benign, "bounded": bounded, "workers": workers}.items():
            if value is not None and value < least[name]:
                raise ValueError(f"{name}={value} is not accepted: give at least {least[name]}.")
    faults = (*FAULTS, *BOUNDED_FAULTS) if sample is None else sample_faults((*FAULTS, *BOUNDED_FAULTS), sample, seed)
    variants = (*draw_variants(benign, seed), *draw_kernels(bounded, seed))
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("trying", total=len(faults) + len(variants))
        result = score(
            faults,
            variants,
            {"single": single, "dual": dual},
            workers,
            lambda name: progress.update(task, advance=1, description=name),
        )
    write_score(output, result)
    for part in (result.part(bounded=False), result.part(bounded=True)):
        if part.rows:
            console.print(score_table(part))
    console.print(f"score    {output}", highlight=False, soft_wrap=True)
    if not result.passes:
        raise typer.Exit(1)
