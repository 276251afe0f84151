"""Each layer of the comparison finds what it is there for, and nothing else; equal runs hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oracle.evidence.reader import Trace
from oracle.verdict.compare import compare
from oracle.verdict.contracts import CONTRACTS, markdown_table
from oracle.verdict.finding import Verdict
from oracle.verdict.localise import locate
from suites.traced import ASKED, CACHE_DIT, TEACACHE, Event, edited, record_trace, with_manifest

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def recorded(ranks: RankPool, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """Real runs: native, forced and cached, serial and in pp2cfg2."""
    folder, checkpoint = tmp_path_factory.mktemp("traces"), tiny()
    return {
        "native": record_trace(ranks, checkpoint, folder / "native"),
        "native pp2cfg2": record_trace(ranks, checkpoint, folder / "native4", "pp2cfg2"),
        "forced": record_trace(ranks, checkpoint, folder / "forced", "pp2cfg2", TEACACHE, forced=True),
        "cached": record_trace(ranks, checkpoint, folder / "cached", "pp2cfg2", TEACACHE),
        "cached pp2cfg1": record_trace(ranks, checkpoint, folder / "cached2", "pp2cfg1", TEACACHE),
        "cache-dit": record_trace(ranks, checkpoint, folder / "dit", "pp1cfg1", CACHE_DIT),
        "twice": record_trace(ranks, checkpoint, folder / "twice", requests=(ASKED, ASKED)),
    }


def check(verdict: Verdict, layer: str, *words: str) -> None:
    assert verdict.layer == layer, [str(each) for each in verdict.findings]
    for word in words:
        assert word in verdict.sentence, verdict.sentence


@pytest.mark.parametrize(
    ("reference", "candidate", "contract"),
    [
        ("native", "native pp2cfg2", "topology"),
        ("native pp2cfg2", "forced", "forced"),
        ("forced", "cached", "cached"),
        ("cached pp2cfg1", "cached", "cfg"),
        ("cache-dit", "cache-dit", "rerun"),
    ],
)
def test_equal_runs_hold_with_their_keys_counted(
    recorded: dict[str, Trace], reference: str, candidate: str, contract: str
) -> None:
    verdict = compare(recorded[reference], recorded[candidate], contract)
    assert verdict.holds, verdict.sentence
    assert verdict.compared > 30
    if CONTRACTS[contract].cached:
        assert verdict.hits
        assert verdict.misses


def test_a_request_on_a_used_engine_meets_itself_on_a_fresh_one(recorded: dict[str, Trace]) -> None:
    assert compare(recorded["native"], recorded["twice"], "used engine", requests=(0, 1)).holds


# One test a layer: its own finding, and by what it is the first.


def test_configuration_another_guidance_or_expert_at_a_step_is_named(
    recorded: dict[str, Trace], tmp_path: Path
) -> None:
    def other_guidance(event: Event) -> Event:
        if event["kind"] == "request" and event["moment"] == "begin":
            event["schedule"][2]["guidance_scale"] = 3.0
        return event

    verdict = compare(recorded["native"], edited(recorded["native"], tmp_path / "t", other_guidance), "rerun")
    check(verdict, "configuration", "step 2", "guidance_scale is 3.0, and 4.0")
    changed = with_manifest(recorded["native"], tmp_path / "m", dtype="bfloat16")
    check(compare(recorded["native"], changed, "rerun"), "configuration", "dtype is 'bfloat16', and 'float32'")


def test_configuration_who_decided_a_value_is_no_difference(recorded: dict[str, Trace], tmp_path: Path) -> None:
    def other_source(event: Event) -> Event:
        if event["kind"] == "request" and event["moment"] == "begin":
            event["resolved"]["sources"] = {"steps": "default"}
        return event

    assert compare(recorded["native"], edited(recorded["native"], tmp_path / "t", other_source), "rerun").holds


@pytest.mark.parametrize("block", ["embed", 1, "project", "combine", "scheduler"])
def test_coverage_a_value_that_is_missing_is_a_hole(
    recorded: dict[str, Trace], tmp_path: Path, block: int | str
) -> None:
    def drop(event: Event) -> Event | None:
        return None if event["kind"] == "tensor" and (event["step"], event["block"]) == (2, block) else event

    broken = edited(recorded["native"], tmp_path / "t", drop)
    here, there = compare(recorded["native"], broken, "rerun"), compare(broken, recorded["native"], "rerun")
    check(here, "coverage", "step 2", str(block))
    check(there, "coverage", "step 2", str(block))
    assert any(finding.says.startswith("nothing is recorded") for finding in here.findings)
    assert any(finding.says.startswith("reference: nothing is recorded") for finding in there.findings)


def test_coverage_a_value_of_which_there_are_two_is_an_extra(recorded: dict[str, Trace], tmp_path: Path) -> None:
    def twice(event: Event) -> Event:
        if event["kind"] == "tensor" and (event["step"], event["block"], event["branch"]) == (1, 2, "cond"):
            event["occurrence"] = 1
        return event

    verdict = compare(recorded["native"], edited(recorded["native"], tmp_path / "t", twice), "rerun")
    assert any("only here" in finding.says for finding in verdict.findings)


def test_coverage_a_rank_that_recorded_nothing_fails_whatever_the_others_say(
    recorded: dict[str, Trace], tmp_path: Path
) -> None:
    broken = edited(recorded["native pp2cfg2"], tmp_path / "t", lambda event: event)
    (broken.folder / "rank3.events.jsonl").unlink()
    verdict = compare(recorded["native"], broken, "topology")
    check(verdict, "coverage", "rank 3")
    assert any("recorded nothing" in finding.says for finding in verdict.findings)


def test_coverage_a_received_value_that_is_not_what_was_sent_is_an_exchange(
    recorded: dict[str, Trace], tmp_path: Path
) -> None:
    def other_bytes(event: Event) -> Event:
        if event["kind"] == "tensor" and (event["step"], event["source"]) == (2, "received") and event["block"] == 1:
            event["digest"] = "0" * 31 + "1"
        return event

    broken = edited(recorded["native pp2cfg2"], tmp_path / "t", other_bytes, rank=3)
    verdict = compare(recorded["native"], broken, "topology")
    check(verdict, "coverage", "rank 3", "step 2", "uncond", "block 1", "rank 2 computed")
    assert verdict.first is not None
    assert verdict.first.cause == "exchange"


def test_coverage_a_cache_without_a_hit_or_without_a_miss_shows_nothing(
    recorded: dict[str, Trace], tmp_path: Path
) -> None:
    with_cache = with_manifest(recorded["native pp2cfg2"], tmp_path / "t", cache=recorded["cached"].manifest["cache"])
    verdict = compare(recorded["forced"], with_cache, "cached")
    check(verdict, "coverage", "no call decided to compute")
    assert any("no call decided to reuse" in finding.says for finding in verdict.findings)


def test_coverage_hits_that_saved_no_work_are_not_hits(recorded: dict[str, Trace], tmp_path: Path) -> None:
    def claim(event: Event) -> Event:
        if event["kind"] == "decision" and event["step"] == 2:
            event.update(verdict="reuse", reason="threshold", shadow=None)
            event["origins"] = [{"request": 0, "step": 1, "expert": "high", "branch": event["branch"], "stage": 0}]
        return {name: value for name, value in event.items() if value is not None or name == "branch"}

    broken = edited(recorded["forced"], tmp_path / "t", claim)
    check(compare(recorded["forced"], broken, "cached"), "coverage", "step 2", "no work was saved")


def test_coverage_values_that_are_all_zero_show_nothing(recorded: dict[str, Trace], tmp_path: Path) -> None:
    def zero(event: Event) -> Event:
        if event["kind"] == "tensor":
            event.update(digest="0" * 32, rms=0.0, absmax=0.0)
        return event

    dead = edited(recorded["native"], tmp_path / "t", zero)
    check(
        compare(dead, edited(recorded["native"], tmp_path / "u", zero), "rerun"),
        "coverage",
        "every recorded value is zero",
    )


def test_coverage_traces_of_nothing_do_not_hold(recorded: dict[str, Trace], tmp_path: Path) -> None:
    empty = edited(recorded["native"], tmp_path / "t", lambda event: None)
    check(compare(empty, empty, "rerun"), "coverage", "no request was recorded")


@pytest.mark.parametrize(("name", "value"), [("signal", 0.5), ("threshold", 0.7), ("reason", "cap")])
def test_decisions_equal_outputs_by_other_decisions_differ(
    recorded: dict[str, Trace], tmp_path: Path, name: str, value: object
) -> None:
    def other(event: Event) -> Event:
        if event["kind"] == "decision" and (event["step"], event["stage"]) == (3, 0):
            event[name] = value
        return event

    verdict = compare(recorded["cached"], edited(recorded["cached"], tmp_path / "t", other), "rerun")
    check(verdict, "decisions", "stage 0", "step 3", "cond")
    assert {finding.layer for finding in verdict.findings} == {"decisions"}


@pytest.mark.parametrize(
    ("change", "says", "cause"),
    [
        ({"branch": "uncond"}, "reused a residual of the uncond branch", "provenance"),
        ({"stage": 1}, "reused a residual of stage 1", "provenance"),
        ({"expert": "low"}, "reused a residual of the low-noise expert", "provenance"),
        ({"request": 7}, "reused a residual of an earlier request", "state left over"),
        ({"step": 3}, "reused a residual of step 3, which had not been computed", "provenance"),
    ],
)
def test_provenance_a_residual_of_another_place_is_named(
    recorded: dict[str, Trace], tmp_path: Path, change: Event, says: str, cause: str
) -> None:
    first = next(r for r in recorded["cached"].records[0] if getattr(r, "verdict", "") == "reuse")

    def foreign(event: Event) -> Event:
        if event["kind"] == "decision" and event["step"] == first.step:
            event["origins"][0].update(change)
        return event

    broken = edited(recorded["cached"], tmp_path / "t", foreign)
    verdict = compare(recorded["forced"], broken, "cached")
    check(verdict, "provenance", f"step {first.step}", says)
    assert verdict.first is not None
    assert verdict.first.cause == cause


def test_provenance_a_reuse_that_does_not_add_up_is_arithmetic(recorded: dict[str, Trace], tmp_path: Path) -> None:
    broken = edited(recorded["cached"], tmp_path / "t", lambda event: event)
    step = next(r.step for r in broken.records[1] if getattr(r, "verdict", "") == "reuse")
    file = next(broken.folder.glob(f"request000.rank1.step{step:04d}.safetensors"))
    data = bytearray(file.read_bytes())
    from oracle.evidence.reader import _header

    header, start = _header(file)
    offset = start + header["cond.3.output.0"]["data_offsets"][0]
    data[offset] ^= 1  # the last bit of one element of the reused output
    file.write_bytes(data)
    verdict = compare(recorded["forced"], broken, "cached")
    check(verdict, "provenance", f"step {step}", "its output is not its input plus the residual")


def test_tensors_the_first_value_that_differs_is_the_first_finding(recorded: dict[str, Trace], tmp_path: Path) -> None:
    def other_bytes(event: Event) -> Event:
        if (
            event["kind"] == "tensor"
            and event["branch"] == "uncond"
            and (event["step"], event["block"]) in ((2, 1), (3, 0))
        ):
            event["digest"] = "0" * 31 + "1"
        return event

    broken = edited(recorded["native"], tmp_path / "t", other_bytes)
    verdict = compare(recorded["native"], broken, "rerun")
    check(verdict, "tensors", "step 2", "uncond", "block 1")
    location = locate(recorded["native"], broken, verdict)
    assert location is not None
    assert location.sentence.startswith("rank 0, stage 0, step 2, uncond: other bytes than the reference")
    assert "first differs at block 1; latents equal until step 3" in location.sentence


def test_output_other_final_latents_by_equal_steps_are_the_output(recorded: dict[str, Trace], tmp_path: Path) -> None:
    def other_bytes(event: Event) -> Event:
        if event["kind"] == "tensor" and (event["step"], event["block"]) == (3, "scheduler"):
            event["digest"] = "0" * 31 + "1"
        return event

    verdict = compare(recorded["native"], edited(recorded["native"], tmp_path / "t", other_bytes), "rerun")
    check(verdict, "output", "step 3", "`scheduler`")


def test_a_nan_is_named_and_never_equal_to_a_number(recorded: dict[str, Trace], tmp_path: Path) -> None:
    def nan(event: Event) -> Event:
        if event["kind"] == "tensor" and (event["step"], event["block"]) == (1, "combine"):
            event.update(digest="0" * 31 + "1", nan=3)
        return event

    verdict = compare(recorded["native"], edited(recorded["native"], tmp_path / "t", nan), "rerun")
    check(verdict, "tensors", "step 1", "3 NaN")


def test_a_nan_on_both_sides_or_in_a_cached_run_does_not_hold(recorded: dict[str, Trace], tmp_path: Path) -> None:
    def nan(event: Event) -> Event:
        if event["kind"] == "tensor" and (event["step"], event["block"]) == (2, "combine"):
            event.update(nan=3)
        return event

    both = edited(recorded["native"], tmp_path / "t", nan)
    check(compare(both, both, "rerun"), "tensors", "step 2", "3 NaN")
    cached = edited(recorded["cached"], tmp_path / "u", nan, rank=1)
    check(compare(recorded["forced"], cached, "cached"), "tensors", "step 2", "3 NaN")


def test_a_replay_that_decides_otherwise_is_found_whatever_its_reasons(
    recorded: dict[str, Trace], tmp_path: Path
) -> None:
    def flip(event: Event) -> Event:
        if event["kind"] == "decision" and event["step"] == 1:
            event["verdict"] = "compute"
        return event

    def reason(event: Event) -> Event:
        return {**event, "reason": "schedule"} if event["kind"] == "decision" else event

    cached = recorded["cached"]
    assert compare(cached, edited(cached, tmp_path / "t", reason), "replay").holds
    verdict = compare(cached, edited(cached, tmp_path / "u", flip), "replay")
    assert any(f.says == "compute, and reuse in the reference" for f in verdict.findings if f.layer == "decisions")


def test_an_earlier_layer_is_the_verdict_and_later_ones_are_still_reported(
    recorded: dict[str, Trace], tmp_path: Path
) -> None:
    def other(event: Event) -> Event:
        if event["kind"] == "request" and event["moment"] == "begin":
            event["resolved"]["flow_shift"] = 9.0
        if event["kind"] == "tensor" and (event["step"], event["block"]) == (0, 0):
            event["digest"] = "0" * 31 + "1"
        return event

    verdict = compare(recorded["native"], edited(recorded["native"], tmp_path / "t", other), "rerun")
    check(verdict, "configuration", "flow_shift is 9.0")
    assert {finding.layer for finding in verdict.findings} == {"configuration", "tensors"}


def test_a_bounded_contract_is_not_judged_by_bytes(recorded: dict[str, Trace]) -> None:
    with pytest.raises(ValueError, match="bounded"):
        compare(recorded["native"], recorded["native"], "kernels")


def test_the_readme_shows_the_table_of_contracts() -> None:
    assert markdown_table() in (Path(__file__).parents[2] / "README.md").read_text()
