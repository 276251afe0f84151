"""The shards of a campaign: what is collected, rendered, compared and timed, each on ranks of its own.

What a candidate is refused for, by its cache or by the metrics, is a result and is kept as one: another try would only
give it again. A rank that was lost, a full disk, a time-out are none: such a shard has failed, and is run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oracle.campaign.collect import SIGNALS, Call, Collected, Track, check_track, collect
from oracle.campaign.content import Content, read_content
from oracle.campaign.pair import Calls, Pair, Row, row_of
from oracle.campaign.refusal import CampaignError
from oracle.campaign.render import Part, Render, join_parts, render_part, row_of_renders
from oracle.campaign.search import Evaluate, Failure, Work
from oracle.campaign.setting import Setting, open_engine, request_of
from oracle.campaign.shards import Executor, Shard, path_of, run_graph
from wanref.caching.error import CacheError
from wanref.caching.spec import CacheSpec
from wanref.liveness import RankFailure
from wanref.schedule import Schedule, Step


def key_of(*parts: Any) -> str:
    """SHA-256 of what a shard's content depends on, as plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# Native renders.


def native_shard(setting: Setting, pairs: Sequence[Pair], name: str) -> Shard:
    """Renders pairs natively; keeps frames and latents."""
    key = key_of("native", setting.key(), [asdict(pair) for pair in pairs])
    return Shard(name, _render_natively, _keep_renders, (setting, tuple(pairs)), key, setting.world_size)


def read_renders(content: Content) -> dict[Pair, Render]:
    """What a native shard kept."""
    renders = {}
    for index, said in enumerate(content.values["renders"]):
        renders[Pair(**said["pair"])] = Render(
            video=content.arrays[f"video{index:03d}"],
            latents=content.arrays[f"latents{index:03d}"],
            calls=tuple(Calls(**calls) for calls in said["calls"]),
            begun=said["begun"],
            ended=said["ended"],
        )
    return renders


def _render_natively(setting: Setting, pairs: Sequence[Pair]) -> list[Part]:
    engine = open_engine(setting)
    return [render_part(engine, setting, pair, None) for pair in pairs]


def _keep_renders(by_rank: Sequence[Sequence[Part]], setting: Setting, pairs: Sequence[Pair]) -> Content:
    said, arrays = [], {}
    for index, (pair, *parts) in enumerate(zip(pairs, *by_rank, strict=True)):
        render = join_parts(parts)
        arrays[f"video{index:03d}"], arrays[f"latents{index:03d}"] = render.video, render.latents
        calls = [asdict(each) for each in render.calls]
        said.append({"pair": asdict(pair), "calls": calls, "begun": render.begun, "ended": render.ended})
    return Content({"renders": said}, arrays)


