"""One cached run as the page shows it: its hit map, how far its latents went, its videos, its decisions."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from oracle.evidence.reader import open_trace
from oracle.evidence.trace import DecisionRecord
from oracle.report.plots import Call, Curve, Lane, plot
from oracle.verdict.align import Aligned, align
from oracle.verdict.divergence import Divergence, measure_divergence
from oracle.verdict.twin import DIFFERENCE, GAIN, NATIVE, VIDEO, cached_folder, forced_folder
from wanref.topology import BRANCHES

COLUMNS = (
    "step",
    "expert",
    "branch",
    "stage",
    "verdict",
    "reason",
    "rule in the twin",
    "signal",
    "rescaled",
    "accumulated",
    "threshold",
    "blocks run",
    "residual of",
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A video, and what it shows. The address has the whole file in it."""

    caption: str
    address: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Card:
    """decisions: a row of COLUMNS each. tallies: calls that reused, and calls, by expert. players: for each video of
    the request the native, the cached and their difference, as far as they were kept."""

    topology: str
    cache: str
    options: str
    qualified: bool
    plot: Markup = field(repr=False)
    says: str
    tallies: dict[str, tuple[int, int]]
    decisions: tuple[tuple[str, ...], ...] = field(repr=False)
    players: tuple[tuple[Shown, ...], ...]

    @property
    def anchor(self) -> str:
        return f"run-{self.topology}-{self.cache}"

    @property
    def tally(self) -> str:
        reused, calls = (sum(counts) for counts in zip(*self.tallies.values(), strict=True)) if self.tallies else (0, 0)
        return f"{reused} of {calls} calls reused"


def read_card(folder: Path, topology: str, cache: str) -> Card:
    """From the traces of one topology. Raises TraceError where the cached run or its twin is no trace."""
    forced = align(open_trace(folder / forced_folder(cache)))
    cached = align(open_trace(folder / cached_folder(cache)))
    schedule = next((begun.schedule for begun in cached.requests.values()), None) or ()
    experts = [str(step["expert"]) for step in schedule]
    divergence = measure_divergence(forced, cached)
    mounted = cached.manifest.get("cache") or {}
    lanes, says = _lanes(forced, cached, len(experts)), describe(divergence)
    drawn = plot(f"{topology}, {cache}", says, experts, lanes, _curve(divergence)) if experts else Markup("")
    return Card(
        topology,
        cache,
        ", ".join(f"{name} {value}" for name, value in mounted.get("options", {}).items()),
        bool(mounted.get("qualified")),
        drawn,
        says,
        _tallies(cached),
        tuple(
            _row(forced, cached.decisions[key]) for key in sorted(cached.decisions, key=lambda k: (k[1], k[2], k[3]))
        ),
        tuple(_players(folder, cache)),
    )


def describe(divergence: Divergence | None) -> str:
    """How far the latents went, and by what that is known."""
    if divergence is None:
        return "The traces are of level decisions: no latents were recorded."
    if divergence.first is None:
        return "After every step the latents are those of the forced twin, byte by byte."
    from_when = f"step {divergence.first}" if divergence.first else "the first step"
    differ = f"Latents differ from the forced twin's from {from_when} on"
    measured = [value for value in divergence.values if value is not None]
    if divergence.measure == "digest" or not measured:
        return f"{differ}. Only their digests were recorded: no distance is known."
    if divergence.measure == "rms":
        return (
            f"{differ}; at the end their rms is {measured[-1]:.3g} off, relative to the twin's. Their values were not "
            "recorded (level stats): the distance is at least that."
        )
    return f"{differ}; at the end they are {measured[-1]:.3g} away, relative to the twin's (Euclidean distance)."


def _curve(divergence: Divergence | None) -> Curve | None:
    if divergence is None or divergence.measure == "digest":
        return None
    label = "distance from the twin" if divergence.measure == "distance" else "difference of rms from the twin"
    said = ("none" if value is None else f"{value:.4g}" for value in divergence.values)
    return Curve(label, divergence.values, tuple(f"after step {step}: {each}" for step, each in enumerate(said)))


def _lanes(forced: Aligned, cached: Aligned, steps: int) -> list[Lane]:
    stages = range(cached.topology.pp)
    lanes = []
    for branch in BRANCHES:
        for stage in stages:
            calls = tuple(_call(forced, cached, step, branch, stage) for step in range(steps))
            label = branch if len(stages) == 1 else f"{branch}, stage {stage}"
            lanes += [Lane(label, calls)] if any(call.verdict for call in calls) else []
    return lanes


def _call(forced: Aligned, cached: Aligned, step: int, branch: str, stage: int) -> Call:
    key = (0, step, branch, stage)
    decision, twin = cached.decisions.get(key), forced.decisions.get(key)
    where = f"step {step}, {branch}, stage {stage}"
    if decision is None:
        return Call(None, None, f"{where}: nothing was decided")
    shadow = None if twin is None else twin.ruled
    said = f"{where}: {decision.verdict} ({decision.reason}){_residual(decision, ' of ')}"
    return Call(decision.verdict, shadow, f"{said}; rule in the forced twin: {shadow or 'not recorded'}")


def _residual(decision: DecisionRecord, before: str = "") -> str:
    steps = dict.fromkeys(f"step {origin.step}" for origin in decision.origins)
    return before + ", ".join(steps) if steps else ""


def _tallies(cached: Aligned) -> dict[str, tuple[int, int]]:
    tallies: dict[str, tuple[int, int]] = {}
    for decision in cached.decisions.values():
        reused, calls = tallies.get(decision.expert, (0, 0))
        tallies[decision.expert] = reused + (decision.verdict == "reuse"), calls + 1
    return tallies


def _row(forced: Aligned, decision: DecisionRecord) -> tuple[str, ...]:
    twin = forced.decisions.get((decision.request, decision.step, decision.branch, decision.stage))
    numbers = (decision.signal, decision.rescaled, decision.accumulated_after, decision.threshold)
    return (
        str(decision.step),
        decision.expert,
        decision.branch,
        str(decision.stage),
        decision.verdict,
        decision.reason,
        "" if twin is None else twin.ruled,
        *("" if value is None else f"{value:.4g}" for value in numbers),
        str(decision.computed_blocks),
        _residual(decision),
    )


def _players(folder: Path, cache: str) -> Iterator[tuple[Shown, ...]]:
    stem = Path(VIDEO).stem
    for native in sorted((folder / NATIVE).glob(f"{stem}*.mp4")):
        number = native.stem.removeprefix(stem)
        cached = folder / cached_folder(cache)
        difference = cached / f"{Path(DIFFERENCE).stem}{number}.mp4"
        files = {"native": native, cache: cached / native.name, f"difference × {GAIN}": difference}
        yield tuple(Shown(caption, _embedded(file)) for caption, file in files.items() if file.is_file())


def _embedded(video: Path) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(video.read_bytes()).decode()}"
