"""One self-contained HTML page of a campaign: gates with their margins, the frontier, hit maps, the worst videos."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from oracle.campaign.acceptance import Acceptance, acceptance_path, read_acceptance
from oracle.campaign.calibration import Calibration, read_calibration
from oracle.campaign.campaign import WORTH, calibration_path, natives_of
from oracle.campaign.content import read_content
from oracle.campaign.gates import GATES
from oracle.campaign.pair import Row
from oracle.campaign.plan import Plan
from oracle.campaign.record import read_record
from oracle.campaign.refusal import CampaignError
from oracle.campaign.shards import path_of
from oracle.campaign.work import read_renders
from oracle.evidence.writer import write_whole
from oracle.report.card import Shown
from oracle.report.frontier import Dot, frontier
from oracle.report.plots import Call, Lane, plot
from oracle.verdict.twin import FPS, GAIN
from wanref.caching.profile import CacheProfile, read_profile
from wanref.files import write_video
from wanref.topology import BRANCHES, parse_topology

NAME = "campaign.html"
WORST = 2
"""So many videos are shown of a topology, those with the largest temporal error."""


@dataclass(frozen=True, slots=True)
class Gated:
    """One topology. why: of a profile that was not accepted."""

    topology: str
    profile: CacheProfile | None
    acceptance: Acceptance | None
    worth: Mapping[str, Any] | None
    hits: Markup
    players: tuple[tuple[str, tuple[Shown, ...]], ...]

    @property
    def passed(self) -> bool:
        return self.acceptance is not None and self.acceptance.passed


def write_campaign_page(plan: Plan, folder: Path, output: Path) -> str:
    """Write it whole, and return its headline. Raises CampaignError for a folder in which nothing was calibrated."""
    calibrations = {pp: read_calibration(calibration_path(folder, pp)) for pp in plan.stages}
    gated = [_gated(plan, topology, folder) for topology in plan.topologies]
    passed = sum(each.passed for each in gated)
    headline = f"{passed} of {len(gated)} topologies have a qualified profile"
    environment = Environment(
        loader=PackageLoader("oracle.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("campaign.html").render(
        plan=plan,
        headline=headline,
        whole=passed == len(gated),
        gates=GATES,
        gated=gated,
        calibrations=calibrations,
        frontiers={pp: _frontier(calibration) for pp, calibration in calibrations.items()},
        fps=FPS,
    )
    write_whole(output, lambda draft: draft.write_text(page, "utf-8"))
    return headline


def _gated(plan: Plan, topology: str, folder: Path) -> Gated:
    profiles = folder / "profiles"
    path, evidence = profiles / f"{plan.name}-{topology}.json", acceptance_path(profiles, plan.name, topology)
    if not path.exists():
        return Gated(topology, None, None, None, Markup(""), ())
    profile = read_profile(path)
    acceptance = read_acceptance(evidence) if evidence.exists() else None
    beside = profiles / f"{plan.name}-{topology}-worth.json"
    worth = read_record(beside, WORTH) if beside.exists() else None
    players = () if acceptance is None else tuple(_worst(plan, topology, folder, acceptance))
    return Gated(topology, profile, acceptance, worth, _hits(plan, profile), players)


def _frontier(calibration: Calibration) -> Markup:
    """Every candidate that was tried on all pairs: block calls of native's against temporal error."""
    dots = []
    whole = len(calibration.pairs)
    native = max((row["blocks"] for row in calibration.table if row["standing"] == "control"), default=0)
    steps = {row["candidate"]["options"].get("steps") for row in calibration.table if row["standing"] == "control"}
    most = max((step for step in steps if isinstance(step, int)), default=0)
    for row in calibration.table:
        if not row["outcomes"] or row["pairs"] != whole or not native:
            continue
        name = row["candidate"]["name"]
        kind = "control" if row["standing"] == "control" else row["standing"]
        mine = calibration.selected is not None and name == calibration.selected.name
        # The largest control takes `most` steps of all: that is what its blocks are a share of.
        share = row["blocks"] / native * most / _steps(calibration)
        told = {gate: outcome["value"] for gate, outcome in row["outcomes"].items()}
        dots.append(Dot(share, told["temporal_error"], "selected" if mine else kind, _says(name, share, told)))
    limit = next(gate.limit for gate in GATES if gate.name == "temporal_error")
    return frontier("share of native block calls", "temporal error", dots, limit)


