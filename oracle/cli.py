"""The `wanref` command, to which the oracle adds its verbs.

The console script points here, so that wanref itself needs no import of the oracle. torch is imported by the verbs that
run something, and not by those that read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from oracle.commands.traces import traces
from wanref.caching.spec import CacheSpec, parse_cache
from wanref.checkpoint import open_checkpoint
from wanref.cli import CheckpointArgument, Guidance, Steps, app, console, errors, usage_errors
from wanref.option import DTYPES, check_choice
from wanref.request import EngineDefaults, Request
from wanref.resolver import resolve
from wanref.topology import parse_topology

TOPOLOGIES = ("pp1cfg1", "pp1cfg2", "pp2cfg1", "pp2cfg2")
MUTANTS = Path("artifacts/mutants.json")
PROMPT = "a red circle moving left over stripes"

app.add_typer(traces, name="trace")


def main() -> None:
    app(prog_name="wanref")


@app.command(
    epilog="Example: `wanref verify fixtures/micro --steps 8 --traces traces "
    "--cache cache-dit:threshold=0.3,max_warmup_steps=2`"
)
def verify(
    checkpoint: CheckpointArgument,
    folder: Annotated[Path, typer.Option("--traces", help="New folder for the traces, which are kept.")],
    topology: Annotated[list[str] | None, typer.Option(help="Repeat for several; default: all four.")] = None,
    cache: Annotated[list[str] | None, typer.Option(help="METHOD:option=value,... or a profile; repeat.")] = None,
    prompt: Annotated[str, typer.Option(help="What the request shows.")] = PROMPT,
    height: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    frames: Annotated[int | None, typer.Option(help="4n + 1 of them.")] = None,
    steps: Steps = None,
    guidance_scale: Guidance = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial noise.")] = 7,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Record native, forced and cached runs in each topology, and hold them against the declared contracts.

    Exit code 0 only if every contract was shown to hold: missing evidence is a failure.
    """
    from oracle.verdict.matrix import Matrix, judge_matrix, record_matrix

    with usage_errors():
        opened = open_checkpoint(checkpoint)
        for name in topology or TOPOLOGIES:
            parse_topology(name).blocks(0, opened.transformer["num_layers"])
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"traces={str(folder)!r} is not accepted: it is not empty. Give a new folder.")
        matrix = Matrix(
            checkpoint=checkpoint,
            request=Request(
                prompt=prompt,
                height=height,
                width=width,
                frames=frames,
                steps=steps,
                guidance_scale=guidance_scale,
                seed=seed,
            ),
            topologies=tuple(topology or TOPOLOGIES),
            caches=_named(cache or ()),
            defaults=EngineDefaults() if steps is None else EngineDefaults(steps=steps),
            dtype=dtype,
        )
        check_choice("dtype", dtype, DTYPES)
        resolve(matrix.request, matrix.defaults, opened)
        from wanref.caching.registry import build_cache

        for name in matrix.run:
            for spec in matrix.caches.values():
                build_cache(spec, opened, parse_topology(name))
    from oracle.evidence.ranks import RankPool
    from oracle.report.tables import verdict_table

    with RankPool() as pool, Progress(console=errors, transient=True) as progress:
        task = progress.add_task("recording", total=len(matrix.run))
        failed = record_matrix(matrix, folder, pool, lambda name: progress.update(task, advance=1, description=name))
    rows = list(judge_matrix(matrix, folder, failed))
    console.print(verdict_table(rows, f"{checkpoint}: {sum(row.verdict.holds for row in rows)} of {len(rows)} hold"))
    console.print(f"traces   {folder}", highlight=False, soft_wrap=True)
    if not all(row.verdict.holds for row in rows):
        raise typer.Exit(1)


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


@app.command(epilog="Example: `wanref diff base/0 base/1 base/2 base/3 base/4 --against head/0 --against head/1`")
def diff(
    base: Annotated[list[Path], typer.Argument(help="Traces of at least 5 runs of the base, at level tensor.")],
    against: Annotated[list[Path], typer.Option(help="A trace of the head; repeat, at least twice.")],
    locked: Annotated[Path | None, typer.Option(help="Trace of the schedule that every run was to replay.")] = None,
    alarm_rate: Annotated[float, typer.Option(help="Share of false alarms that is accepted.", min=0, max=1)] = 0.05,
) -> None:
    """Say whether runs that do not repeat are the same within their noise. Exit code 0 only if they are."""
    from oracle.evidence.reader import open_trace
    from oracle.verdict.runs import compare_runs

    with usage_errors():
        schedule = None if locked is None else open_trace(locked)
        verdict = compare_runs([*map(open_trace, base)], [*map(open_trace, against)], schedule, alarm_rate)
    console.print(str(verdict), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"p {verdict.p_value:.4g}, alarm rate {verdict.alarm_rate:g} (so few runs allow {verdict.attainable:.4g} at "
        f"best); smallest visible relative distance {verdict.visible:.3g}",
        highlight=False,
        soft_wrap=True,
    )
    if verdict.kind != "same within noise":
        raise typer.Exit(1)


def _named(caches: Sequence[str]) -> dict[str, CacheSpec]:
    """Caches by the names of their folders: the method, numbered where it comes again."""
    named: dict[str, CacheSpec] = {}
    for text in caches:
        spec = parse_cache(text)
        again = sum(each.method == spec.method for each in named.values())
        named[f"{spec.method}-{again + 1}" if again else spec.method] = spec
    return named
