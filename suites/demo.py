"""The main job on real input: four prompts, single and dual, by stock diffusers and in every topology, byte by byte;
then the oracle's verdicts on cached runs in every topology, and one planted fault.

python -m suites.demo --artifacts artifacts/demo
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fixtures.contact_sheet import write_contact_sheet
from oracle.evidence.ranks import RankPool
from oracle.faults.scenario import Checkpoints
from oracle.report.junit import cases_of, write_report
from oracle.report.page import write_page
from suites.browser import browsing, find_chromium, take_screenshots
from suites.demo_verdicts import show_planted_fault, show_verdicts
from wanref import Request, WanReference, parse_topology
from wanref.files import write_video

FIXTURES = Path(__file__).parents[1] / "fixtures"
CHECKPOINTS: Checkpoints = {"single": FIXTURES / "micro", "dual": FIXTURES / "micro-dual"}
TOPOLOGIES = ("pp1cfg1", "pp1cfg2", "pp2cfg1", "pp2cfg2")
PROMPTS = (
    "a red circle moving left over stripes",
    "a blue square growing over dots",
    "a yellow triangle moving up over checks",
    "a green cross moving right over rings",
)
STEPS, GUIDANCE, SEED, FPS = 20, 4.0, 7, 8

Case = tuple[str, str]
"""A checkpoint's name and a prompt."""


@dataclass(frozen=True, slots=True)
class Render:
    """What one run made of a case: a digest over the bytes of latents and pixels, and the pixels."""

    digest: str
    video: np.ndarray


def render_in_topology(topology: str) -> dict[Case, Render]:
    """On a rank: every case on this rank's part of `topology`. Only the owner of the video returns renders."""
    renders: dict[Case, Render] = {}
    for name, folder in CHECKPOINTS.items():
        engine = WanReference.from_pretrained(folder, topology=topology)
        for prompt in PROMPTS:
            output = engine(Request(prompt=prompt, steps=STEPS, guidance_scale=GUIDANCE, seed=SEED))
            if output.owns_video:
                assert output.video is not None
                renders[name, prompt] = _render(output.latents, output.video[0])
    return renders


def render_with_diffusers() -> dict[Case, Render]:
    """Every case by the stock pipeline, as a user of diffusers would call it."""
    from diffusers import AutoencoderKLWan, WanPipeline

    renders: dict[Case, Render] = {}
    for name, folder in CHECKPOINTS.items():
        pipe = WanPipeline.from_pretrained(folder, dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)
        assert isinstance(pipe.vae, AutoencoderKLWan)
        for prompt in PROMPTS:
            call: dict[str, Any] = {
                "prompt": prompt,
                "height": 64,
                "width": 64,
                "num_frames": 17,
                "num_inference_steps": STEPS,
                "guidance_scale": GUIDANCE,
            }
            latents = pipe(**call, generator=torch.Generator().manual_seed(SEED), output_type="latent").frames
            video = pipe(**call, generator=torch.Generator().manual_seed(SEED), output_type="np").frames
            renders[name, prompt] = _render(latents, video[0])
    return renders


def main(artifacts: Annotated[Path, typer.Option(help="Folder for the videos and the picture.")]) -> None:
    """Run the demo. Exit code 1 if any bytes differ, a claim does not hold, or the oracle points elsewhere."""
    console = Console(width=120)
    artifacts.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs: dict[str, dict[Case, Render]] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress, RankPool() as pool:
        task = progress.add_task("stock diffusers", total=2 + 3 * len(TOPOLOGIES))
        (runs["diffusers"],) = pool.run(1, render_with_diffusers, timeout=300)
        for topology in TOPOLOGIES:
            progress.update(task, advance=1, description=f"wanref {topology}")
            parts = pool.run(parse_topology(topology).world_size, render_in_topology, topology, timeout=300)
            runs[topology] = {case: render for part in parts for case, render in part.items()}
        progress.update(task, advance=1)
        differing = _print_table(console, runs)

        def done(what: str) -> None:
            progress.update(task, advance=1, description=what)

        traces = artifacts / "traces"
        suites = show_verdicts(console, pool, CHECKPOINTS, TOPOLOGIES, traces, done)
        suites.append(show_planted_fault(console, pool, CHECKPOINTS, traces))
    videos = _write_videos(artifacts, runs["pp1cfg1"])
    sheet = artifacts / "contact_sheet.png"
    write_contact_sheet(sheet, {f"{name}: {prompt}": r.video for (name, prompt), r in runs["pp1cfg1"].items()})
    left = [f"videos   {videos[0].parent} ({len(videos)} MP4s)", f"picture  {sheet}", f"traces   {traces}"]
    left += [f"page     {page}" for page in _write_pages(artifacts, traces)]
    junit = artifacts / "junit.xml"
    write_report(junit, suites)
    console.print("\n".join([*left, f"junit    {junit}"]), highlight=False, soft_wrap=True)
    holds = all(case.result.kind == "passed" for case in cases_of(suites))
    sys.exit(1 if differing or not holds else 0)


def _render(latents: torch.Tensor, video: np.ndarray) -> Render:
    whole = hashlib.sha256(latents.numpy().tobytes())
    whole.update(video.tobytes())
    return Render(whole.hexdigest(), video)


def _print_table(console: Console, runs: dict[str, dict[Case, Render]]) -> int:
    table = Table("checkpoint", "prompt", *runs, title="SHA-256 of latents and pixels, first 8 digits")
    stock = runs["diffusers"]
    differing = 0
    for case, reference in stock.items():
        cells = []
        for renders in runs.values():
            equal = renders[case].digest == reference.digest
            differing += not equal
            cells.append(f"[{'green' if equal else 'bold red'}]{renders[case].digest[:8]}[/]")
        table.add_row(*case, *cells)
    console.print(table)
    compared = len(stock) * (len(runs) - 1)
    console.print(f"{compared - differing} of {compared} wanref renders are bitwise equal to stock diffusers")
    return differing


def _write_videos(artifacts: Path, renders: dict[Case, Render]) -> list[Path]:
    paths = []
    for (name, prompt), render in renders.items():
        paths.append(artifacts / f"{name}-{prompt.replace(' ', '-')}.mp4")
        write_video(paths[-1], render.video, FPS)
    return paths


def _write_pages(artifacts: Path, traces: Path) -> list[Path]:
    """A page a checkpoint, and pictures of the first where there is a browser to take them."""
    pages = [artifacts / f"{name}.html" for name in CHECKPOINTS]
    for name, page in zip(CHECKPOINTS, pages, strict=True):
        write_page(traces / name, page)
    chromium = find_chromium()
    if chromium is None:
        return pages
    with browsing(chromium) as browser:
        return [*pages, *take_screenshots(browser, pages[0], artifacts)]


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    typer.run(main)
