"""Every layer of the comparison is needed: for each there is a difference that it alone sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oracle.evidence.reader import Trace
from oracle.verdict import compare as comparison
from oracle.verdict.compare import compare
from oracle.verdict.finding import LAYERS, Finding
from suites.traced import Event, edited, record_trace

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

pytestmark = pytest.mark.cpu

CACHE = "teacache:coefficients=1/0,signal=timestep_projection,threshold=0.6,first=2"
"""The second call is computed whatever its signal is."""
OTHER_BYTES = "0" * 31 + "1"


@dataclass(frozen=True, slots=True)
class Blind:
    """A difference that one check alone sees. edit: how the candidate's events of a rank are made to differ."""

    layer: str
    check: str
    contract: str
    pair: tuple[str, str]
    edit: Callable[[Event], Event]
    rank: int = 0


def _asked_otherwise(event: Event) -> Event:
    """The same values by the same steps, for another prompt."""
    if event["kind"] == "request" and event["moment"] == "begin":
        event["resolved"]["prompts"] = ["a blue circle"]
    return event


def _changed_on_its_way(event: Event) -> Event:
    """What stage 1 received is not what stage 0 sent; what each of them computed is right."""
    if event["kind"] == "tensor" and (event["step"], event["source"], event["block"]) == (2, "received", 1):
        event["digest"] = OTHER_BYTES
    return event


def _by_another_number(event: Event) -> Event:
    """At a step that is computed in any case, the signal changed by more."""
    if event["kind"] == "decision" and event["step"] == 1:
        event["signal"] += 0.25
    return event


def _not_by_its_rule(event: Event) -> Event:
    """At a step that reused, the signal changed by more than the rule lets pass."""
    if event["kind"] == "decision" and event["verdict"] == "reuse":
        event["signal"] += 9.0
    return event


def _of_the_other_branch(event: Event) -> Event:
    """A reuse took the residual of the other branch."""
    if event["kind"] == "decision" and event["verdict"] == "reuse":
        event["origins"][0]["branch"] = "uncond" if event["branch"] == "cond" else "cond"
    return event


def _left_behind(event: Event) -> Event:
    """The cache still remembers something when the request has ended."""
    if event["kind"] == "state" and event["moment"] == "end":
        event["digests"] = {"high.cond": OTHER_BYTES}
    return event


def _other_value(step: int, block: int | str) -> Callable[[Event], Event]:
    """One value has other bytes, and none that follows from it."""

    def edit(event: Event) -> Event:
        if event["kind"] == "tensor" and (event["step"], event["block"]) == (step, block):
            event["digest"] = OTHER_BYTES
        return event

    return edit


SERIAL, PARALLEL, CACHED = ("native", "native"), ("native", "native pp2cfg1"), ("forced", "cached")
BLIND = {
    "configuration": Blind("configuration", "check_configuration", "rerun", SERIAL, _asked_otherwise),
    "coverage": Blind("coverage", "check_coverage", "topology", PARALLEL, _changed_on_its_way, rank=1),
    "decisions": Blind("decisions", "_decisions", "rerun", ("cached", "cached"), _by_another_number),
    "replay": Blind("decisions", "check_replay", "cached", CACHED, _not_by_its_rule),
    "provenance": Blind("provenance", "check_reuses", "cached", CACHED, _of_the_other_branch),
    "states": Blind("provenance", "check_states", "cached", CACHED, _left_behind),
    "tensors": Blind("tensors", "_tensors", "rerun", SERIAL, _other_value(1, 2)),
    "output": Blind("output", "_tensors", "rerun", SERIAL, _other_value(3, "scheduler")),
}


@pytest.fixture(scope="module")
def recorded(ranks: RankPool, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    folder, checkpoint = tmp_path_factory.mktemp("traces"), tiny()
    return {
        "native": record_trace(ranks, checkpoint, folder / "native"),
        "native pp2cfg1": record_trace(ranks, checkpoint, folder / "native2", "pp2cfg1"),
        "forced": record_trace(ranks, checkpoint, folder / "forced", cache=CACHE, forced=True),
        "cached": record_trace(ranks, checkpoint, folder / "cached", cache=CACHE),
    }


def test_every_layer_has_a_difference_that_it_alone_sees() -> None:
    assert {blind.layer for blind in BLIND.values()} == set(LAYERS)


@pytest.mark.parametrize("name", BLIND)
def test_without_this_check_a_difference_passes_and_with_it_it_does_not(
    recorded: dict[str, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    blind = BLIND[name]
    reference, right = (recorded[each] for each in blind.pair)
    wrong = edited(right, tmp_path / "wrong", blind.edit, blind.rank)
    assert compare(reference, right, blind.contract).holds
    verdict = compare(reference, wrong, blind.contract)
    assert not verdict.holds
    assert {finding.layer for finding in verdict.findings} == {blind.layer}

    check = getattr(comparison, blind.check)

    def but_this_layer(*args: Any) -> Iterator[Finding]:
        return (finding for finding in check(*args) if finding.layer != blind.layer)

    monkeypatch.setattr(comparison, blind.check, but_this_layer)
    without = compare(reference, wrong, blind.contract)
    assert without.holds, f"another check sees it, too: {without.sentence}"
