"""`wanref audit`: what holds of somebody else's cache on Wan, and what does not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from wanref.checkpoint import open_checkpoint
from wanref.cli import app, console, errors, usage_errors

WORDS = {True: "[green]holds[/]", False: "[bold red]fails[/]", None: "[dim]not said[/]"}


@app.command(epilog="Example: `wanref audit first-block-cache fixtures/micro fixtures/micro-dual`")
def audit(
    subject: Annotated[str, typer.Argument(help="diffusers, cache-dit, or a cache of diffusers: see the error.")],
    checkpoints: Annotated[list[str], typer.Argument(metavar="CHECKPOINT...", help="Folders; small ones will do.")],
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 8,
    size: Annotated[int, typer.Option(help="Height and width in pixels.")] = 32,
    frames: Annotated[int, typer.Option(help="4n + 1 frames.")] = 5,
    prompt: Annotated[str, typer.Option(help="Text to render.")] = "a red circle moving left over stripes",
) -> None:
    """Run a stock diffusers pipeline, with or without somebody's cache, as its users do, and say what holds of it.

    Then run the scripts of known findings about it, which need no wanref. Exit code 1 if a check fails or a finding is
    shown.
    """
    from oracle.evidence.mounts import mounts

    known = mounts(steps)
    with usage_errors():
        if subject not in ("diffusers", *known):
            raise ValueError(f"subject={subject!r} is not accepted: give one of diffusers, {', '.join(known)}.")
        if steps < 4:
            raise ValueError(f"steps={steps} is not accepted: give at least 4, so that a cache can fire.")
        folders = [open_checkpoint(each).path for each in checkpoints]

    from oracle.evidence.stock import quiet, stock_target
    from oracle.verdict.audit import CHECKS
    from oracle.verdict.audit import audit as run_audit
    from oracle.verdict.findings import findings, show
    from wanref import Request

    quiet()
    request = Request(
        prompt=prompt,
        height=size,
        width=size,
        frames=frames,
        steps=steps,
        guidance_scale=4.0,
        seed=7,
        output_type="latent",
    )
    scripts = findings(subject)
    table = Table("checkpoint", "check", "", "what was seen", title=f"{subject}, {steps} steps")
    bad = 0
    with (
        tempfile.TemporaryDirectory(prefix="audit-") as scratch,
        Progress(console=errors, transient=True) as progress,
    ):
        task = progress.add_task("auditing", total=len(CHECKS) * len(folders) + len(scripts))
        for folder in folders:
            target = stock_target(folder, known.get(subject))
            for result in run_audit(
                target,
                request,
                Path(scratch) / folder.name,
                lambda check: progress.update(task, advance=1, description=check),
            ):
                bad += result.holds is False
                table.add_row(folder.name, result.check, WORDS[result.holds], result.says)
            table.add_section()
        shown = []
        for finding in scripts:
            progress.update(task, advance=1, description=finding.script.name)
            shown.append(show(finding))
    console.print(table)
    for each in shown:
        bad += each.shown is not False
        word = {True: "shown", False: "gone", None: "broken"}[each.shown]
        console.print(f"{word:7} {each.finding.says}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"        {each.told}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"        python {each.finding.script}", markup=False, highlight=False, soft_wrap=True)
    if bad:
        raise typer.Exit(1)
