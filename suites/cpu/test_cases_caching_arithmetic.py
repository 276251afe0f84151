"""Public bug reports on cache arithmetic, options, counting and caches that do nothing. Named after their rows."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from suites.cached import BASE, CachedRun, check_fired, key_of, run_cached, run_mounted
from suites.support import load_engine
from wanref import block
from wanref.caching.base import StackCall
from wanref.caching.error import CacheError
from wanref.caching.report import print_tallies, tally
from wanref.caching.spec import parse_cache
from wanref.observe import TensorEvent, TensorKey

pytestmark = pytest.mark.cpu

LIVE = "teacache:dialect=vllm-omni,coefficients=1/0,threshold=0.2"
TIMED = "teacache:dialect=teacache,signal=timestep_projection,coefficients=1/0,threshold=0.6,first=1"
DIT = "cache-dit:threshold=0.5,max_warmup_steps=1"
EACH = pytest.mark.parametrize("cache", [LIVE, TIMED, DIT])


def ran(folder: Path, cache: str | None, **changes: Any) -> CachedRun:
    return run_cached(load_engine(folder), replace(BASE, **changes), cache)


def printed(cache: str, run: CachedRun) -> str:
    text = io.StringIO()
    print_tallies(parse_cache(cache), tally(run.decisions, 4), Console(file=text, width=160))
    return text.getvalue()


# V, M: what is refused, what is counted.


def test_V3_two_caches_or_one_coefficient_set_for_two_experts_are_refused(tiny: Callable[..., Path]) -> None:
    """TensorRT-LLM#11923, #13170, #14157, #17696, vllm-omni#1578."""
    engine = load_engine(tiny(layout="dual"), cache=DIT)
    with pytest.raises(CacheError, match="cache='teacache': 'cache-dit' is mounted"):
        engine.mount(LIVE + ",coefficients_low=1/0")
    engine.unmount()
    with pytest.raises(CacheError, match=r"no coefficients for the low-noise expert.*coefficients_low="):
        engine.mount(LIVE)
    with pytest.raises(CacheError, match="option 'coefficients_low' is not known here"):
        load_engine(tiny(), cache=LIVE + ",coefficients_low=1/0")


def test_M1_a_test_of_a_cache_without_a_hit_fails_and_its_report_is_loud(tiny: Callable[..., Path]) -> None:
    """vllm-omni#4868. Two steps, both of them warm-up."""
    idle = ran(tiny(), DIT.replace("warmup_steps=1", "warmup_steps=2"), steps=2)
    with pytest.raises(AssertionError, match="no hit in 4 decisions"):
        check_fired([idle])
    assert "cache-dit never fired" in printed(DIT, idle)
    fired = ran(tiny(), DIT, steps=3)
    check_fired([fired])
    assert "never fired" not in printed(DIT, fired)


@EACH
def test_M3_computed_and_reused_add_up_to_the_forwards_of_each_expert_and_branch(
    tiny: Callable[..., Path], cache: str
) -> None:
    """cache-dit#370, #358, sglang#36767."""
    more = {LIVE: ",coefficients_low=1/0", TIMED: ",coefficients_low=1/0", DIT: ",low_max_warmup_steps=1"}[cache]
    run = ran(tiny(layout="dual"), cache + more + (",low_threshold=0.5" if cache == DIT else ""))
    check_fired([run])
    forwards = Counter((k.expert, k.branch) for k in run.run.tensors if k.block == "project")
    blocks = Counter((k.expert, k.branch) for k in run.run.tensors if isinstance(k.block, int))
    rows = tally(run.decisions, 4)
    assert {(row.expert, row.branch): row.computed + row.reused for row in rows} == forwards
    assert all(
        row.saved == pytest.approx(1 - blocks[row.expert, row.branch] / (row.computed + row.reused) / 4) for row in rows
    )
    assert sum(row.computed + row.reused for row in rows if row.branch == "cond") == BASE.steps


def test_M4_a_threshold_that_reuses_nearly_all_shows_in_the_counts_and_a_cap_holds_it(
    tiny: Callable[..., Path],
) -> None:
    """mold#1559, ComfyUI-TeaCache#62, ComfyUI-WanVideoWrapper#134. Whether the video is bad is for the campaign."""
    loose, capped = (ran(tiny(), DIT.replace("0.5", "9.0") + cap) for cap in ("", ",max_continuous_cached_steps=1"))
    assert [most_in_a_row(run) for run in (loose, capped)] == [5, 1]
    (row, _) = tally(loose.decisions, 4)
    assert (row.computed, row.reused) == (1, 5)
    check_fired([capped])


def most_in_a_row(run: CachedRun) -> int:
    verdicts = "".join("r" if d.verdict == "reuse" else " " for d in run.decisions if d.where.branch == "cond")
    return max(map(len, verdicts.split()))


# P: caches that do nothing, or too much.


