"""The `wanref` command, to which the oracle adds its verbs.

The console script points here, so that wanref itself needs no import of the oracle. torch is imported by the verbs that
run something, and not by those that read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from oracle.commands import diff, verify  # noqa: F401  # each adds its verb to the command
from oracle.commands.traces import traces
from wanref.checkpoint import open_checkpoint
from wanref.cli import app, console, errors, usage_errors

MUTANTS = Path("artifacts/mutants.json")

app.add_typer(traces, name="trace")


def main() -> None:
    app(prog_name="wanref")


@app.command(epilog="Example: `wanref mutants --single fixtures/micro --dual fixtures/micro-dual`")
def mutants(
    single: Annotated[Path, typer.Option(help="Folder of a small checkpoint with one expert.")],
    dual: Annotated[Path, typer.Option(help="Folder of a small checkpoint with two experts.")],
    sample: Annotated[int | None, typer.Option(help="So many faults at random, of all kinds; default: all.")] = None,
    benign: Annotated[int, typer.Option(help="So many benign variants, drawn at random.")] = 300,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    workers: Annotated[int, typer.Option(help="Pools of ranks at work at a time.")] = 2,
    output: Annotated[Path, typer.Option(help="Where the score is written, with a row for each.")] = MUTANTS,
) -> None:
    """Try the oracle: plant known faults, and run benign variants in which it must find nothing.

    Exit code 0 only if all faults were found, 95 % of them pointed at exactly, and there was no false alarm.
    """
    from oracle.faults.benign import draw_variants
    from oracle.faults.catalogue import FAULTS
    from oracle.faults.score import sample_faults, score
    from oracle.report.mutants import score_table, write_score

    with usage_errors():
        open_checkpoint(single)
        open_checkpoint(dual)
        for name, value, least in (("sample", sample, 1), ("benign", benign, 0), ("workers", workers, 1)):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} is not accepted: give at least {least}.")
    faults = FAULTS if sample is None else sample_faults(FAULTS, sample, seed)
    variants = tuple(draw_variants(benign, seed))
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("trying", total=len(faults) + benign)
        result = score(
            faults,
            variants,
            {"single": single, "dual": dual},
            workers,
            lambda name: progress.update(task, advance=1, description=name),
        )
    write_score(output, result)
    console.print(score_table(result))
    console.print(f"score    {output}", highlight=False, soft_wrap=True)
    if not result.passes:
        raise typer.Exit(1)
