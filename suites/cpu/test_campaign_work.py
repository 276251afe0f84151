"""The shards of a campaign on engines: renders, rows, refusals, resuming, ranks; and what a search is good for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle.campaign import work
from oracle.campaign.calibration import calibrate, write_calibration
from oracle.campaign.candidate import Candidate, controls, fixed_candidate
from oracle.campaign.collect import SIGNALS, Collected, collect
from oracle.campaign.freeze import identity_for
from oracle.campaign.gates import check_rows
from oracle.campaign.metrics import latent_error, measure
from oracle.campaign.pair import Pair, Row, pairs_of, total_calls
from oracle.campaign.render import join_parts, render_part
from oracle.campaign.reuse_error import reuse_errors
from oracle.campaign.schedule_search import ReuseSchedule, search_schedules
from oracle.campaign.search import Failure, search
from oracle.campaign.setting import Setting, open_engine, request_of
from oracle.campaign.shards import InProcess, OnRanks, Shard, ShardsFailed, path_of, run_graph
from oracle.campaign.work import (
    collect_shard,
    evaluator,
    native_shard,
    read_collected,
    read_content,
    read_renders,
    read_rows,
    rows_shard,
)
from oracle.evidence.ranks import RankPool
from suites.cached import MICRO
from suites.support import silence
from wanref.caching.spec import CacheSpec
from wanref.liveness import RankFailure

pytestmark = pytest.mark.cpu

PAIRS = pairs_of(["a red square", "a blue circle"], [17, 29])
FIXED = Candidate("fixed", "fixed", {"steps": "*.*=1+3", "reuse": "linear"})
LATE = Candidate("late", "fixed", {"steps": "*.*=9"})
"""Reuses at a step that there is not."""


@pytest.fixture(scope="module")
def setting(tiny: Callable[..., Path]) -> Setting:
    silence()
    return Setting(checkpoint=str(tiny()), steps=5, height=32, width=32, frames=5)


def rows_on(setting: Setting, executor: Any, folder: Path, cache: CacheSpec | None, steps: int | None = None) -> Any:
    """The rows of two pairs, in a folder of their own."""
    native = native_shard(setting, PAIRS[:2], "native/000")
    shard = rows_shard(setting, cache, steps, native, folder, "rows/000")
    run_graph([native, shard], folder, executor)
    return read_rows(read_content(path_of(shard.name, folder), shard.key))


# Renders and rows.


def test_rows_are_measured_between_the_two_renders(setting: Setting, tmp_path: Path) -> None:
    rows = rows_on(setting, InProcess(), tmp_path, FIXED.cache)
    check_rows(rows, PAIRS[:2])
    engine = open_engine(setting)
    native = read_renders(read_content(path_of("native/000", tmp_path)))
    for row, pair in zip(rows, PAIRS, strict=False):
        assert np.array_equal(native[pair].video, engine(request_of(setting, pair)).video[0])  # type: ignore[index]
        engine.mount(FIXED.cache)  # type: ignore[arg-type]
        cached = engine(request_of(setting, pair))
        engine.unmount()
        assert cached.video is not None
        by_hand = measure(native[pair].video, cached.video[0], native[pair].latents, cached.latents[0].numpy())
        assert row.metrics == by_hand
        assert row.metrics.latent_error > 0
    assert [(c.branch, c.computed, c.reused, c.blocks, c.whole) for c in total_calls(rows)] == [
        ("cond", 6, 4, 24, 40),
        ("uncond", 6, 4, 24, 40),
    ]


def test_the_control_takes_fewer_steps_and_no_cache(setting: Setting, tmp_path: Path) -> None:
    rows = rows_on(setting, InProcess(), tmp_path, None, steps=3)
    check_rows(rows, PAIRS[:2], reuse=False)
    assert total_calls(rows)[0].computed == 2 * 3
    assert rows[0].metrics.latent_error > 0
    same = rows_on(setting, InProcess(), tmp_path / "same", None, steps=5)
    assert {(row.metrics.ssim, row.metrics.latent_error) for row in same} == {(1.0, 0.0)}
    assert same[0].native == same[0].cached


def test_what_a_cache_refuses_is_a_result_and_is_kept(setting: Setting, tmp_path: Path) -> None:
    found = rows_on(setting, InProcess(), tmp_path, LATE.cache)
    assert isinstance(found, Failure)
    assert found.reason == "CacheError: fixed: stage 0, cond does not run at steps [9], which are to reuse."
    assert path_of("rows/000", tmp_path).exists()


def test_a_video_that_is_not_finite_is_refused_with_its_pair(setting: Setting, tmp_path: Path) -> None:
    native = native_shard(setting, PAIRS[:1], "native/000")
    run_graph([native], tmp_path, InProcess())
    engine = open_engine(setting)
    part = render_part(engine, setting, PAIRS[0], FIXED.cache)
    assert part.video is not None
    part.video[2, 3, 4, 0] = np.nan
    arguments = rows_shard(setting, FIXED.cache, None, native, tmp_path, "rows/000").arguments
    content = work._compare([[part]], *arguments)
    assert content.values["refused"] == "'a red square', seed 17: video: 1 of 15360 values are not finite."
    assert content.values["rows"] == []


def test_a_render_without_a_video_or_with_two_is_refused(setting: Setting) -> None:
    part = render_part(open_engine(setting), setting, PAIRS[0], None)
    with pytest.raises(ValueError, match="2 of 2 ranks have the video"):
        join_parts([part, part])
    with pytest.raises(ValueError, match="0 of 1 ranks have the video"):
        join_parts([replace(part, video=None)])


# Ranks.


def test_quality_is_the_same_across_cfg(ranks: RankPool, setting: Setting, tmp_path: Path) -> None:
    found: dict[str, list[Row]] = {}
    for topology in ("pp2cfg1", "pp2cfg2"):
        own = replace(setting, topology=topology)
        found[topology] = rows_on(own, OnRanks(ranks), tmp_path / topology, FIXED.cache)
        check_rows(found[topology], PAIRS[:2])
    one, two = found.values()
    assert [(r.metrics, r.native, r.cached, r.calls) for r in one] == [
        (r.metrics, r.native, r.cached, r.calls) for r in two
    ]
    assert {calls.place for calls in total_calls(two)} == {
        f"stage {stage}, {branch}, high-noise expert" for stage in (0, 1) for branch in ("cond", "uncond")
    }


def test_what_a_cache_refuses_on_ranks_is_the_same_result(ranks: RankPool, setting: Setting, tmp_path: Path) -> None:
    own = replace(setting, topology="pp2cfg1")
    found = rows_on(own, OnRanks(ranks), tmp_path, LATE.cache)
    assert isinstance(found, Failure)
    assert "does not run at steps [9]" in found.reason


def lose_a_rank(*_: object) -> Any:
    raise RankFailure("rank 1 was lost")


def test_a_rank_that_is_lost_is_no_result(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(work, "render_part", lambda engine, setting, pair, cache, steps=None: lose_a_rank())
        native = native_shard(setting, PAIRS[:1], "native/000")
        shard = replace(rows_shard(setting, FIXED.cache, None, native, tmp_path, "rows/000"), needs=())
        with pytest.raises(ShardsFailed, match="no rank refused, but rank 1 was lost"):
            run_graph([shard], tmp_path, InProcess())
    assert not path_of("rows/000", tmp_path).exists()


# Searching and resuming.


class Interrupted(BaseException):
    """Stands for a kill: nothing of the campaign catches it."""


def calibrated(setting: Setting, folder: Path) -> Path:
    """A small calibration in a folder, from the native renders to its record."""
    natives = [native_shard(setting, PAIRS[i : i + 2], f"native/{i:03d}") for i in (0, 2)]
    run_graph(natives, folder, InProcess())
    candidates = [FIXED, Candidate("plain", "fixed", {"steps": "*.*=1-3"}), LATE, *controls(5)]
    searched = search(candidates, PAIRS, evaluator(setting, natives, folder, InProcess()), round_size=2)
    identity = identity_for(open_engine(setting), request_of(setting, PAIRS[0]))
    prompts, seeds = sorted({p.prompt for p in PAIRS}, reverse=True), sorted({p.seed for p in PAIRS})
    path = folder / "calibration.json"
    write_calibration(path, calibrate("tiny", identity, prompts, seeds, searched))
    return path


def test_a_calibration_that_was_interrupted_after_any_write_ends_in_the_same_bytes(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = calibrated(setting, tmp_path / "undisturbed").read_bytes()
    names = {p.name for p in (tmp_path / "undisturbed").rglob("*")}
    replace_file, writes = os.replace, 0

    def interrupt(source: Any, target: Any) -> None:
        nonlocal writes
        replace_file(source, target)
        if "campaign" in str(target):
            writes += 1
            raise Interrupted

    folder = tmp_path / "campaign"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        while not (folder / "calibration.json").exists():
            with pytest.raises(Interrupted):
                calibrated(setting, folder)
    assert writes == len(list(folder.rglob("*.safetensors"))) + 1, "no shard was run twice"
    assert calibrated(setting, folder).read_bytes() == undisturbed
    assert {p.name for p in folder.rglob("*")} == names


def test_a_search_in_rounds_of_other_pairs_than_the_native_shards_is_refused(setting: Setting, tmp_path: Path) -> None:
    natives = [native_shard(setting, PAIRS, "native/000")]
    with pytest.raises(ValueError, match="no native shard is of the 2 pairs from 'a red square', seed 17 on"):
        search([FIXED], PAIRS, evaluator(setting, natives, tmp_path, InProcess()), round_size=2)


def test_the_key_of_a_shard_is_of_all_that_its_content_depends_on(
    setting: Setting, tmp_path: Path, tiny: Callable[..., Path]
) -> None:
    native = native_shard(setting, PAIRS, "native/000")

    def key(cache: CacheSpec | None = FIXED.cache, steps: int | None = None, native: Shard = native) -> str:
        return rows_shard(setting, cache, steps, native, tmp_path, "rows/000").key

    others = [
        key(CacheSpec("fixed", {"steps": "*.*=1"})),
        key(None, 3),
        key(None, 4),
        key(native=native_shard(replace(setting, steps=6), PAIRS, "native/000")),
        key(native=native_shard(setting, PAIRS[::-1], "native/000")),
        rows_shard(setting, FIXED.cache, None, native, tmp_path, "rows/000", keep_frames=True).key,
    ]
    assert len({key(), *others}) == len(others) + 1
    assert key() == key(native=replace(native, name="native/001"))
    # A checkpoint is known by its weights, wherever it lies.
    retrained = replace(setting, checkpoint=str(tiny(seed=1)))
    assert native_shard(retrained, PAIRS, "native/000").key != native.key
    moved = shutil.copytree(setting.checkpoint, tmp_path / "moved")
    assert native_shard(replace(setting, checkpoint=str(moved)), PAIRS, "native/000").key == native.key


# Collecting, and what it is good for.


def test_what_was_collected_comes_back_from_its_file(setting: Setting, tmp_path: Path) -> None:
    shard = collect_shard(setting, PAIRS[0], 2, "collected/000")
    run_graph([shard], tmp_path, InProcess())
    read = read_collected(read_content(path_of(shard.name, tmp_path), shard.key))
    own = collect(open_engine(setting), request_of(setting, PAIRS[0], output_type="latent"), 2)
    assert read.schedule == own.schedule
    for one, two in zip(read.tracks, own.tracks, strict=True):
        assert (one.stage, one.calls) == (two.stage, two.calls)
        assert all(np.array_equal(one.distances[signal], two.distances[signal]) for signal in SIGNALS)
        for field in ("changes", "products", "outputs"):
            assert np.array_equal(getattr(one, field), getattr(two, field))


def test_a_searched_schedule_beats_an_even_one_and_the_control_at_the_same_budget() -> None:
    """On the trained checkpoint, where the cost that the search minimises is one of real residuals."""
    silence()
    setting = Setting(checkpoint=str(MICRO), steps=50)
    engine = open_engine(setting)
    calibration = [Pair("a red triangle moving down over rings", 17), Pair("a cyan circle growing over checks", 29)]
    unseen = [Pair("a blue cross moving left over dots", 101), Pair("a green square growing over stripes", 103)]
    runs: list[Collected] = [collect(engine, request_of(setting, p, output_type="latent"), 1) for p in calibration]
    searched = search_schedules(reuse_errors(runs, 0, "both"), "linear")[20]
    even = tuple(sorted({round(step) for step in np.linspace(0, 49, 20)}))
    assert len(searched.computed) == len(even) == 20
    natives = {pair: join_parts([render_part(engine, setting, pair, None)]) for pair in unseen}

    def error(cache: CacheSpec | None, steps: int | None = None) -> float:
        errors = []
        for pair, native in natives.items():
            cached = join_parts([render_part(engine, setting, pair, cache, steps)])
            errors.append(latent_error(native.latents, cached.latents))
        return sum(errors) / len(errors)

    def fixed(computed: tuple[int, ...]) -> CacheSpec | None:
        schedule = ReuseSchedule(computed, tuple(step for step in range(50) if step not in computed), 0.0)
        return fixed_candidate("x", {(0, "cond"): schedule, (0, "uncond"): schedule}, "linear").cache

    found = error(fixed(searched.computed))
    assert found < 0.75 * error(fixed(even))
    assert found < 0.75 * error(None, 20)
