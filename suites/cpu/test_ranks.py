"""The ranks that tests run on: one that dies, hangs or raises is an outcome that is told, and never a pass."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from oracle.evidence.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.cpu


class Planted(Exception):
    """What the tests make a rank run into."""


def misbehave(manner: str, culprit: int) -> int:
    rank = dist.get_rank()
    dist.barrier()  # a rank that dies while another still connects to it takes that one with it
    if rank == culprit:
        if manner == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if manner == "left":
            os._exit(3)
        if manner == "hung":
            sleep_for_ever()
        raise Planted("as planned")
    return rank


def sleep_for_ever() -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("manner", "kind", "text"),
    [
        ("killed", "died", "exit code -9"),
        ("left", "died", "exit code 3"),
        ("hung", "hung", "sleep_for_ever"),
        ("raised", "raised", "in misbehave"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_without_a_value_is_an_outcome_and_never_a_pass(
    ranks: RankPool, manner: str, kind: str, text: str, culprit: int
) -> None:
    ranks.run(2, misbehave, "nothing", -1)  # started, so that the time-out is the job's alone
    with pytest.raises(RanksFailed, match=f"rank {culprit}: {kind}") as failed:
        ranks.run(2, misbehave, manner, culprit, timeout=2.0)
    outcomes = failed.value.outcomes
    assert outcomes[culprit].kind == kind
    assert text in outcomes[culprit].text
    assert (outcomes[1 - culprit].kind, outcomes[1 - culprit].value) == ("value", 1 - culprit)
    assert ranks.run(2, misbehave, "nothing", -1) == [0, 1], "the pool goes on with a new rank"


def test_a_value_that_cannot_travel_is_no_pass(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(2, unpicklable_on_rank_1)
    assert [outcome.kind for outcome in outcomes] == ["value", "died"]


def unpicklable_on_rank_1() -> Any:
    return (lambda: None) if dist.get_rank() == 1 else 0


def fail_to_rendezvous_on_rank_1() -> str:
    rank, store = dist.get_rank(), PrefixStore("nobody else comes here", _get_default_store())
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        return "did not try"
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=1))
    except RuntimeError as error:
        return str(error)
    return "succeeded"


def test_a_failed_rendezvous_does_not_make_a_rank_miss_the_next(ranks: RankPool) -> None:
    first, second = ranks.run(2, fail_to_rendezvous_on_rank_1)
    assert first == "did not try"
    assert "timeout" in second
    assert ranks.run(2, misbehave, "nothing", -1, timeout=20.0) == [0, 1]