# Cached renders, and the control's.


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a rank did not render. lost: it went down with another rank, which knows why."""

    reason: str
    lost: bool = False


def rows_shard(
    setting: Setting,
    cache: CacheSpec | None,
    steps: int | None,
    native: Shard,
    folder: Path,
    name: str,
    keep_frames: bool = False,
) -> Shard:
    """Renders a native shard's pairs with a cache, or the control's steps, and compares: rows, or why there are none.

    folder: where the native shard's file is. keep_frames: the frames and latents too, so that metrics can be taken
    again from them.
    """
    asked = None if cache is None else [cache.method, dict(cache.options), cache.profile and asdict(cache.profile)]
    key = key_of("rows", setting.key(), asked, steps, native.key, keep_frames)
    pairs: tuple[Pair, ...] = native.arguments[1]
    arguments = (setting, pairs, cache, steps, path_of(native.name, folder), native.key, keep_frames)
    return Shard(name, _render_with, _compare, arguments, key, setting.world_size, (native.name,))


def read_rows(content: Content) -> list[Row] | Failure:
    """What a shard of rows found."""
    if content.values["refused"] is not None:
        return Failure(content.values["refused"])
    return [row_of(row) for row in content.values["rows"]]


def _render_with(
    setting: Setting, pairs: Sequence[Pair], cache: CacheSpec | None, steps: int | None, *_: object
) -> list[Part] | Refused:
    engine = open_engine(setting)
    try:
        return [render_part(engine, setting, pair, cache, steps) for pair in pairs]
    except CacheError as error:
        return Refused(f"CacheError: {error}")
    except RankFailure as failure:
        cause = failure.__cause__
        return Refused(f"CacheError: {cause}") if isinstance(cause, CacheError) else Refused(str(failure), lost=True)


def _compare(
    by_rank: Sequence[Sequence[Part] | Refused],
    setting: Setting,
    pairs: Sequence[Pair],
    cache: CacheSpec | None,
    steps: int | None,
    native: Path,
    native_key: str,
    keep_frames: bool,
) -> Content:
    refusals = [each for each in by_rank if isinstance(each, Refused)]
    if refusals:
        own = [refusal.reason for refusal in refusals if not refusal.lost]
        if not own:
            raise CampaignError(f"no rank refused, but {refusals[0].reason}")
        return Content({"refused": own[0], "rows": []})
    natives = read_renders(read_content(native, native_key))
    rows, arrays = [], {}
    parts_by_rank = [each for each in by_rank if not isinstance(each, Refused)]
    for index, (pair, *parts) in enumerate(zip(pairs, *parts_by_rank, strict=True)):
        render = join_parts(parts)
        if keep_frames:
            arrays[f"video{index:03d}"], arrays[f"latents{index:03d}"] = render.video, render.latents
        try:
            rows.append(row_of_renders(pair, natives[pair], render).as_json())
        except CampaignError as error:
            return Content({"refused": f"{pair}: {error}", "rows": []})
    return Content({"refused": None, "rows": rows}, arrays)


def evaluator(setting: Setting, natives: Sequence[Shard], folder: Path, executor: Executor) -> Evaluate:
    """What `search` calls: each piece of its work is a shard in `folder`, beside the native ones, which have been run.

    The search's rounds must be the native shards' pairs.
    """
    native_of = {shard.arguments[1]: shard for shard in natives}

    def evaluate(work: Sequence[Work]) -> list[Sequence[Row] | Failure]:
        shards = []
        for item in work:
            if item.pairs not in native_of:
                raise CampaignError(
                    f"search: no native shard is of the {len(item.pairs)} pairs from {item.pairs[0]} on."
                )
            native, candidate = native_of[item.pairs], item.candidate
            # The setting is in it: a candidate may be tried in several, and each keeps its own files.
            label = key_of(setting.key(), candidate.as_json())[:16]
            name = f"rows/{label}/{native.name.rpartition('/')[2]}"
            shard = rows_shard(setting, candidate.cache, candidate.steps, native, folder, name)
            shards.append(replace(shard, needs=()))  # the native ones are there: they need not be read in every round
        run_graph(shards, folder, executor)
        return [read_rows(read_content(path_of(shard.name, folder), shard.key)) for shard in shards]

    return evaluate


# Collected signals and residuals.


def collect_shard(setting: Setting, pair: Pair, pp: int, name: str) -> Shard:
    """Collects from one native request what `pp` stages show."""
    key = key_of("collect", setting.key(), asdict(pair), pp)
    return Shard(name, _collect, _keep_collected, (setting, pair, pp), key, setting.world_size)


def _collect(setting: Setting, pair: Pair, pp: int) -> Collected:
    return collect(open_engine(setting), request_of(setting, pair, output_type="latent"), pp)


def _keep_collected(by_rank: Sequence[Collected], *_: object) -> Content:
    (collected,) = by_rank
    values: dict[str, Any] = {"schedule": [asdict(step) for step in collected.schedule], "tracks": []}
    arrays: dict[str, Any] = {}
    for track in collected.tracks:
        values["tracks"].append([asdict(call) for call in track.calls])
        totals = [("changes", track.changes), ("products", track.products), ("outputs", track.outputs)]
        arrays |= {f"{track.stage}.{name}": array for name, array in [*track.distances.items(), *totals]}
    return Content(values, arrays)


def read_collected(content: Content) -> Collected:
    """What a collecting shard kept. Raises CampaignError for numbers that are not finite."""
    tracks = []
    for stage, calls in enumerate(content.values["tracks"]):
        arrays: Mapping[str, Any] = {
            name: np.asarray(content.arrays[f"{stage}.{name}"]) for name in (*SIGNALS, "changes", "products", "outputs")
        }
        track = Track(
            stage=stage,
            calls=tuple(Call(**call) for call in calls),
            distances={signal: arrays[signal] for signal in SIGNALS},
            changes=arrays["changes"],
            products=arrays["products"],
            outputs=arrays["outputs"],
        )
        check_track(track)
        tracks.append(track)
    return Collected(Schedule(tuple(Step(**step) for step in content.values["schedule"])), tuple(tracks))
