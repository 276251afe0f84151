"""The search: dropping never changes what is selected, and nothing that is not evidence passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.campaign.candidate import Candidate, candidate_of, controls, fixed_candidate
from oracle.campaign.pair import Pair, Row, pairs_of
from oracle.campaign.refusal import CampaignError
from oracle.campaign.schedule_search import ReuseSchedule
from oracle.campaign.search import Evaluate, Failure, Searched, Work, search
from suites.campaigned import calls_of, row_of_metrics
from wanref.caching.fixed import parse_reuse_steps

pytestmark = pytest.mark.cpu

PAIRS = pairs_of(["a", "b", "c"], [1, 2])
Scores = Mapping[str, Sequence[tuple[float, float, int]]]
"""SSIM, temporal error and computed calls of each pair, by the candidate's name."""


def cache(name: str) -> Candidate:
    return Candidate(name, "teacache", {"threshold": name})


def rows_for(scores: Sequence[tuple[float, float, int]], pairs: Sequence[Pair]) -> list[Row]:
    rows = []
    for pair in pairs:
        ssim, temporal, computed = scores[PAIRS.index(pair)]
        rows.append(row_of_metrics(pair, ssim=ssim, temporal=temporal, calls=(calls_of(computed, 10 - computed),)))
    return rows


