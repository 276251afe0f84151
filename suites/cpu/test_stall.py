"""A hang is a verdict of its own: it says who waits for whom, in which exchange, and where that one is."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oracle.evidence.ranks import Outcome, RankPool
from oracle.evidence.stall import Standing, tell_stall
from oracle.verdict.matrix import _what_happened
from suites.support import load_engine
from wanref.exchange import Exchange
from wanref.observe import Event, ExchangeEvent, StepEvent
from wanref.request import Request
from wanref.topology import parse_topology

pytestmark = pytest.mark.cpu

REQUEST = Request(prompt="a red square", height=32, width=32, frames=1, steps=4, guidance_scale=4.0, seed=7)
STALL_S = 3.0
"""Longer than the ranks take to come to where they hang."""


def own_exchange(topology: str) -> Exchange:
    return Exchange(parse_topology(topology).place(dist.get_rank()), None, torch.device("cpu"))


# Requests that hang.


def run_planted(folder: Path, topology: str, plant: Callable[[Event], None]) -> None:
    """For ranks: `plant` observes the request on rank 0."""
    engine = load_engine(folder, topology)
    if engine.place.rank == 0:
        engine.observer = plant
    engine(REQUEST)


def sleep_at_step_1(event: Event) -> None:
    if isinstance(event, StepEvent) and event.step.index == 1:
        time.sleep(600)


def test_a_rank_that_waits_for_one_at_work_says_in_which_exchange_and_where_that_one_is(
    ranks: RankPool, tiny: Callable[..., Path]
) -> None:
    asleep, waiting = ranks.outcomes(2, run_planted, tiny(), "pp2cfg1", sleep_at_step_1, timeout=STALL_S)
    assert (asleep.kind, waiting.kind) == ("hung", "hung")
    place = r"is in sleep_at_step_1 \(test_stall\.py:\d+\) at step 1"
    assert re.fullmatch(rf"hung: no answer in 3 s; it {place}", asleep.sentence)
    waits = r"waits in receive #\d+ from rank 0 at step 1"
    assert re.fullmatch(rf"hung: no answer in 3 s; it {waits}; rank 0 {place}", waiting.sentence)
    assert "in sleep_at_step_1" in asleep.text.partition("\n")[2], "its Python stack"
    assert "in receive" in waiting.text.partition("\n")[2]


def leave_out_a_gather(folder: Path, step: int) -> None:
    """For ranks: at one step rank 1 takes its own prediction for both branches, and goes on."""
    engine = load_engine(folder, "pp1cfg2")
    gather, calls = engine.exchange.gather_branches, [0]

    def left_out(prediction: torch.Tensor, *sizes: object) -> tuple[torch.Tensor, torch.Tensor]:
        calls[0] += 1
        return (prediction, prediction) if calls[0] == step + 1 else gather(prediction, *sizes)  # type: ignore[arg-type]

    if engine.place.rank == 1:
        engine.exchange.gather_branches = left_out  # type: ignore[method-assign]
    engine(REQUEST)


@pytest.mark.parametrize(("step", "next_in"), [(1, "agree"), (3, "broadcast")])
def test_a_peer_that_has_gone_on_is_said_to_have_left_the_step(
    ranks: RankPool, tiny: Callable[..., Path], step: int, next_in: str
) -> None:
    left_behind, gone_on = ranks.outcomes(2, leave_out_a_gather, tiny(), step, timeout=STALL_S)
    gathers, waits = rf"waits in gather #\d+ with rank 1 at step {step}", rf"waits in {next_in} #\d+ with rank 0"
    said = rf"hung: no answer in 3 s; it {gathers}; rank 1 has left step {step} and {waits}: a deadlock"
    assert re.fullmatch(said, left_behind.sentence)
    assert re.fullmatch(rf"hung: no answer in 3 s; it {waits}; rank 0 {gathers}: a deadlock", gone_on.sentence)


# Exchanges alone.


def wait_for_the_other() -> None:
    """For ranks: each of two receives, and nobody sends."""
    own_exchange("pp2cfg1").receive((2,), torch.float32, 1 - dist.get_rank())


def test_two_receives_are_a_deadlock_that_each_rank_tells_from_its_own_place(ranks: RankPool) -> None:
    for rank, outcome in enumerate(ranks.outcomes(2, wait_for_the_other, timeout=1.5)):
        assert outcome.sentence == (
            f"hung: no answer in 1.5 s; it waits in receive #0 from rank {1 - rank}; "
            f"rank {1 - rank} waits in receive #0 from rank {rank}: a deadlock"
        )


def timeout_of_gloo() -> float:
    return float(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_gloo_waits_for_longer_than_the_pool_so_that_a_hang_is_told_as_one(ranks: RankPool) -> None:
    assert min(ranks.run(2, timeout_of_gloo, timeout=900.0)) > 900


def hold_the_interpreter() -> None:
    """For ranks: rank 1 lets no other thread of its process run."""
    if dist.get_rank() == 0:
        own_exchange("pp2cfg1").receive((2,), torch.float32, 1)
    re.match("(a+)+$", "a" * 64 + "b")  # does not end


def test_a_rank_that_holds_its_interpreter_is_told_of_all_the_same(ranks: RankPool) -> None:
    waiting, holding = ranks.outcomes(2, hold_the_interpreter, timeout=1.5)
    says = "does not answer: it holds its interpreter"
    assert waiting.sentence == f"hung: no answer in 1.5 s; it waits in receive #0 from rank 1; rank 1 {says}"
    assert holding.sentence == f"hung: no answer in 1.5 s; it {says}"
    assert "in hold_the_interpreter" in holding.text, "its stack needs no interpreter"


def linger_in_an_observer() -> None:
    """For ranks: an observer that is told of an exchange does not come back."""
    exchange = own_exchange("pp2cfg1")
    exchange.begin(lambda _: time.sleep(600))
    exchange.receive((2,), torch.float32, 1 - dist.get_rank())


def test_a_rank_whose_observer_hangs_does_not_wait_for_its_peer(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(2, linger_in_an_observer, timeout=1.5):
        assert "; it is in <lambda> (test_stall.py:" in outcome.sentence


def die_one_after_the_other() -> None:
    """For ranks: rank 2 is killed, then rank 1; rank 0 waits for rank 1."""
    rank = dist.get_rank()
    dist.barrier()  # a rank that dies while another still connects to it takes that one with it
    if rank == 0:
        own_exchange("pp3cfg1").receive((2,), torch.float32, 1)
    time.sleep(0.5 * (2 - rank))
    os.kill(os.getpid(), signal.SIGKILL)


def test_of_several_lost_ranks_the_first_is_the_verdict_and_those_that_waited_for_it_name_it(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(3, die_one_after_the_other, timeout=20.0)
    assert [outcome.kind for outcome in outcomes] == ["raised", "died", "died"]
    assert outcomes[2].after < outcomes[1].after
    assert outcomes[0].sentence.startswith("raised: ExchangeError: exchange #0 (receive with rank 1) failed")
    assert _what_happened(dict(enumerate(outcomes))) == "rank 2 died: exit code -9"


def test_a_lost_rank_explains_a_hang_and_both_explain_an_exception() -> None:
    raised, hung, died = Outcome("raised", "no peer", after=1), Outcome("hung", after=9), Outcome("died", after=9)
    assert _what_happened({0: raised, 1: hung, 3: died}).startswith("rank 3 died")
    assert _what_happened({0: raised, 1: hung}).startswith("rank 1 hung")


# The sentence.


def waits(kind: str, *peers: int, step: int | None = None, left: int = -1) -> Standing:
    return Standing("call (file.py:1)", ExchangeEvent(7, kind, peers, (2,), "torch.float32", False), step, left)


def works(step: int | None = None, left: int = -1) -> Standing:
    return Standing("work (file.py:2)", None, step, left)


WORKS = "is in work (file.py:2)"


@pytest.mark.parametrize(
    ("standings", "ended", "sentence"),
    [
        pytest.param(
            {
                0: waits("agree", 1, 2, 3, left=5),
                1: waits("agree", 0, 2, 3, left=5),
                2: waits("receive", 3, step=5, left=4),
                3: works(5, 4),
            },
            {},
            f"waits in agree #7 with ranks 1, 2, 3; rank 2 waits in receive #7 from rank 3 at step 5; rank 3 {WORKS} "
            "at step 5",
            id="along the ranks to one at work",
        ),
        pytest.param({0: waits("agree", 1), 1: waits("agree", 0)}, {}, "waits in agree #7 with rank 1", id="all there"),
        pytest.param(
            {0: waits("gather", 1), 1: waits("gather", 2), 2: works()},
            {},
            f"waits in gather #7 with rank 1; rank 1 waits in gather #7 with rank 2; rank 2 {WORKS}",
            id="the same kind among others",
        ),
        pytest.param(
            {0: waits("delivered", 1, step=2, left=1), 1: works(3, 2)},
            {},
            f"waits in delivered #7 to rank 1 at step 2; rank 1 has left step 2 and {WORKS} at step 3",
            id="gone on",
        ),
        pytest.param(
            {0: waits("receive", 1), 1: waits("receive", 2), 2: waits("receive", 0)},
            {},
            "waits in receive #7 from rank 1; rank 1 waits in receive #7 from rank 2; rank 2 waits in receive #7 from "
            "rank 0: a deadlock",
            id="a ring",
        ),
        pytest.param(
            {0: waits("receive", 1), 1: waits("receive", 2), 2: waits("receive", 1)},
            {},
            "waits in receive #7 from rank 1; rank 1 waits in receive #7 from rank 2; rank 2 waits in receive #7 from "
            "rank 1: a deadlock",
            id="a ring that it is not in",
        ),
        pytest.param(
            {0: waits("receive", 1)},
            {1: "has returned"},
            "waits in receive #7 from rank 1; rank 1 has returned",
            id="returned",
        ),
        pytest.param(
            {0: waits("broadcast", 1, 2), 2: works()},
            {1: "has died: exit code -9"},
            "waits in broadcast #7 with ranks 1, 2; rank 1 has died: exit code -9",
            id="lost",
        ),
    ],
)
def test_the_sentence_follows_who_waits_for_whom(
    standings: dict[int, Standing], ended: dict[int, str], sentence: str
) -> None:
    assert tell_stall(0, standings, ended) == sentence
