"""The arithmetic of the bench's figures of caches, on numbers whose answers are known."""

import time
from collections.abc import Callable

import pytest
import torch

from suites.bench.caches import over_ideal
from suites.bench.figure import BytesDiffer, beside, interval
from suites.bench.hooks import first_block_cache
from suites.bench.pace import Timing, time_run

pytestmark = pytest.mark.cpu

NATIVE = Timing(seconds=10.0, calls=64, seconds_a_block=0.15, pace=0.1)


@pytest.mark.parametrize(("skipped", "seconds"), [(16, 7.6), (32, 5.2), (48, 2.8)])
def test_a_cache_that_costs_nothing_is_at_its_ideal(skipped: int, seconds: float) -> None:
    cached = Timing(seconds, 64 - skipped, seconds_a_block=9.0, pace=0.1)
    assert over_ideal(cached, NATIVE) == pytest.approx(1)
    slower = Timing(seconds * 1.1, 64 - skipped, seconds_a_block=9.0, pace=0.1)
    assert over_ideal(slower, NATIVE) == pytest.approx(1.1)
    on_a_slow_machine = Timing(seconds * 3, 64 - skipped, seconds_a_block=9.0, pace=0.3)
    assert over_ideal(on_a_slow_machine, NATIVE) == pytest.approx(1)


@pytest.mark.parametrize("calls", [64, 0])
def test_a_run_without_a_hit_or_without_a_miss_is_no_figure(calls: int) -> None:
    with pytest.raises(BytesDiffer, match="says nothing about a cache"):
        over_ideal(Timing(1.0, calls, 0.15, 0.1), NATIVE)


def test_the_interval_is_of_the_median() -> None:
    assert interval((1.0, 1.0, 1.0)) == (1.0, 1.0)
    values = (1.00, 1.01, 1.02, 1.03, 9.0)
    low, high = interval(values)
    assert 1.00 <= low < 1.02 < high <= 9.0
    steady = interval(tuple(1 + index / 1_000 for index in range(101)))
    assert steady == pytest.approx((1.05, 1.05), abs=0.02), "more repetitions narrow it"
    assert interval(values) == (low, high), "the same values have the same interval"


def test_ours_is_above_theirs_only_beyond_the_interval() -> None:
    theirs = (1.00, 1.20, 1.40, 1.10, 1.30)
    assert beside(tuple(1.1 * value for value in theirs), theirs).startswith("above 1.200 (1.100 to 1.100")
    assert beside(tuple(0.9 * value for value in theirs), theirs).startswith("below 1.200")
    assert beside((1.01, 1.19, 1.41, 1.09, 1.30), theirs).startswith("level with 1.200")


class _Block(torch.nn.Module):
    """The two places of a block that a run is timed at, with 20 ms of work between them."""

    def __init__(self) -> None:
        super().__init__()
        self.attn1 = torch.nn.Module()
        self.attn1.to_q = torch.nn.Identity()
        self.ffn = torch.nn.Identity()

    def forward(self, work: Callable[[], None]) -> None:
        self.attn1.to_q(None)
        spin(0.02)
        self.ffn(None)
        work()


def spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_what_happens_between_blocks_is_in_their_time_and_never_in_the_pace() -> None:
    blocks = [_Block(), _Block(), _Block()]
    timing, value = time_run(blocks, lambda: [block(lambda: spin(0.03)) for block in blocks])
    assert value == [None, None, None]
    assert timing.calls == 3
    assert timing.pace == pytest.approx(0.02, rel=0.2)
    assert timing.seconds_a_block == pytest.approx(0.05, rel=0.2)
    assert timing.seconds == pytest.approx(0.15, rel=0.2)
    assert timing.paced == pytest.approx(7.5, rel=0.2)
    assert not any(module._forward_hooks or module._forward_pre_hooks for block in blocks for module in block.modules())


class _Pipe:
    """Stands for a pipeline whose transformer is told a cache, and keeps its threshold."""

    def __init__(self) -> None:
        self.transformer = self
        self.threshold = 0.0

    def enable_cache(self, config: object) -> None:
        self.threshold = config.threshold  # type: ignore[attr-defined]

    def disable_cache(self) -> None: ...


@pytest.mark.parametrize("reuses", [1, 2, 3])
def test_no_threshold_of_the_first_block_cache_is_decided_by_rounding(reuses: int) -> None:
    residuals = [torch.full((4,), value) for value in (1.0, 1.1, 1.25, 1.45, 1.7)]
    pipe = _Pipe()
    with first_block_cache(residuals)(pipe, len(residuals), reuses):  # type: ignore[arg-type]
        pass
    computed, found = 1.0, 0
    for residual in residuals[1:]:
        change = abs(float(residual[0]) - computed) / computed
        assert change != pytest.approx(pipe.threshold, rel=1e-3)
        if change <= pipe.threshold:
            found += 1
        else:
            computed = float(residual[0])
    assert found == reuses
