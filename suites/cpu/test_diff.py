"""The noise band on real traces of engines that do not repeat bitwise: `compare_runs` and `wanref diff`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from oracle import compare_runs, open_trace
from oracle.evidence.probe import recording
from oracle.evidence.reader import Trace
from oracle.evidence.trace import TraceError
from suites.cpu.command import invoke
from suites.support import defaults, load_engine
from suites.traced import ASKED, LIVE, edited
from wanref.caching.spec import parse_cache

pytestmark = pytest.mark.cpu


def noisy_run(folder: Path, checkpoint: Path, seed: int, gain: float = 1.0, cache: str | None = None) -> Trace:
    """One run in which every block's output is off by up to one unit in the last place; `gain` scales block 1's."""
    engine = load_engine(checkpoint, defaults=defaults())
    if cache is not None:
        engine.mount(parse_cache(cache))
    rng = torch.Generator().manual_seed(seed)

    def jitter(block: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        towards = torch.where(torch.rand(output.shape, generator=rng) < 0.5, -torch.inf, torch.inf)
        moved = torch.nextafter(output, towards)
        return moved * gain if block is engine.stages["high"].transformer.blocks[1].ffn else moved

    handles = [block.ffn.register_forward_hook(jitter) for block in engine.stages["high"].transformer.blocks]
    try:
        with recording(engine, folder, "tensor"):
            engine(ASKED)
    finally:
        for handle in handles:
            handle.remove()
    return open_trace(folder)


@pytest.fixture(scope="module")
def runs(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trace]]:
    folder, checkpoint = tmp_path_factory.mktemp("runs"), tiny()
    plans = {"base": (5, 1.0, None), "head": (2, 1.0, None), "faulty": (2, 1.001, None), "cached": (2, 1.0, LIVE)}
    return {
        name: [noisy_run(folder / name / str(n), checkpoint, 100 * i + n, gain, cache) for n in range(count)]
        for i, (name, (count, gain, cache)) in enumerate(plans.items())
    }


def test_the_subjects_do_not_repeat(runs: dict[str, list[Trace]]) -> None:
    from oracle.verdict.align import align

    one, other = (align(trace) for trace in runs["base"][:2])
    last = one.ordered[-1]
    assert one.tensors[last][0].record.digest != other.tensors[last][0].record.digest


def test_runs_of_the_base_are_the_same_within_noise(runs: dict[str, list[Trace]]) -> None:
    verdict = compare_runs(runs["base"], runs["head"])
    assert verdict.kind == "same within noise", str(verdict)
    assert 0 < verdict.visible < 1e-4


def test_a_gain_of_a_thousandth_in_one_block_is_outside_from_that_block_on(runs: dict[str, list[Trace]]) -> None:
    verdict = compare_runs(runs["base"], runs["faulty"])
    assert verdict.kind == "outside noise"
    assert (verdict.key.step, verdict.key.block) == (0, 1)  # type: ignore[union-attr]


def test_other_decisions_are_found_before_any_tensor_is_read(runs: dict[str, list[Trace]], tmp_path: Path) -> None:
    verdict = compare_runs(runs["base"], runs["cached"])
    assert verdict.kind == "decisions changed"
    with pytest.raises(TraceError, match=r"base run 0 .* did not keep to the locked schedule"):
        compare_runs(runs["base"], runs["head"], locked=runs["cached"][0])
    assert compare_runs(runs["base"], runs["head"], locked=runs["head"][0]).kind == "same within noise"


def test_a_run_with_a_hole_is_no_evidence(runs: dict[str, list[Trace]], tmp_path: Path) -> None:
    def drop(event: dict[str, object]) -> dict[str, object] | None:
        return None if event["kind"] == "tensor" and (event["step"], event["block"]) == (1, 0) else event

    broken = edited(runs["head"][0], tmp_path / "t", drop)
    with pytest.raises(TraceError, match="no evidence"):
        compare_runs(runs["base"], [broken, runs["head"][1]])


@pytest.mark.parametrize(
    ("head", "code", "words"), [("head", 0, "same within noise"), ("faulty", 1, "outside noise from")]
)
def test_the_command_says_so_and_fails_where_it_is_outside(
    runs: dict[str, list[Trace]], head: str, code: int, words: str
) -> None:
    against = [word for trace in runs[head] for word in ("--against", trace.folder)]
    done = invoke("diff", *(trace.folder for trace in runs["base"]), *against)
    assert done.exit_code == code, done.output
    assert words in done.stdout
    assert "smallest visible relative distance" in done.stdout
    few = invoke("diff", *(trace.folder for trace in runs["base"][:4]), *against)
    assert few.exit_code == 2
    assert "at least 5" in few.stderr


def test_the_jitter_is_one_unit_in_the_last_place() -> None:
    values = torch.randn(1000)
    moved = torch.nextafter(values, torch.full_like(values, torch.inf))
    assert np.abs(moved.numpy().view(np.int32) - values.numpy().view(np.int32)).max() == 1
