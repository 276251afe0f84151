"""The oracle's own trial: planted faults and benign variants, on a sample; `make mutants` runs all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from oracle.faults.benign import BENIGN, draw_variants
from oracle.faults.catalogue import BOUNDED_FAULTS, FAULTS
from oracle.faults.fault import Kind
from oracle.faults.kernels import CALIBRATION, SCORED, draw_kernels
from oracle.faults.plant import HERE, around, nothing
from oracle.faults.score import sample_faults, score
from oracle.report.mutants import score_table, write_score

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
CHECKPOINTS = {"single": ROOT / "fixtures" / "micro", "dual": ROOT / "fixtures" / "micro-dual"}
SAMPLE_SEED, BENIGN_SEED = 4, 5
ALL = (*FAULTS, *BOUNDED_FAULTS)


def test_the_catalogue_covers_every_kind():
    assert len(FAULTS) >= 40
    assert len(BOUNDED_FAULTS) >= 12
    assert {fault.kind for fault in ALL} == set(get_args(Kind))
    assert min(Counter(fault.kind for fault in ALL).values()) >= 5
    assert len({fault.id for fault in ALL}) == len(ALL)
    assert len(BENIGN) >= 20
    assert len(SCORED) >= 8
    kinds = [*(benign.kind for benign in BENIGN), *(kernel.kind for kernel in SCORED)]
    assert len(set(kinds)) == len(kinds)


def test_each_fault_names_a_row_of_the_public_reports():
    for fault in ALL:
        rows = fault.source.split(":")[0]
        assert rows[0] in "LCESTDVMPKO", fault.id
        assert rows[1:].isdecimal(), fault.id


def test_a_fault_that_a_test_would_have_caught_names_a_test_that_is_there():
    for fault in ALL:
        assert fault.caught_by is None or (ROOT / "suites" / "cpu" / fault.caught_by).is_file(), fault.id


def test_variants_are_drawn_alike_from_one_seed_and_of_every_kind():
    drawn = [(v.kind, v.scenario) for v in draw_variants(300, BENIGN_SEED)]
    assert drawn == [(v.kind, v.scenario) for v in draw_variants(300, BENIGN_SEED)]
    assert {kind for kind, _ in drawn} == {benign.kind for benign in BENIGN}
    assert len(set(drawn)) > 150
    bounded = [(v.kind, v.scenario) for v in draw_kernels(60, BENIGN_SEED)]
    assert bounded == [(v.kind, v.scenario) for v in draw_kernels(60, BENIGN_SEED)]
    assert {kind for kind, _ in bounded} == {kernel.kind for kernel in SCORED}


def test_what_calibrates_the_limits_is_not_what_is_scored():
    scored = {variant.scenario.candidate.request for variant in draw_kernels(60, BENIGN_SEED)}
    assert CALIBRATION.candidate.request not in scored | {fault.scenario.candidate.request for fault in BOUNDED_FAULTS}


def test_what_is_planted_is_taken_out_again():
    class Owner:
        def value(self) -> int:
            return 1

    before = Owner.value
    with around(Owner, "value", lambda original, owner: original(owner) + 1):
        assert Owner().value() == 2
    assert Owner.value is before
    assert not HERE.at(step=0)


def test_a_sample_is_found_and_pointed_at_without_a_false_alarm():
    quick = [fault for fault in FAULTS if fault.id != "topology-reuse-does-not-send"]  # it hangs, and is waited for
    result = score(sample_faults(quick, 12, SAMPLE_SEED), tuple(draw_variants(12, BENIGN_SEED)), CHECKPOINTS)
    wrong = [row for row in result.rows if (not row.pointed if row.planted else row.alarm)]
    assert result.passes, "\n".join(f"{row.id}: {row.says}, expected {row.expected}" for row in wrong)
    assert result.pointed == 12


def test_in_bf16_a_sample_is_found_and_pointed_at_without_a_false_alarm():
    variants = tuple(draw_kernels(len(SCORED), BENIGN_SEED))
    result = score(sample_faults(BOUNDED_FAULTS, 5, SAMPLE_SEED), variants, CHECKPOINTS)
    wrong = [row for row in result.rows if (not row.pointed if row.planted else row.alarm)]
    assert result.passes, "\n".join(f"{row.id}: {row.says}, expected {row.expected}" for row in wrong)
    assert result.pointed == 5
    assert result.changed > 0, "no variant has other bytes: nothing was tried"
    assert result.as_json()["bounded_planted"] == 5


def test_the_score_can_be_bad(tmp_path: Path):
    fault = next(fault for fault in FAULTS if fault.id == "topology-last-token-dropped")
    missed = replace(fault, id="nothing-planted", plant=nothing)
    elsewhere = replace(fault, id="elsewhere", points=replace(fault.points, step=3))
    variant = next(draw_variants(1, BENIGN_SEED))
    cried = replace(variant, scenario=fault.scenario, plant=fault.plant)
    result = score([missed, elsewhere], [cried], CHECKPOINTS, workers=1)
    assert (result.found, result.pointed, result.false_alarms) == (1, 0, 1)
    assert not result.passes
    write_score(tmp_path / "mutants.json", result)
    assert '"false_alarms": 1' in (tmp_path / "mutants.json").read_text()
    assert score_table(result).row_count == 5
