"""The gates: each just below and just above its limit, and what is refused before they are looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from oracle.campaign.gates import GATES, Outcome, check_timing, hopeless, judge, passed
from oracle.campaign.pair import Row, pairs_of, prompt_digest, row_of, total_calls
from oracle.campaign.refusal import CampaignError
from suites.campaigned import PAIRS, calls_of, metrics_of, row_of_metrics, rows_of, timing_at

pytestmark = pytest.mark.cpu

STEP = 1e-9


def only(field: str, value: float) -> Callable[[], list[Row]]:
    """Sound rows, of which the last has this value."""
    return lambda: [*rows_of()[:-1], row_of_metrics(PAIRS[-1], **{field: value})]


@pytest.mark.parametrize(
    ("gate", "below", "above"),
    [
        ("mean_ssim", (rows_of(ssim=0.95 - STEP), 0.5, False), (rows_of(ssim=0.95), 0.5, True)),
        ("worst_ssim", (only("ssim", 0.90 - STEP)(), 0.5, False), (only("ssim", 0.90)(), 0.5, True)),
        ("temporal_error", (rows_of(temporal=0.10), 0.5, True), (rows_of(temporal=0.10 + STEP), 0.5, False)),
        ("latency", (rows_of(), 0.90, True), (rows_of(), 0.90 + STEP, False)),
    ],
)
def test_each_gate_turns_at_its_limit_and_no_other_does(
    gate: str, below: tuple[list[Row], float, bool], above: tuple[list[Row], float, bool]
) -> None:
    for rows, latency, passes in (below, above):
        outcomes = judge(rows, PAIRS, timing_at(latency))
        assert list(outcomes) == [each.name for each in GATES]
        assert outcomes[gate].passed is passes
        assert all(outcome.passed for name, outcome in outcomes.items() if name != gate)
        assert passed(outcomes) is passes


def test_limits_are_those_of_the_design() -> None:
    assert {gate.name: (gate.sense, gate.limit) for gate in GATES} == {
        "mean_ssim": (">=", 0.95),
        "worst_ssim": (">=", 0.90),
        "temporal_error": ("<=", 0.10),
        "latency": ("<=", 0.90),
    }


def test_latency_is_held_against_the_upper_end_of_its_interval() -> None:
    timing = replace(timing_at(0.95), ratio=0.8, low=0.7)
    assert not judge(rows_of(), PAIRS, timing)["latency"].passed


def test_values_are_over_all_pairs() -> None:
    rows = [
        row_of_metrics(pair, ssim=s, temporal=t)
        for pair, s, t in zip(PAIRS, (1, 0.96, 0.92, 0.98), (0, 0.1, 0.2, 0.3), strict=True)
    ]
    outcomes = judge(rows, PAIRS, None)
    assert [outcome.value for outcome in outcomes.values()] == pytest.approx([0.965, 0.92, 0.15])
    assert "latency" not in outcomes
    assert not passed(outcomes), "a gate that was not taken has not passed"


def test_what_is_written_to_have_passed_is_not_believed() -> None:
    outcomes = judge(rows_of(), PAIRS, timing_at())
    assert passed(outcomes)
    assert not passed(outcomes | {"mean_ssim": Outcome(0.5, 0.95, True)})
    assert not passed(outcomes | {"mean_ssim": Outcome(0.99, 0.4, True)}), "a gate of another limit is another gate"
    assert not passed(outcomes | {"latency": Outcome(math.nan, 0.9, True)})


# Out of reach.


def test_a_gate_is_out_of_reach_only_if_perfect_videos_could_not_save_it() -> None:
    good = rows_of(PAIRS[:1], ssim=0.9, temporal=0.4)
    assert hopeless(good, 4) is None, "three perfect videos bring the means to .975 and .10"
    assert hopeless(rows_of(PAIRS[:1], ssim=0.9, temporal=0.2), 2) is None, "and one to .95, which passes"
    lost = hopeless(rows_of(PAIRS[:1], ssim=0.9, temporal=0.4 + 1e-6), 4)
    assert lost is not None
    assert lost.name == "temporal_error"
    lost = hopeless(rows_of(PAIRS[:2], ssim=0.9 - STEP), 100)
    assert lost is not None
    assert lost.name == "worst_ssim", "one video below it is final"


# Refusals.


@pytest.mark.parametrize("field", ["ssim", "temporal", "latent"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_refused(field: str, value: float) -> None:
    with pytest.raises(CampaignError, match=r"(nan|inf) of 'a blue circle', seed 29 is not finite"):
        judge(only(field, value)(), PAIRS, timing_at())


def test_a_missing_a_foreign_and_a_repeated_pair_are_refused() -> None:
    with pytest.raises(CampaignError, match="1 of 4 pairs are missing, the first 'a blue circle', seed 29"):
        judge(rows_of()[:-1], PAIRS, None)
    with pytest.raises(CampaignError, match="'a blue circle', seed 29 is not one of the pairs"):
        judge(rows_of(), PAIRS[:-1], None)
    with pytest.raises(CampaignError, match="'a red square', seed 17 is there twice"):
        judge([*rows_of(), rows_of()[0]], PAIRS, None)


def test_a_cache_without_a_hit_is_refused_wherever_that_is() -> None:
    idle = (calls_of(), calls_of(10, 0, "uncond"))
    with pytest.raises(CampaignError, match="no hit at stage 0, uncond, high-noise expert, of 40 calls"):
        judge(rows_of(calls=idle), PAIRS, timing_at())
    with pytest.raises(CampaignError, match="no call of a cache was recorded"):
        judge(rows_of(calls=()), PAIRS, timing_at())
    assert judge(rows_of(calls=idle), PAIRS, None, reuse=False), "the control has no cache"
    # A hit in one video is one: an adaptive cache may find nothing in another.
    judge([row_of_metrics(PAIRS[0]), *rows_of(PAIRS[1:], calls=idle)], PAIRS, None)


@pytest.mark.parametrize("moment", ["begun", "ended"])
def test_a_cache_that_remembers_an_earlier_request_is_refused(moment: str) -> None:
    rows = [*rows_of()[:-1], row_of_metrics(PAIRS[-1], **{moment: "left over"})]
    with pytest.raises(CampaignError, match="'a blue circle', seed 29 the cache remembered something else"):
        judge(rows, PAIRS, None)


def test_a_timing_with_recording_on_is_refused() -> None:
    with pytest.raises(CampaignError, match="recording=True is not accepted"):
        judge(rows_of(), PAIRS, timing_at(recording=True))
    with pytest.raises(CampaignError, match="high=nan is not accepted"):
        check_timing(timing_at(math.nan))


# Rows and pairs.


def test_rows_come_back_from_json() -> None:
    row = rows_of()[0]
    assert row_of(row.as_json()) == row
    for broken in (row.as_json() | {"metrics": {}}, row.as_json() | {"extra": 1}, {}):
        with pytest.raises(CampaignError, match=r"^row: "):
            row_of(broken)


def test_calls_add_up_by_place() -> None:
    assert total_calls(rows_of()) == (calls_of(16, 24), calls_of(16, 24, "uncond"))
    assert rows_of()[0].blocks == 16


def test_pairs_are_every_prompt_with_every_seed() -> None:
    assert [str(pair) for pair in PAIRS][1:3] == ["'a red square', seed 29", "'a blue circle', seed 17"]
    for prompts, seeds in (([], [1]), (["a"], []), (["a", "a"], [1]), (["a"], [1, 1])):
        with pytest.raises(CampaignError, match="each once"):
            pairs_of(prompts, seeds)


def test_prompts_that_differ_in_case_or_blanks_alone_are_the_same() -> None:
    assert prompt_digest("A red  square\n") == prompt_digest("a red square") != prompt_digest("a red squares")


def test_metrics_made_by_hand_are_sound() -> None:
    assert passed(judge([replace(row, metrics=metrics_of(0.95, 0.1)) for row in rows_of()], PAIRS, timing_at(0.9)))
