"""`wanref verify`: the triplet in every topology, held against the declared contracts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from wanref.caching.spec import CacheSpec, parse_cache
from wanref.checkpoint import open_checkpoint
from wanref.cli import CheckpointArgument, Guidance, Steps, app, console, errors, usage_errors
from wanref.option import DTYPES, check_choice
from wanref.request import EngineDefaults, Request
from wanref.resolver import resolve
from wanref.topology import parse_topology

TOPOLOGIES = ("pp1cfg1", "pp1cfg2", "pp2cfg1", "pp2cfg2")
PROMPT = "a red circle moving left over stripes"


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
    junit: Annotated[Path | None, typer.Option(help="JUnit file to write: a test case a claim.")] = None,
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
    from oracle.report.junit import write_report
    from oracle.report.tables import verdict_table
    from oracle.report.verdicts import as_suite

    started = time.monotonic()
    with RankPool() as pool, Progress(console=errors, transient=True) as progress:
        task = progress.add_task("recording", total=len(matrix.run))
        failed = record_matrix(matrix, folder, pool, lambda name: progress.update(task, advance=1, description=name))
    rows = list(judge_matrix(matrix, folder, failed))
    console.print(verdict_table(rows, f"{checkpoint}: {sum(row.verdict.holds for row in rows)} of {len(rows)} hold"))
    console.print(f"traces   {folder}", highlight=False, soft_wrap=True)
    if junit is not None:
        write_report(junit, [as_suite("verify", rows, time.monotonic() - started)])
        console.print(f"junit    {junit}", highlight=False, soft_wrap=True)
    if not all(row.verdict.holds for row in rows):
        raise typer.Exit(1)


def _named(caches: Sequence[str]) -> dict[str, CacheSpec]:
    """Caches by the names of their folders: the method, numbered where it comes again."""
    named: dict[str, CacheSpec] = {}
    for text in caches:
        spec = parse_cache(text)
        again = sum(each.method == spec.method for each in named.values())
        named[f"{spec.method}-{again + 1}" if again else spec.method] = spec
    return named
