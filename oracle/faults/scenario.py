"""What is run to try the oracle: a recording, and what it is held against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from oracle.evidence.trace import Level
from wanref.request import Request

Layout = Literal["single", "dual"]
Ending = Literal["done", "aborted", "failed", "refused", "unmounted"]

Checkpoints = dict[Layout, Path]
"""A checkpoint folder for each layout."""


REQUEST = Request(
    prompt="a red square moving left",
    height=32,
    width=32,
    frames=5,
    steps=6,
    guidance_scale=4.0,
    seed=7,
    max_sequence_length=16,
    output_type="latent",
)
OTHER = replace(REQUEST, prompt="a blue circle moving up", seed=8)


@dataclass(frozen=True, slots=True)
class Past:
    """A request that the engine ran before, and how it ended; `unmounted`: with its cache off, which was then put back.

    Where an exception would end the engine, which it does on several ranks, `failed` is not for use.
    """

    request: Request
    ending: Ending = "done"


@dataclass(frozen=True, slots=True)
class Run:
    """One recording: an engine, what it ran before, and the request that counts, the last one of the trace.

    ports: of the modules inside each block, too. locked_on: the run whose values it is given, under the module lock.
    """

    layout: Layout = "single"
    topology: str = "pp1cfg1"
    dtype: str = "float32"
    cache: str | None = None
    forced: bool = False
    request: Request = REQUEST
    past: tuple[Past, ...] = ()
    level: Level = "stats"
    ports: bool = False
    locked_on: Run | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A candidate, held against a reference under a contract of the table."""

    contract: str
    reference: Run
    candidate: Run

    @property
    def name(self) -> str:
        run = self.candidate
        cache = f" {(run.cache or '').partition(':')[0]}" if run.cache else ""
        forced = " forced" if run.forced else ""
        return f"{self.contract}: {run.layout} {run.topology} {run.dtype}{cache}{forced}"


LIVE = "teacache:coefficients=1/0,dialect=vllm-omni,signal=modulated_input,threshold=0.25"
LIVE_DUAL = LIVE + ",coefficients_low=1/0"
PLANNED = "teacache:coefficients=1/0,signal=timestep_projection,threshold=0.6,first=1"
FIXED = "fixed:steps=*.*=2-3+5"
DBCACHE = "cache-dit:threshold=0.4,max_warmup_steps=1"


def topology(name: str, layout: Layout = "single", dtype: str = "float32", request: Request = REQUEST) -> Scenario:
    """Without a cache, against pp1cfg1."""
    serial = Run(layout, "pp1cfg1", dtype, request=request)
    return Scenario("topology", serial, replace(serial, topology=name))


def bounded(name: str, request: Request, layout: Layout = "single") -> Scenario:
    """In bf16 by other kernels, against pp1cfg1 by the usual ones, both locked on pp1cfg1 in float32."""
    precise = Run(layout, request=request, level="tensor", ports=True)
    base = replace(precise, dtype="bfloat16", locked_on=precise)
    return Scenario("kernels", base, replace(base, topology=name))


def rerun(run: Run) -> Scenario:
    """The same, run again."""
    return Scenario("rerun", run, run)


def cached(name: str, cache: str, layout: Layout = "single", **changes: Any) -> Run:
    """A run with a cache; tensors are kept, so that the arithmetic of each reuse can be looked at."""
    return replace(Run(layout, name, cache=cache, request=REQUEST, level="tensor"), **changes)


def twin(run: Run) -> Scenario:
    """A cached run and its forced twin."""
    return Scenario("cached", replace(run, forced=True), run)


def used(run: Run, *past: Past) -> Scenario:
    """A request on a used engine, against the same on a fresh one."""
    return Scenario("used engine", run, replace(run, past=past))
