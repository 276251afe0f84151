"""Cache-DiT's own log lines as facts, and what they say that the schedule does not."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from cache_dit import DBCacheConfig, TaylorSeerCalibratorConfig
from cache_dit.caching.cache_adapters.cache_adapter import CachedAdapter

from oracle.evidence.context_line import ContextFacts, ContextLineError, read_context_lines
from oracle.evidence.emitter import Emitter, Engine
from oracle.verdict.logged import check_contexts
from suites.cpu.command import invoke

pytestmark = pytest.mark.cpu

LINE = "DBCache_F1B0_W4I1M0MC3_R0.24_N17_CFG1"
(FACTS,) = read_context_lines([LINE])


def schedule(high: int, low: int = 0, guidance: float = 5.0) -> list[dict[str, Any]]:
    experts = ["high"] * high + ["low"] * low
    return [{"index": i, "expert": expert, "guidance_scale": guidance} for i, expert in enumerate(experts)]


def says(facts: ContextFacts, steps: list[dict[str, Any]], layers: int = 30, chains: int = 1) -> list[str]:
    return [each.says.partition(": ")[2] for each in check_contexts([facts], steps, layers, chains)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_warmup_steps": 2, "max_cached_steps": 20, "residual_diff_threshold": 1e-05},
        {"Fn_compute_blocks": 1, "Bn_compute_blocks": 2, "warmup_interval": 2, "max_continuous_cached_steps": 3},
        {"num_inference_steps": 6, "steps_computation_mask": [1, 0, 1, 0, 0, 1], "steps_computation_policy": "static"},
        {"num_inference_steps": 50, "force_refresh_step_hint": 25, "enable_separate_cfg": False},
    ],
)
def test_every_line_that_the_library_prints_is_read(options: dict[str, Any]) -> None:
    config = DBCacheConfig(**options)
    log = CachedAdapter._config_messages(
        logging=False,
        cache_config=config,
        calibrator_config=TaylorSeerCalibratorConfig(taylorseer_order=2),
    )
    (facts,) = read_context_lines(["12:00:01 INFO unrelated", f"12:00:02 [rank0] {log}"])
    assert facts.line == 2
    assert (facts.fn, facts.bn) == (config.Fn_compute_blocks, config.Bn_compute_blocks)
    assert (facts.warmup, facts.interval) == (config.max_warmup_steps, config.warmup_interval)
    assert facts.most == (config.max_cached_steps if config.max_cached_steps > 0 else None)
    assert facts.in_a_row == (config.max_continuous_cached_steps if config.max_continuous_cached_steps > 0 else None)
    assert facts.threshold == config.residual_diff_threshold
    assert facts.mask == ("".join(map(str, config.steps_computation_mask)) if config.steps_computation_mask else None)
    assert facts.static == (facts.mask is not None and config.steps_computation_policy == "static")
    assert facts.steps == config.num_inference_steps
    assert facts.refresh == config.force_refresh_step_hint
    assert facts.separate_cfg == config.enable_separate_cfg


@pytest.mark.parametrize("tail", ["_T1O2", "_P12.5_T0O0", " , Calibrator Config: None"])
def test_what_a_summary_puts_behind_is_no_part_of_it(tail: str) -> None:
    assert dataclasses.replace(next(read_context_lines([LINE + tail])), text=LINE) == FACTS


@pytest.mark.parametrize("line", ["DBCache_F1B0_W4M0", LINE + "_X9", "DBCache_F1B0_W4I1M0MC3_R0.24_CFG1_N17"])
def test_a_line_of_another_form_is_refused_and_not_half_read(line: str) -> None:
    with pytest.raises(ContextLineError, match="line 2: 'DBCache_F1B0"):
        list(read_context_lines(["", line]))


def test_a_line_that_fits_its_schedule_says_nothing() -> None:
    assert says(FACTS, schedule(17)) == []
    assert says(dataclasses.replace(FACTS, separate_cfg=False), schedule(17, guidance=1.0)) == []
    assert says(dataclasses.replace(FACTS, separate_cfg=False), schedule(17), chains=2) == []
    assert says(dataclasses.replace(FACTS, warmup=40, interval=2), schedule(17)) == []


@pytest.mark.parametrize(
    ("changes", "steps", "chains", "wrong"),
    [
        ({}, schedule(23), 1, "its budget is 17 steps, and the schedule gives this expert 23"),
        ({"mask": "1" * 9}, schedule(17), 1, "its mask is for 9 steps"),
        ({}, schedule(17, guidance=1.0), 1, "it counts two branches, and this rank runs one"),
        ({}, schedule(17), 2, "it counts two branches, and this rank runs one"),
        ({"separate_cfg": False}, schedule(17), 1, "it counts one branch, and this rank runs two"),
        ({"separate_cfg": None}, schedule(17), 1, "it counts one branch, and this rank runs two"),
        ({"fn": 30, "bn": 1}, schedule(17), 1, "some would run twice"),
        ({"fn": 29, "bn": 1}, schedule(17), 1, "a hit saves no work"),
        ({"warmup": 17}, schedule(17), 1, "it can never reuse"),
        ({"threshold": 0.0}, schedule(17), 1, "its threshold is 0"),
    ],
)
def test_each_way_not_to_fit_is_named(changes: dict[str, Any], steps: Any, chains: int, wrong: str) -> None:
    (found,) = says(dataclasses.replace(FACTS, **changes), steps, chains=chains)
    assert wrong in found


def test_two_experts_have_a_line_each_or_share_one() -> None:
    low = dataclasses.replace(FACTS, steps=23, text="low's")
    steps = schedule(17, 23)
    assert not list(check_contexts([FACTS, low], steps, 30, 1))
    swapped = list(check_contexts([low, FACTS], steps, 30, 1))
    assert [(f.spot.expert, f.spot.step) for f in swapped] == [("high", 0), ("low", 17)]
    (shared,) = check_contexts([FACTS], steps, 30, 1)
    assert shared.spot.expert == "low"
    with pytest.raises(ValueError, match=r"3 context lines are not accepted for 2 experts \(high, low\)"):
        list(check_contexts([FACTS] * 3, steps, 30, 1))


def test_the_command_holds_a_log_against_a_trace(tmp_path: Path) -> None:
    emitter = Emitter(tmp_path / "trace", Engine("other", "1", layers=30))
    steps = [{**step, "timestep": 1.0, "sigma": 0.5} for step in schedule(17)]
    emitter.end(emitter.begin(steps))
    log = tmp_path / "engine.log"
    log.write_text(f"INFO Collected Context Config: {LINE}, Calibrator Config: None\n")
    fits = invoke("trace", "log", str(log), "--against", str(tmp_path / "trace"))
    assert (fits.exit_code, fits.stdout) == (0, "1 context lines fit their schedule\n")
    log.write_text(log.read_text().replace("N17", "N40"))
    wrong = invoke("trace", "log", str(log), "--against", str(tmp_path / "trace"))
    assert wrong.exit_code == 1
    assert "its budget is 40 steps, and the schedule gives this expert 17" in wrong.stdout
    log.write_text("nothing of a cache\n")
    empty = invoke("trace", "log", str(log), "--against", str(tmp_path / "trace"))
    assert empty.exit_code == 2
    assert "has no context line of Cache-DiT" in empty.stderr
