"""`wanref campaign ...`: calibrates, freezes and accepts cache profiles, from one file, in one folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from wanref.cli import console, errors, usage_errors

campaign = typer.Typer(help="Qualify cache profiles.", no_args_is_help=True, rich_markup_mode="markdown")


@campaign.command(epilog="Example: `wanref campaign run fixtures/campaigns/small.toml artifacts/campaign`")
def run(
    plan: Annotated[Path, typer.Argument(metavar="FILE", help="The campaign's TOML file.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where all of it is kept; resumed where it was.")],
    workers: Annotated[int, typer.Option(help="Pools of ranks at work at a time.", min=1)] = 2,
) -> None:
    """Run a campaign, or go on with one that was killed. Exit code 0 only if every topology has a qualified profile."""
    from oracle.campaign.plan import read_plan

    with usage_errors():
        read = read_plan(plan)
    from oracle.campaign.campaign import run_campaign
    from oracle.campaign.pools import OnPools
    from oracle.campaign.shards import Progress as Done
    from oracle.evidence.ranks import RankPool

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ExitStack() as stack, Progress(*columns, console=errors, transient=True) as progress:
        pools = tuple(stack.enter_context(RankPool()) for _ in range(workers))
        tasks: dict[str, int] = {}

        def report(what: str, done: Done) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=done.total)
            progress.update(tasks[what], completed=done.done, total=done.total)  # type: ignore[arg-type]

        ended = run_campaign(read, folder, OnPools(pools), pools[0], report)
    table = Table("topology", "gate", "value", "limit", "", title=f"{read.name}: {folder}")
    for each in ended:
        if each.acceptance is None:
            table.add_row(each.topology, "", "", "", f"[bold red]not accepted[/]: {each.refused}")
            continue
        for name, outcome in each.acceptance.outcomes().items():
            word = "[green]passed[/]" if outcome.passed else "[bold red]failed[/]"
            table.add_row(each.topology, name, f"{outcome.value:.4f}", f"{outcome.limit:g}", word)
        table.add_row(each.topology, "beside the control", "", "", each.worth)
    console.print(table)
    for each in ended:
        if each.profile is not None:
            console.print(f"profile  {each.profile}", highlight=False, soft_wrap=True)
    if not all(each.acceptance is not None and each.acceptance.passed for each in ended):
        raise typer.Exit(1)


@campaign.command(epilog="Example: `wanref campaign verify fixtures/campaigns/micro.toml PROFILE.json --first 1`")
def verify(
    plan: Annotated[Path, typer.Argument(metavar="FILE", help="The campaign's TOML file.")],
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile, with its evidence beside it.")],
    first: Annotated[int | None, typer.Option(help="So many rounds of pairs; default: all.", min=1)] = None,
    workers: Annotated[int, typer.Option(help="Pools of ranks at work at a time.", min=1)] = 2,
) -> None:
    """Render the acceptance pairs again and judge them anew. Exit code 0 only if the profile is what it says."""
    from oracle.campaign.plan import read_plan

    with usage_errors():
        read = read_plan(plan)
    import tempfile

    from oracle.campaign.pools import OnPools
    from oracle.campaign.shards import Progress as Done
    from oracle.campaign.verify import verify_profile
    from oracle.evidence.ranks import RankPool

    with (
        ExitStack() as stack,
        tempfile.TemporaryDirectory(prefix="verify-") as folder,
        Progress(console=errors, transient=True) as progress,
    ):
        pools = tuple(stack.enter_context(RankPool()) for _ in range(workers))
        task = progress.add_task("rendering")

        def report(what: str, done: Done) -> None:
            progress.update(task, completed=done.done, total=done.total, description=what)

        with usage_errors():
            verified = verify_profile(read, profile, Path(folder), OnPools(pools), report, first)
    for name, outcome in verified.outcomes.items():
        word = "passed" if outcome.passed else "failed"
        console.print(f"{name:16} {outcome.value:.4f}, limit {outcome.limit:g}: {word}", highlight=False)
    console.print(f"{verified.alike} of {verified.rendered} pairs are byte for byte as they were accepted")
    for sentence in verified.wrong:
        console.print(f"[bold red]wrong[/]    {sentence}", highlight=False, soft_wrap=True)
    if verified.wrong or not verified.profile.qualified:
        raise typer.Exit(1)


@campaign.command(epilog="Example: `wanref campaign report fixtures/campaigns/micro.toml artifacts/campaign/micro`")
def report(
    plan: Annotated[Path, typer.Argument(metavar="FILE", help="The campaign's TOML file.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where it was run.")],
    output: Annotated[Path | None, typer.Option(help="NAME.html; default: campaign.html in the folder.")] = None,
) -> None:
    """Show what a campaign has so far on one HTML page that needs no network."""
    from oracle.campaign.plan import read_plan

    with usage_errors():
        read = read_plan(plan)
    from oracle.report.campaign_page import NAME, check_folder, write_campaign_page

    target = folder / NAME if output is None else output
    with usage_errors():
        check_folder(folder, read)
    console.print(write_campaign_page(read, folder, target), highlight=False)
    console.print(f"page     {target}", highlight=False, soft_wrap=True)


@campaign.command(epilog="Example: `wanref campaign status artifacts/campaign/micro`")
def status(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where it is run.")]) -> None:
    """Say how far a campaign is, while it runs or after it was killed. Run it again, and it goes on."""
    import json

    from oracle.campaign.shards import ATTEMPTS

    with usage_errors():
        if not any(folder.rglob("*.safetensors")):
            raise ValueError(f"folder={str(folder)!r} is not accepted: no shard of a campaign is in it.")
    for part in sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "profiles"):
        console.print(f"{part.name:12} {sum(1 for _ in part.rglob('*.safetensors'))} shards", highlight=False)
    for record in sorted([*folder.glob("*.json"), *folder.glob("profiles/*.json")]):
        console.print(f"{'written':12} {record.relative_to(folder)}", highlight=False, soft_wrap=True)
    attempts = folder / ATTEMPTS
    lines = attempts.read_text("utf-8").splitlines() if attempts.exists() else []
    for line in lines[-5:]:
        said = json.loads(line)
        words = f"{said['outcome']:12} {said['shard']}: {said['reason']}"
        console.print(words, markup=False, highlight=False, soft_wrap=True)
