"""The `wanref` command. torch and diffusers are imported by the verbs that run, not by `--help`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wanref.caching.scope import SCOPES, Scope
from wanref.caching.spec import CacheSpec, parse_cache
from wanref.checkpoint import EXPERT_FOLDERS, open_checkpoint
from wanref.request import SCHEDULER_CLASSES, EngineDefaults, Request, ResolvedRequest
from wanref.resolver import resolve

app = typer.Typer(
    help="A reference Wan 2.1 / 2.2 video pipeline: plain, exact, the same bytes in every topology.",
    epilog="Example: `wanref generate fixtures/micro --prompt 'a red circle moving left' --output circle.mp4`",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
console = Console()
errors = Console(stderr=True)

CheckpointArgument = Annotated[str, typer.Argument(help="Folder in diffusers layout, or hub id org/name[@revision].")]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.")]
Guidance = Annotated[float | None, typer.Option(help="Guidance scale; up to 1 the negative branch does not run.")]
Guidance2 = Annotated[float | None, typer.Option(help="Guidance scale of the low-noise expert.")]
Boundary = Annotated[float | None, typer.Option(help="Share of the timesteps below which the low-noise expert runs.")]
Shift = Annotated[float | None, typer.Option(help="Flow shift.")]
ShiftBySteps = Annotated[str | None, typer.Option(help="The engine's flow shifts by step count, as 27:12,40:5.")]
Scheduler = Annotated[str | None, typer.Option(help=f"One of {', '.join(SCHEDULER_CLASSES)}.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command(epilog="Example: `wanref generate fixtures/micro --prompt 'a red circle moving left' --output circle.mp4`")
def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[list[str], typer.Option(help="What to show. Repeat for a batch.")],
    output: Annotated[Path, typer.Option(help="NAME.mp4, NAME.safetensors for latents, or NAME for a folder of PNGs.")],
    negative_prompt: Annotated[str | None, typer.Option(help="What to avoid.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    frames: Annotated[int | None, typer.Option(help="4n + 1 of them.")] = None,
    steps: Steps = None,
    guidance_scale: Guidance = None,
    guidance_scale_2: Guidance2 = None,
    boundary_ratio: Boundary = None,
    flow_shift: Shift = None,
    flow_shift_by_steps: ShiftBySteps = None,
    scheduler: Scheduler = None,
    seed: Annotated[int | None, typer.Option(help="Without one, a seed is drawn and printed.")] = None,
    videos_per_prompt: Annotated[int, typer.Option(help="Videos for each prompt.")] = 1,
    topology: Annotated[
        str, typer.Option(help="ppNcfgM: pipeline stages x branch chains. Local ranks are started.")
    ] = "pp1cfg1",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    vae_dtype: Annotated[str, typer.Option(help="Likewise, for decoding.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[
        int, typer.Option(help="CPU threads a rank. Bytes can differ between thread counts.", min=1)
    ] = 1,
    fps: Annotated[int, typer.Option(help="Frames a second of an MP4.", min=1)] = 16,
    cache: Annotated[
        str | None, typer.Option(help="METHOD:option=value,... or a profile (*.json); see `inspect`.")
    ] = None,
    force_compute: Annotated[bool, typer.Option(help="Evaluate the cache's every decision, then compute.")] = False,
) -> None:
    """Generate videos. Under torchrun it joins the ranks that are there."""
    from wanref.files import output_kind
    from wanref.generate import GenerateJob, run_generate
    from wanref.topology import parse_topology

    with usage_errors():
        kind = output_kind(output, len(prompt) * videos_per_prompt)
        request = Request(
            prompt=prompt,
            negative_prompt=negative_prompt,
            height=height,
            width=width,
            frames=frames,
            steps=steps,
            guidance_scale=guidance_scale,
            guidance_scale_2=guidance_scale_2,
            boundary_ratio=boundary_ratio,
            flow_shift=flow_shift,
            scheduler=scheduler,  # type: ignore[arg-type]  # checked by resolve
            seed=seed,
            videos_per_prompt=videos_per_prompt,
            output_type="latent" if kind == "latent" else "video",
        )
        defaults = _defaults(flow_shift_by_steps, steps)
        # Refused here, what cannot be honoured costs no import of torch and no start of ranks.
        grid, opened = parse_topology(topology), open_checkpoint(checkpoint)
        grid.blocks(0, opened.transformer["num_layers"])
        resolve(request, defaults, opened)
        job = GenerateJob(
            checkpoint=checkpoint,
            topology=grid,
            request=request,
            defaults=defaults,
            dtype=dtype,
            vae_dtype=vae_dtype,
            device=device,
            threads=threads,
            output=output,
            fps=fps,
            cache=_cache(cache, force_compute),
        )
        run_generate(job, console)


@app.command(
    name="schedule",
    epilog="Example: `wanref schedule fixtures/micro-dual --steps 40 --flow-shift 12 --boundary-ratio 0.875`",
)
def show_schedule(
    checkpoint: CheckpointArgument,
    steps: Steps = None,
    guidance_scale: Guidance = None,
    guidance_scale_2: Guidance2 = None,
    boundary_ratio: Boundary = None,
    flow_shift: Shift = None,
    flow_shift_by_steps: ShiftBySteps = None,
    scheduler: Scheduler = None,
    as_json: AsJson = False,
) -> None:
    """Show which expert runs which step, at which timestep, sigma and guidance, and what decided each value."""
    with usage_errors():
        opened = open_checkpoint(checkpoint)
        request = Request(
            prompt="",
            steps=steps,
            guidance_scale=guidance_scale,
            guidance_scale_2=guidance_scale_2,
            boundary_ratio=boundary_ratio,
            flow_shift=flow_shift,
            scheduler=scheduler,  # type: ignore[arg-type]  # checked by resolve
        )
        resolved = resolve(request, _defaults(flow_shift_by_steps, steps), opened)
        from wanref.schedule import build_schedule, make_solver

        schedule = build_schedule(resolved, opened, make_solver(resolved, opened))
    if as_json:
        rows = [
            {
                "index": step.index,
                "timestep": step.timestep,
                "sigma": step.sigma,
                "expert": step.expert,
                "guidance_scale": step.guidance_scale,
            }
            for step in schedule
        ]
        _print_json({"steps": rows, "split": schedule.split, "sources": _schedule_sources(resolved)})
        return
    table = Table(
        "step", "timestep", "sigma", "expert", "guidance", "branches", title=escape(f"{opened.name} ({opened.kind})")
    )
    for step in schedule:
        branches = "cond, uncond" if step.guided else "cond"
        row = (step.index, f"{step.timestep:g}", f"{step.sigma:.6f}", step.expert, f"{step.guidance_scale:g}", branches)
        table.add_row(*map(str, row))
    console.print(table)
    console.print(", ".join(f"{expert}: {count} steps" for expert, count in schedule.split.items()))
    console.print(_effective_table(resolved, tuple(_schedule_sources(resolved))))


@app.command(epilog="Example: `wanref inspect fixtures/micro-dual`")
def inspect(checkpoint: CheckpointArgument, as_json: AsJson = False) -> None:
    """Show a checkpoint's experts, configs and identity."""
    with usage_errors():
        opened = open_checkpoint(checkpoint)
        with errors.status("Reading the weights for their digest (remembered for the next time)"):
            identity = opened.identity()
    if as_json:
        experts = {expert: dict(config) for expert, config in opened.experts.items()}
        facts = {"name": opened.name, "kind": opened.kind, "identity": identity, "experts": experts}
        scheduler = {"class": opened.scheduler_class, **opened.scheduler}
        caches = {name: asdict(scope) for name, scope in SCOPES.items()}
        rest = {"boundary_ratio": opened.boundary_ratio, "scheduler": scheduler, "vae": dict(opened.vae)}
        _print_json(facts | rest | {"caches": caches})
        return
    title = f"[bold]{escape(opened.name)}[/]: {opened.kind}, boundary_ratio {opened.boundary_ratio}"
    console.print(title, soft_wrap=True)
    console.print(f"identity {identity}", soft_wrap=True)
    console.print(f"scheduler {opened.scheduler_class}, flow_shift {opened.flow_shift}")
    table = Table("config", *(f"{expert} ({EXPERT_FOLDERS[expert]})" for expert in opened.experts))
    for key in opened.transformer:
        table.add_row(key, *(str(config.get(key)) for config in opened.experts.values()))
    console.print(table)
    scopes = Table("cache supports", *SCOPES)
    for dimension in fields(Scope):
        scopes.add_row(dimension.name, *(getattr(scope, dimension.name) for scope in SCOPES.values()))
    console.print(scopes)


@contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError is something that was asked for and cannot be had: exit code 2, one message, no traceback."""
    try:
        yield
    except ValueError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _defaults(flow_shift_by_steps: str | None, steps: int | None) -> EngineDefaults:
    """The command is an engine of one request: the step count asked for is its own, and need not be 50 as well."""
    if steps is None:
        return EngineDefaults(flow_shift_by_steps=flow_shift_by_steps)
    return EngineDefaults(flow_shift_by_steps=flow_shift_by_steps, steps=steps)


def _cache(text: str | None, forced: bool) -> CacheSpec | None:
    if text is not None:
        return parse_cache(text, forced)
    if forced:
        raise ValueError("force_compute is for a cache, and there is none: give --cache, too.")
    return None


def _schedule_sources(resolved: ResolvedRequest) -> dict[str, str]:
    names = ("steps", "scheduler", "flow_shift", "boundary_ratio", "guidance_scale", "guidance_scale_2")
    return {name: resolved.sources[name] for name in names if name in resolved.sources}


def _effective_table(resolved: ResolvedRequest, names: tuple[str, ...]) -> Table:
    table = Table("option", "value", "decided by")
    for name in names:
        over = ", over the request" if name in resolved.overridden else ""
        table.add_row(name, str(getattr(resolved, name)), resolved.sources[name] + over)
    return table


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