def _says(name: str, share: float, told: Mapping[str, float]) -> str:
    return (
        f"{name}: {share:.2f} of the block calls, temporal error {told['temporal_error']:.3f}, "
        f"SSIM {told['mean_ssim']:.4f}, worst {told['worst_ssim']:.4f}"
    )


def _steps(calibration: Calibration) -> int:
    """Of the native run: the control's names say `20 of 50 steps`."""
    for row in calibration.table:
        words = row["candidate"]["name"].split(" of ")
        if row["standing"] == "control" and len(words) == 2:
            return int(words[1].split()[0])
    return 1


def _hits(plan: Plan, profile: CacheProfile) -> Markup:
    """Of a fixed schedule, which says all of it; what other methods reuse is a run's own."""
    if profile.method != "fixed":
        return Markup("")
    steps, reused = plan.setting.steps, _reused(str(profile.options["steps"]))
    stages = range(parse_topology(profile.identity.topology).pp)
    lanes = []
    for branch in BRANCHES:
        for stage in stages:
            kept = reused.get((stage, branch), set())
            calls = tuple(
                Call(verdict, None, f"step {step}, {branch}, stage {stage}: {verdict}")
                for step in range(steps)
                for verdict in ("reuse" if step in kept else "compute",)
            )
            lanes.append(Lane(branch if len(stages) == 1 else f"{branch}, stage {stage}", calls))
    return plot(profile.identity.topology, "which calls the profile reuses", ["high"] * steps, lanes, None)


def _reused(text: str) -> dict[tuple[int, str], set[int]]:
    """The steps of `0.cond=3-5+8/1.uncond=4`."""
    found: dict[tuple[int, str], set[int]] = {}
    for entry in text.split("/"):
        target, listed = entry.split("=")
        stage, branch = target.split(".")
        for part in listed.split("+"):
            first, _, last = part.partition("-")
            found.setdefault((int(stage), branch), set()).update(range(int(first), int(last or first) + 1))
    return found


def _worst(plan: Plan, topology: str, folder: Path, acceptance: Acceptance) -> Iterator[tuple[str, tuple[Shown, ...]]]:
    """The native and the cached video beside each other and their difference, where the frames were kept."""
    rows = sorted(acceptance.rows, key=lambda row: -row.metrics.temporal_error)[:WORST]
    natives = natives_of(plan.setting_of(topology), plan.acceptance.pairs, plan.round_size, f"acceptance/{topology}")
    for row in rows:
        yield from _players(row, topology, folder, [path_of(shard.name, folder) for shard in natives])


def _players(row: Row, topology: str, folder: Path, natives: list[Path]) -> Iterator[tuple[str, tuple[Shown, ...]]]:
    for index, path in enumerate(natives):
        kept = folder / "accepted" / topology / f"{index:03d}.safetensors"
        if not path.exists() or not kept.exists():
            continue
        renders = read_renders(read_content(path))
        if row.pair not in renders:
            continue
        place = list(renders).index(row.pair)
        native, cached = renders[row.pair].video, read_content(kept).arrays.get(f"video{place:03d}")
        if cached is None:
            continue
        difference = (abs(cached - native) * GAIN).clip(0, 1)
        videos = {"native": native, "cached": cached, f"difference × {GAIN}": difference}
        says = f"{row.pair}: temporal error {row.metrics.temporal_error:.3f}, SSIM {row.metrics.ssim:.4f}"
        yield says, tuple(Shown(caption, _embedded(frames)) for caption, frames in videos.items())


def _embedded(frames: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        write_video(path, frames, FPS)
        return f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"


def check_folder(folder: Path, plan: Plan) -> None:
    """Raise CampaignError unless something was calibrated there."""
    missing = [pp for pp in plan.stages if not calibration_path(folder, pp).exists()]
    if missing:
        raise CampaignError(f"folder={str(folder)!r} is not accepted: nothing was calibrated there at PP {missing[0]}.")
