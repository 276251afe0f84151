"""One self-contained HTML page of a verification: what was claimed, what came of it, and what the runs looked like.

Every verdict is judged anew from the traces, by the function that `wanref verify` prints from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.trace import MANIFEST, TraceError
from oracle.evidence.writer import write_whole
from oracle.report.card import COLUMNS, Card, read_card
from oracle.report.environment import Fact, environment, stale_subjects
from oracle.verdict.align import align
from oracle.verdict.finding import Finding
from oracle.verdict.matrix import FAILURE, Recorded, Row, judge_matrix, read_matrix
from oracle.verdict.twin import FPS

NAME = "report.html"
MOST_FINDINGS, MOST_FAILING = 50, 8
"""So many of a claim's findings are listed, and of the failing claims at the top: the first is the verdict, and a
thousand more are its consequences."""
NO_CACHE = "no cache"


@dataclass(frozen=True, slots=True)
class Cell:
    """One topology, cache and expert of the matrix: `holds`, `fails` or `not run`, and what was saved."""

    topology: str
    cache: str
    word: str
    says: str
    anchor: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """All that the page shows. experts: those that the schedule runs, in order. failures: of topologies that failed,
    what became of each rank."""

    recorded: Recorded
    asked: tuple[tuple[str, str], ...]
    experts: tuple[str, ...]
    rows: tuple[Row, ...]
    cells: Mapping[str, tuple[Cell, ...]]
    cards: tuple[Card, ...]
    facts: tuple[Fact, ...]
    stale: tuple[str, ...]
    failures: Mapping[str, str]

    @property
    def failing(self) -> list[Row]:
        return [row for row in self.rows if not row.verdict.holds]

    @property
    def headline(self) -> str:
        """The result, in the first line."""
        count, failing = len(self.rows), len(self.failing)
        if not failing:
            return f"{count} of {_counted(count)} hold{'s' if count == 1 else ''}"
        verb = "fails" if failing == 1 else "fail; the first"
        return f"{failing} of {_counted(count)} {verb}: {self.failing[0].sentence}"

    @property
    def caches(self) -> tuple[str, ...]:
        """As the page names them: the runs without one come first."""
        return (NO_CACHE, *self.recorded.caches)

    @property
    def filters(self) -> Mapping[str, tuple[str, ...]]:
        return {"topology": self.recorded.run, "cache": self.caches, "verdict": ("holds", "fails")}

    def rows_of(self, card: Card) -> list[Row]:
        """The claims about a cached run; where its topology failed, that it did."""
        mine = (card.cache, "") if card.topology in self.failures else (card.cache,)
        return [row for row in self.rows if row.topology == card.topology and row.cache in mine]


def write_page(folder: Path, output: Path, tree: Path | None = None) -> Report:
    """Write the page of what `wanref verify --traces FOLDER` left, whole or not at all.

    tree: a folder of the source tree that evidence is called stale against; without one, the current folder. Raises
    TraceError for a folder that no verification has left.
    """
    report = read_report(folder, Path.cwd() if tree is None else tree)
    page = render(report)
    write_whole(output, lambda draft: draft.write_text(page, "utf-8"))
    return report


def read_report(folder: Path, tree: Path) -> Report:
    """Judge the traces, and read what the page shows of them."""
    recorded = read_matrix(folder)
    rows = tuple(judge_matrix(recorded, folder, recorded.failed))
    traces = tuple(_traces(folder))
    resolved, schedule = _first_request(traces)
    experts = tuple(dict.fromkeys(str(step["expert"]) for step in schedule))
    cards = tuple(_cards(folder, recorded))
    of_step = {int(step["index"]): str(step["expert"]) for step in schedule}
    return Report(
        recorded,
        tuple(_asked(recorded, resolved)),
        experts,
        rows,
        {topology: tuple(_cells(topology, recorded, rows, cards, experts, of_step)) for topology in recorded.run},
        cards,
        tuple(environment(traces, tree)),
        tuple(stale_subjects(traces, tree)),
        {topology: _failure(folder / topology, says) for topology, says in recorded.failed.items()},
    )


def render(report: Report) -> str:
    """The page as text. What comes from the traces is escaped."""
    environment = Environment(
        loader=PackageLoader("oracle.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html")
    return template.render(
        report=report,
        columns=COLUMNS,
        decisions={card.anchor: card.decisions for card in report.cards},
        fps=FPS,
        most_findings=MOST_FINDINGS,
        most_failing=MOST_FAILING,
        no_cache=NO_CACHE,
    )


def _traces(folder: Path) -> Iterator[Trace]:
    """Those that open. What does not is a claim that fails, and the verdict says so."""
    for manifest in sorted(folder.glob(f"*/*/{MANIFEST}")):
        with suppress(TraceError):
            yield open_trace(manifest.parent)


def _first_request(traces: Sequence[Trace]) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """What the request resolved to, and its schedule: the contracts claim that they are one for all runs."""
    for trace in traces:
        for begun in align(trace).requests.values():
            return begun.resolved or {}, begun.schedule or ()
    return {}, ()


def _asked(recorded: Recorded, resolved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    prompt = recorded.request.get("prompt", "")
    yield "prompt", prompt if isinstance(prompt, str) else " | ".join(map(str, prompt))
    yield "checkpoint", recorded.checkpoint
    if "width" in resolved:
        yield "size", f"{resolved['width']} × {resolved['height']}, {resolved['frames']} frames"
    for name in ("steps", "scheduler", "flow_shift", "guidance_scale", "guidance_scale_2", "boundary_ratio"):
        if resolved.get(name) is not None:
            value = resolved[name]
            yield name.replace("_", " "), f"{value:g}" if isinstance(value, float) else str(value)
    seeds = ", ".join(str(noise.get("seed")) for noise in resolved.get("noise", ()))
    if seeds:
        yield "seed", seeds


def _cards(folder: Path, recorded: Recorded) -> Iterator[Card]:
    """A card for each cached run that left a trace with its twin's; where one is missing, a claim fails likewise."""
    for topology in recorded.run:
        for cache in recorded.caches:
            with suppress(TraceError):
                yield read_card(folder / topology, topology, cache)


def _cells(
    topology: str,
    recorded: Recorded,
    rows: Sequence[Row],
    cards: Sequence[Card],
    experts: Sequence[str],
    of_step: Mapping[int, str],
) -> Iterator[Cell]:
    for cache in ("", *recorded.caches):
        claims = [row for row in rows if (row.topology, row.cache) == (topology, cache)]
        card = next((card for card in cards if (card.topology, card.cache) == (topology, cache)), None)
        for expert in experts or ("",):
            found = [f for row in claims for f in row.verdict.findings if _expert(f, of_step) in (None, expert)]
            word = "fails" if found else "holds" if claims else "not run"
            reused, calls = (0, 0) if card is None else card.tallies.get(expert, (0, 0))
            says = f"{reused} of {calls} reused" if calls else _counted(len(claims)) if claims else ""
            yield Cell(topology, cache, word, says, None if card is None else card.anchor)


def _counted(claims: int) -> str:
    return "1 claim" if claims == 1 else f"{claims} claims"


def _expert(finding: Finding, of_step: Mapping[int, str]) -> str | None:
    """The expert that a finding is about; None for one of the whole run."""
    spot = finding.spot
    return spot.expert or (None if spot.step is None else of_step.get(spot.step))


def _failure(folder: Path, says: str) -> str:
    told = folder / FAILURE
    return told.read_text("utf-8") if told.is_file() else says
