"""Requests that differ in every way, and what each gives on a fresh engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from suites.support import Fingerprint, fingerprint, load_engine
from wanref.request import Request

if TYPE_CHECKING:
    from wanref.pipeline import WanReference

BASE = Request(prompt="a red square", height=32, width=32, frames=5, steps=4, guidance_scale=4.0, seed=7)
REQUESTS = (
    BASE,
    replace(BASE, steps=2),
    replace(BASE, steps=3, height=16, width=48, frames=9),
    replace(BASE, height=48, frames=1, scheduler="dpm++"),
    replace(BASE, scheduler="euler", flow_shift=12),
    replace(BASE, scheduler="dpm++", steps=3),
    replace(BASE, flow_shift=1, guidance_scale=1),
    replace(BASE, guidance_scale=0, steps=3),
    replace(BASE, guidance_scale=1, guidance_scale_2=6.0),
    replace(BASE, guidance_scale=6, guidance_scale_2=1, negative_prompt="stripes"),
    replace(BASE, boundary_ratio=0.0, prompt="a blue circle"),
    replace(BASE, boundary_ratio=1.0, steps=1),
    replace(BASE, prompt=("a red square", "a blue circle"), negative_prompt=("dots", ""), seed=(1, 2)),
    replace(BASE, videos_per_prompt=2, steps=2, max_sequence_length=16),
    replace(BASE, output_type="latent", seed=8),
)
REFUSED = (
    replace(BASE, height=40),
    replace(BASE, frames=6),
    replace(BASE, prompt="a red square moving left over dots", max_sequence_length=4),
    replace(BASE, boundary_ratio=1.5),
    replace(BASE, flow_shift=float("nan")),
    replace(BASE, steps=0),
)
Result = tuple[Fingerprint, Fingerprint | None]


@cache
def fresh(folder: Path, request: Request) -> Result:
    return result(load_engine(folder), request)


def result(engine: WanReference, request: Request) -> Result:
    output = engine(request)
    return fingerprint(output.latents), None if output.video is None else fingerprint(output.video)