@EACH
def test_P1_a_one_step_warm_up_request_leaves_no_state(tiny: Callable[..., Path], cache: str) -> None:
    """vllm-omni#7335, sglang#16490."""
    engine = load_engine(tiny(), cache=cache)
    engine(replace(BASE, steps=1))
    after, alone = run_mounted(engine, replace(BASE, steps=8)), ran(tiny(), cache, steps=8)
    check_fired([after])
    assert after.verdicts() == alone.verdicts()
    assert after.run.latents == alone.run.latents


@pytest.mark.parametrize(
    "option",
    ["sign=clamp", "first=3", "last=2", "threshold=0.1", "reuse=linear", "coefficients=4/0", "cap=0.1", "eps=9"],
)
def test_P3_each_option_changes_the_run_and_any_other_is_refused(tiny: Callable[..., Path], option: str) -> None:
    """vllm-omni#4632, #4667, Teacache-xDiT#3. Those of cache-dit are in test_cache_dit."""
    name = option.split("=")[0]
    options = {"coefficients": "1/-0.08", "threshold": "0.02", "first": "2", "sign": "signed"}
    base, changed = (
        "teacache:dialect=vllm-omni," + ",".join(f"{key}={value}" for key, value in each.items())
        for each in (options, options | {name: option.split("=")[1]})
    )
    one, other = ran(tiny(), base, steps=8), ran(tiny(), changed, steps=8)
    check_fired([one])
    assert one.verdicts() != other.verdicts() or one.run.latents != other.run.latents
    with pytest.raises(CacheError, match="option 'calibrator' is not known"):
        load_engine(tiny(), cache=base + ",calibrator=taylorseer")


@pytest.mark.parametrize("cache", [LIVE, DIT])
def test_P4_a_threshold_of_0_is_bitwise_uncached_and_reported_as_such(tiny: Callable[..., Path], cache: str) -> None:
    """vllm-omni#5840, mold#939."""
    zero = cache.replace("threshold=0.2", "threshold=0").replace("threshold=0.5", "threshold=0")
    idle, native = ran(tiny(), zero), ran(tiny(), None)
    assert idle.run.tensors == native.run.tensors
    assert {(row.computed, row.reused, row.saved) for row in tally(idle.decisions, 4)} == {(6, 0, 0.0)}
    assert all(row.over_ideal is not None and row.over_ideal > 1 for row in tally(idle.decisions, 4))
    assert "never fired" in printed(zero, idle)
    check_fired([ran(tiny(), cache)])


def test_P5_a_signal_that_cannot_be_computed_fails_the_run(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM#11868, vllm-omni#2682."""
    engine = load_engine(tiny(), cache=LIVE)

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("planted in the extractor")

    with monkeypatch.context() as patch:
        patch.setattr("wanref.caching.teacache.block", type("Block", (), {"modulated_input": staticmethod(broken)}))
        with pytest.raises(RuntimeError, match="planted in the extractor"):
            engine(BASE)
    check_fired([CachedRun(None, engine(BASE).decisions)])  # type: ignore[arg-type]
    assert block.modulated_input is not broken


def test_P5_the_accumulator_is_the_sum_of_its_terms_and_depends_on_the_prompt(tiny: Callable[..., Path]) -> None:
    one, other = (ran(tiny(), LIVE, prompt=prompt) for prompt in ("a red square", "dots stripes"))
    check_fired([one])
    assert [d.judgement.signal for d in one.decisions] != [d.judgement.signal for d in other.decisions]
    total = 0.0
    for decision in (d for d in one.decisions if d.where.branch == "cond"):
        judgement = decision.judgement
        total = total + judgement.rescaled if decision.verdict == "reuse" else 0.0
        assert judgement.accumulated_after == total


# K: arithmetic.


@EACH
def test_K1_a_hit_adds_the_residual_once_and_counts_one(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """vllm-omni#5561, MagCache-Comfy#17, sglang#18498. out = in + r, whatever the number of blocks."""
    engine = load_engine(tiny(blocks=6), cache=cache)
    assert engine._mounted is not None
    run, calls = engine._mounted[1].run, []
    blocks: dict[TensorKey, torch.Tensor] = {}

    def keeping(call: StackCall) -> Any:
        output, decision = run(call)
        calls.append((call.hidden.clone(), output.clone(), decision))
        return output, decision

    monkeypatch.setattr(engine._mounted[1], "run", keeping)
    engine.observer = lambda e: blocks.update({e.key: e.tensor.clone()}) if isinstance(e, TensorEvent) else None
    engine(BASE)
    check_fired([CachedRun(None, tuple(d for _, _, d in calls))])  # type: ignore[arg-type]
    outputs = {key_of(d): (hidden, output) for hidden, output, d in calls}
    for hidden, output, decision in calls:
        if decision.verdict == "reuse":
            step, expert, branch, stage = key_of(decision)
            source = decision.origins[-1].step
            before, after = outputs[source, expert, branch, stage]
            if cache == DIT:  # its residual is that of the blocks behind the first, which is computed at a hit
                before = blocks[TensorKey(0, source, expert, branch, 0)]
                hidden = blocks[TensorKey(0, step, expert, branch, 0)]
            torch.testing.assert_close(output, hidden + (after - before), rtol=0, atol=0)
