"""What `wanref generate` runs: one request on one rank or several, written to files by the rank that owns the video."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from wanref.caching.report import Tally, print_tallies, tally
from wanref.caching.spec import CacheSpec
from wanref.files import output_kind, write_each, write_frames, write_latents, write_video
from wanref.launch import is_rank, launch
from wanref.observe import Event, RequestEvent, StepEvent
from wanref.option import DEVICES, DTYPES, check_choice
from wanref.request import EngineDefaults, Request
from wanref.topology import Topology

if TYPE_CHECKING:
    from wanref.output import Output
    from wanref.pipeline import WanReference


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """Everything that a rank needs to know; travels to local ranks by pickling."""

    checkpoint: str
    topology: Topology
    request: Request
    defaults: EngineDefaults
    dtype: str
    vae_dtype: str
    device: str
    threads: int
    output: Path
    fps: int
    cache: CacheSpec | None = None

    def __post_init__(self) -> None:
        # As `from_pretrained` does, but before it is imported, and torch with it.
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("vae_dtype", self.vae_dtype, DTYPES)
        check_choice("device", self.device, DEVICES)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank has to say: lines for people, or why it refused or failed.

    tallies: what the cache did on all ranks, from the one rank that tells of it; None from the others.
    """

    lines: tuple[str, ...] = ()
    tallies: tuple[Tally, ...] | None = None
    refusal: str | None = None
    failure: str | None = None


def run_generate(job: GenerateJob, console: Console) -> None:
    """Run the job here, on ranks started here, or as a rank of torchrun. Exits with 1 on failure.

    Raises ValueError for what was refused.
    """
    if is_rank():
        reports = [generate_on_rank(job)]
    else:
        os.environ["OMP_NUM_THREADS"] = str(job.threads)
        reports = _on_local_ranks(job)
    for report in reports:
        if report.refusal is not None:
            raise ValueError(report.refusal)
    for report in reports:
        if report.failure is not None:
            message = f"[bold red]failed:[/] {escape(report.failure)}"
            Console(stderr=True).print(message, highlight=False, soft_wrap=True)
            raise typer.Exit(1)
    for report in reports:
        for line in report.lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if job.cache is not None and report.tallies is not None:
            print_tallies(job.cache, report.tallies, console)


def generate_on_rank(job: GenerateJob) -> RankReport:
    """One rank's part."""
    import diffusers
    import torch
    import transformers

    from wanref.exchange import ExchangeError
    from wanref.liveness import RankFailure
    from wanref.pipeline import WanReference

    torch.set_num_threads(job.threads)
    # One bar is enough, and several ranks would write over each other's.
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        with _progress() as progress:
            engine = WanReference.from_pretrained(
                job.checkpoint,
                topology=job.topology,
                dtype=job.dtype,
                vae_dtype=job.vae_dtype,
                device=job.device,
                defaults=job.defaults,
                observer=progress,
                cache=job.cache,
            )
            output = engine(job.request)
            tallies = _gather_tallies(engine, output)
    except ValueError as error:
        return RankReport(refusal=str(error))
    except (ExchangeError, RankFailure) as error:
        return RankReport(failure=str(error))
    if output.rank != output.owner:
        return RankReport()
    try:
        return RankReport(_lines(output, _write(job, output)), tallies)
    except (OSError, ValueError) as error:  # some of PyAV's errors are ValueErrors
        return RankReport(failure=f"could not write {job.output}: {error}")


def _gather_tallies(engine: WanReference, output: Output) -> tuple[Tally, ...]:
    """The rows of all ranks. A rank that had no branch to run has none, and says nothing of whether the cache fired."""
    if engine.cache is None:
        return ()
    own = tally(output.decisions, len(next(iter(engine.stages.values())).stack))
    rows = [row for of_rank in engine.exchange.gather_notes(own) for row in of_rank]
    return tuple(sorted(rows, key=lambda row: (row.expert, row.stage, row.branch)))


def _on_local_ranks(job: GenerateJob) -> list[RankReport]:
    if job.topology.world_size == 1:
        return [generate_on_rank(job)]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        return list(launch(generate_on_rank, job.topology, job).values())
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return [RankReport(failure=f"rank {rank} ended with exit code {failure.exitcode}: {failure.message}")]


def _write(job: GenerateJob, output: Output) -> list[Path]:
    kind = output_kind(job.output)
    if kind == "latent":
        write_latents(job.output, output.latents, {"request": json.dumps(output.request.as_json())})
        return [job.output]
    assert output.video is not None, "the owner has the video unless latents were asked for"
    if kind == "frames":
        return write_each(job.output, output.video, write_frames)
    return write_each(job.output, output.video, lambda path, frames: write_video(path, frames, job.fps))


def _lines(output: Output, paths: list[Path]) -> tuple[str, ...]:
    request, split = output.request, output.schedule.split
    seeds = ", ".join(str(noise.seed) for noise in request.noise)
    experts = f"{split['high']} high + {split['low']} low" if request.boundary_ratio is not None else "one expert"
    lines = [
        f"{request.videos} x {request.height}x{request.width}, {request.frames} frames",
        f"{len(output.schedule)} steps ({experts}), {request.scheduler}, flow shift {request.flow_shift:g}",
        f"seed {seeds} ({request.sources['seed']})",
        f"topology {output.topology}, decoded on rank {output.owner}",
    ]
    if output.idle_ranks:
        lines.append(f"guidance is off: ranks {', '.join(map(str, output.idle_ranks))} had no branch to run")
    return (*lines, *(f"wrote {path}" for path in paths))


@contextmanager
def _progress() -> Iterator[_StepBar | None]:
    if os.environ.get("RANK", "0") != "0":
        yield None
        return
    columns = (TextColumn("denoising"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _StepBar(progress)


class _StepBar:
    """An observer that moves a progress bar."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, RequestEvent) and event.outcome is None:
            self.task = self.progress.add_task("", total=len(event.schedule))
        elif isinstance(event, StepEvent):
            self.progress.update(self.task, completed=event.step.index)
        elif isinstance(event, RequestEvent):
            self.progress.update(self.task, completed=len(event.schedule))