class Renderer:
    """An evaluator that looks its rows up. `seen`: how many pairs each candidate was tried on."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.seen: dict[str, int] = dict.fromkeys(scores, 0)

    def __call__(self, work: Sequence[Work]) -> list[Sequence[Row] | Failure]:
        for item in work:
            self.seen[item.candidate.name] += len(item.pairs)
        return [rows_for(self.scores[item.candidate.name], item.pairs) for item in work]


def run(scores: Scores, **options: object) -> tuple[Searched, Renderer]:
    renderer = Renderer(scores)
    return search([cache(name) for name in scores], PAIRS, renderer, **options), renderer  # type: ignore[arg-type]


score = st.tuples(
    # Near the limits, where a bound that is a little too eager would drop what passes.
    st.sampled_from([0.85, 0.9, 0.94, 0.95, 0.96, 1.0]) | st.floats(0.88, 1),
    st.sampled_from([0.0, 0.1, 0.12, 0.6]) | st.floats(0, 0.3),
    st.integers(1, 9),
)
table = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(score, min_size=len(PAIRS), max_size=len(PAIRS)), min_size=1, max_size=6
)


@settings(deadline=None)
@given(table, st.integers(1, len(PAIRS)))
def test_dropping_never_changes_what_is_selected(scores: Scores, round_size: int) -> None:
    eager, _ = run(scores, round_size=round_size)
    patient, renderer = run(scores, round_size=round_size, drop=False)
    assert set(renderer.seen.values()) == {len(PAIRS)}
    assert eager.selected == patient.selected
    for one, other in zip(eager.tried, patient.tried, strict=True):
        assert one == other or (one.standing, other.standing) == ("dropped", "failed")


def test_a_candidate_is_dropped_as_soon_as_one_video_is_below_the_worst_limit() -> None:
    bad = [(0.8, 0.0, 2), *[(1.0, 0.0, 2)] * 5]
    searched, renderer = run({"bad": bad, "good": [(0.99, 0.05, 5)] * 6}, round_size=2)
    assert renderer.seen == {"bad": 2, "good": 6}
    assert [(each.standing, each.reason) for each in searched.tried] == [
        ("dropped", "worst_ssim is out of reach after 2 of 6 pairs"),
        ("passed", ""),
    ]


def test_the_fewest_block_calls_win_among_those_that_pass() -> None:
    searched, _ = run(
        {
            "cheap, bad": [(0.94, 0.05, 1)] * 6,
            "dear": [(1.0, 0.0, 6)] * 6,
            "cheap": [(0.96, 0.09, 3)] * 6,
        }
    )
    assert searched.selected is not None
    assert searched.selected.candidate.name == "cheap"
    assert searched.selected.blocks == 6 * 6


def test_nothing_is_selected_where_nothing_passes() -> None:
    searched, _ = run({"a": [(0.96, 0.11, 3)] * 6}, drop=False)
    assert searched.selected is None
    assert [(each.standing, each.reason) for each in searched.tried] == [("failed", "temporal_error failed")]


def test_a_cache_that_never_hits_is_refused_however_good_it_looks() -> None:
    searched, _ = run({"idle": [(1.0, 0.0, 10)] * 6})
    assert searched.selected is None
    assert searched.tried[0].standing == "refused"
    assert "no hit" in searched.tried[0].reason


def test_what_could_not_be_rendered_is_refused_and_not_tried_again() -> None:
    calls: list[int] = []

    def evaluate(work: Sequence[Work]) -> list[Sequence[Row] | Failure]:
        calls.append(len(work))
        return [Failure("CacheError: no") for _ in work]

    searched = search([cache("a"), cache("b")], PAIRS, evaluate, round_size=2)
    assert [(each.standing, each.reason) for each in searched.tried] == [("refused", "CacheError: no")] * 2
    assert calls == [2, 0, 0]


def test_the_control_is_rendered_on_every_pair_and_never_selected() -> None:
    scores = {"12 of 50 steps": [(0.5, 0.9, 10)] * 6}
    renderer = Renderer(scores)
    control = Candidate("12 of 50 steps", "control", {"steps": 12})
    searched = search([control], PAIRS, renderer, round_size=1)
    assert renderer.seen == {"12 of 50 steps": 6}
    assert searched.selected is None
    assert searched.tried[0].standing == "control"
    assert not searched.tried[0].outcomes["mean_ssim"].passed


def test_rows_of_other_pairs_are_refused() -> None:
    evaluate: Evaluate = lambda work: [rows_for([(1, 0, 1)] * 6, PAIRS[:1])]  # noqa: E731
    with pytest.raises(CampaignError, match="the rows of 'a' are not those of its pairs"):
        search([cache("a")], PAIRS, evaluate)


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_candidates_have_names_of_their_own(names: list[str]) -> None:
    with pytest.raises(CampaignError, match="each with a name of its own"):
        search([cache(name) for name in names], PAIRS, Renderer({}))


# Candidates.


def test_the_control_scales_with_the_steps() -> None:
    assert [each.steps for each in controls(50)] == [5, 8, 12, 16, 20, 25, 30, 40, 49]
    assert [each.steps for each in controls(12)] == [1, 2, 3, 4, 5, 6, 7, 10]
    assert all(each.cache is None for each in controls(50))


def test_candidates_come_back_from_json() -> None:
    for candidate in (cache("a"), *controls(10)):
        assert candidate_of(candidate.as_json()) == candidate
    for broken in (
        {"name": "a", "method": "cache", "options": {}},
        {"name": "a"},
        3,
        {"name": "a", "method": "fixed", "options": 1},
    ):
        with pytest.raises(CampaignError):
            candidate_of(broken)
    with pytest.raises(CampaignError, match="give steps, an integer"):
        Candidate("x", "control", {"steps": 12.0})


def test_a_fixed_schedule_is_written_as_its_cache_reads_it() -> None:
    schedule = ReuseSchedule((0, 4, 5, 7), (1, 2, 3, 6, 8, 9), 0.0)
    none = ReuseSchedule(tuple(range(10)), (), 0.0)
    candidate = fixed_candidate("f", {(0, "cond"): schedule, (0, "uncond"): schedule, (1, "cond"): none}, "linear")
    assert candidate.options == {"steps": "0.cond=1-3+6+8-9/0.uncond=1-3+6+8-9", "reuse": "linear"}
    assert parse_reuse_steps(candidate.options["steps"], 2)[0, "cond"] == set(schedule.reused)
    with pytest.raises(CampaignError, match="reuses nothing"):
        fixed_candidate("f", {(0, "cond"): none}, "plain")
