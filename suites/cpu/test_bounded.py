"""Where no bytes are claimed: bf16 beside other kernels, under the module lock (T1), and free (T2)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from oracle.evidence.identity import identity_of
from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.start import shifted_start
from oracle.evidence.trace import TraceError
from oracle.faults import kernels, slips
from oracle.faults.numerics import FAULTS
from oracle.faults.plant import HERE, Plant, nothing
from oracle.faults.scenario import REQUEST, Run, bounded
from oracle.faults.trial import References, count_changed, record_run, try_scenario
from oracle.verdict.bounded import calibrate
from oracle.verdict.compare import compare
from oracle.verdict.drift import check_drift
from oracle.verdict.finding import Verdict
from oracle.verdict.tolerance import MARGIN, ToleranceError, perturbation, unit_roundoff
from suites.support import load_engine
from suites.traced import ASKED as TINY
from suites.traced import with_manifest

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

pytestmark = pytest.mark.cpu

FIXTURES = Path(__file__).parents[2] / "fixtures"
U = unit_roundoff("bfloat16")
ASKED = replace(REQUEST, frames=1, steps=3)
SERIAL, PARALLEL = bounded("pp1cfg1", ASKED), bounded("pp2cfg2", ASKED)
PRECISE = SERIAL.candidate.locked_on
assert PRECISE is not None
HALVES = partial(kernels.split_sums, 2)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    checkpoints = {"single": FIXTURES / "micro", "dual": FIXTURES / "micro-dual"}
    return References(checkpoints, tmp_path_factory.mktemp("bounded"))


@pytest.fixture(scope="module")
def precise(references: References, ranks: RankPool) -> Trace:
    return references.get(PRECISE, ranks)


@pytest.fixture(scope="module")
def base(references: References, ranks: RankPool) -> Trace:
    return references.get(SERIAL.reference, ranks)


@pytest.fixture
def variant(references: References, ranks: RankPool, tmp_path: Path) -> Callable[..., Trace]:
    """The candidate by other kernels, or with a slip."""

    def record(plant: Plant, run: Run = SERIAL.candidate, name: str = "variant") -> Trace:
        outcomes = record_run(run, references, tmp_path / name, ranks, plant, 60.0)
        assert [each.kind for each in outcomes] == ["value"] * len(outcomes), outcomes
        return open_trace(tmp_path / name)

    return record


def says(verdict: Verdict) -> str:
    return "\n".join(map(str, verdict.findings))


# What it lets pass, and what it finds.


@pytest.mark.parametrize("scenario", [SERIAL, PARALLEL], ids=["pp1cfg1", "pp2cfg2"])
def test_other_kernels_with_other_bytes_keep_the_bound_in_any_topology(
    precise: Trace, base: Trace, variant: Callable[..., Trace], scenario: object
) -> None:
    trace = variant(HALVES, scenario.candidate)  # type: ignore[attr-defined]
    assert count_changed(base, trace) > 0
    verdict = compare(base, trace, "kernels", precise=precise)
    assert verdict.holds, says(verdict)
    assert verdict.compared > 100


def gain(factor: float, **place: object) -> object:
    def attend(original: Callable[..., torch.Tensor], *args: object, **options: object) -> torch.Tensor:
        return original(*args, **options) * factor

    return slips._there(slips.block, "dispatch_attention_fn", place, attend)


def test_a_gain_of_a_percent_in_one_block_is_found_there_and_one_within_the_rounding_is_not(
    precise: Trace, base: Trace, variant: Callable[..., Trace]
) -> None:
    here = {"block": 2, "step": 1, "branch": "cond"}
    found = compare(base, variant(partial(gain, 1.02, **here), name="large"), "kernels", precise=precise)
    assert found.first is not None
    assert (found.first.spot.step, found.first.spot.branch, found.first.spot.block) == (1, "cond", 2)
    assert "attn" in found.first.says
    assert compare(base, variant(partial(gain, 1 + U / 8, **here), name="small"), "kernels", precise=precise).holds


@pytest.mark.parametrize("name", ["solver-in-bfloat16", "latents-in-bfloat16", "timestep-in-bfloat16"])
def test_what_no_bound_of_bf16_can_see_is_held_to_its_bytes_and_pointed_at(
    references: References, ranks: RankPool, tmp_path: Path, name: str
) -> None:
    (fault,) = (each for each in FAULTS if each.id == f"numerics-{name}")
    trial = try_scenario(fault.scenario, fault.plant, references, ranks, tmp_path / "trial")
    assert fault.pointed(trial.verdict), says(trial.verdict)


def not_finite(**place: object) -> object:
    return slips._there(slips.block, "run_block", place, lambda original, *args: original(*args) * float("nan"))


def test_a_value_that_is_not_finite_is_a_finding(precise: Trace, base: Trace, variant: Callable[..., Trace]) -> None:
    found = compare(base, variant(partial(not_finite, block=1, step=2, branch="cond")), "kernels", precise=precise)
    assert found.first is not None
    assert (found.first.spot.step, found.first.spot.block) == (2, 1)
    assert "NaN" in found.first.says


# What it needs.


def test_without_the_lock_or_under_another_nothing_is_measured_and_nothing_holds(
    references: References, ranks: RankPool, precise: Trace, base: Trace, tmp_path: Path
) -> None:
    free = references.get(replace(SERIAL.candidate, locked_on=None), ranks)
    unlocked = compare(base, free, "kernels", precise=precise)
    assert not unlocked.holds
    assert "recorded under no lock" in says(unlocked)
    other = with_manifest(base, tmp_path / "other", lock={"name": "module", "of": "0" * 64})
    assert "recorded under the module lock on 00000000" in says(compare(other, base, "kernels", precise=precise))
    coarse = with_manifest(base, tmp_path / "coarse", lock={**base.manifest["lock"], "name": "block"})
    assert "recorded under the block lock" in says(compare(base, coarse, "kernels", precise=precise))


def test_a_lock_without_the_modules_ports_is_no_evidence(
    references: References, ranks: RankPool, precise: Trace, base: Trace
) -> None:
    without = references.get(replace(SERIAL.candidate, ports=False), ranks)
    assert "no module's output was recorded" in says(compare(base, without, "kernels", precise=precise))


def test_the_precise_run_is_of_the_same_request(
    references: References, ranks: RankPool, base: Trace, tmp_path: Path
) -> None:
    other = references.get(replace(PRECISE, request=replace(ASKED, prompt="a blue circle")), ranks)
    locked = with_manifest(base, tmp_path / "locked", lock={"name": "module", "of": identity_of(other)})
    assert "precise: " in says(compare(locked, locked, "kernels", precise=other))


def test_what_a_bounded_contract_cannot_judge_is_refused_by_name(
    references: References, ranks: RankPool, precise: Trace, base: Trace, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"contract='kernels' is bounded.*give precise"):
        compare(base, base, "kernels")
    with pytest.raises(ValueError, match="contract='rerun' takes neither precise nor limits"):
        compare(base, base, "rerun", precise=precise)
    with pytest.raises(ToleranceError, match="dtype='float32' has no T1"):
        compare(precise, precise, "kernels", precise=precise)
    with pytest.raises(ToleranceError, match="is of dtype 'bfloat16': give a float32 run"):
        compare(base, base, "kernels", precise=base)
    with pytest.raises(TraceError, match="recorded at level 'stats'"):
        compare(base, with_manifest(base, tmp_path / "stats", level="stats"), "kernels", precise=precise)


# Calibration.


@pytest.fixture(scope="module")
def benign(references: References, ranks: RankPool) -> list[Trace]:
    traces = []
    for number, plant in enumerate(kernels.CALIBRATING):
        folder = references.folder / f"benign{number}"
        outcomes = record_run(SERIAL.candidate, references, folder, ranks, plant, 60.0)
        assert [each.kind for each in outcomes] == ["value"], outcomes
        traces.append(open_trace(folder))
    return traces


def test_limits_come_from_benign_variants_and_are_near_what_the_variants_measured(
    precise: Trace, base: Trace, benign: list[Trace]
) -> None:
    limits = calibrate(precise, base, benign)
    assert MARGIN <= limits.rho <= 2.5
    assert limits.beta == U
    assert all(compare(base, trace, "kernels", precise=precise, limits=limits).holds for trace in benign)
    tight = replace(limits, rho=limits.rho / MARGIN / 1.01)
    assert not all(compare(base, trace, "kernels", precise=precise, limits=tight).holds for trace in benign)


def test_nothing_is_calibrated_on_too_few_variants_or_on_one_with_a_fault(
    precise: Trace, base: Trace, benign: list[Trace], variant: Callable[..., Trace]
) -> None:
    with pytest.raises(ToleranceError, match="4 benign variants"):
        calibrate(precise, base, benign[:4])
    wrong = variant(partial(slips.solver_in_bfloat16, step=1))
    with pytest.raises(ToleranceError, match=r"variant 5 .* calibrates nothing: .*other bytes"):
        calibrate(precise, base, [*benign[:5], wrong])


# T2: free runs.


def record_free(folder: str, seed: int | None, plant: Plant) -> None:
    """For ranks: a free run in bf16; with a seed, from initial latents that are shifted by one rounding."""
    from oracle.evidence.probe import recording
    from oracle.evidence.start import shifted_start
    from oracle.faults.plant import watching
    from wanref.pipeline import WanReference

    with ExitStack() as stack:
        stack.enter_context(watching())
        stack.enter_context(plant())
        engine = WanReference.from_pretrained(FIXTURES / "micro", dtype="bfloat16")
        if seed is not None:
            stack.enter_context(shifted_start(engine, partial(perturbation, unit_roundoff=U, seed=seed)))
        stack.enter_context(recording(engine, Path(folder), "tensor"))
        engine(ASKED)


@pytest.fixture(scope="module")
def free(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    folder = tmp_path_factory.mktemp("free")

    def record(name: str, seed: int | None = None, plant: Plant = nothing) -> Trace:
        if not (folder / name).exists():
            ranks.run(1, record_free, str(folder / name), seed, plant)
        return open_trace(folder / name)

    return record


def runs_away(step: int) -> object:
    def run(original: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
        hidden = original(*args)
        return hidden * 1.5 if HERE.step >= step else hidden

    return slips.around(slips.block, "run_block", run)


def test_a_free_run_that_runs_away_is_found_at_its_step_and_one_by_other_kernels_is_not(
    free: Callable[..., Trace],
) -> None:
    base, perturbed = free("base"), [free(f"perturbed{seed}", seed) for seed in range(3)]
    assert check_drift(base, free("halves", plant=HALVES), perturbed) is None
    found = check_drift(base, free("away", plant=partial(runs_away, 1)), perturbed)
    assert found is not None
    assert (found.spot.step, found.layer) == (1, "tensors")
    assert "(T2, relative)" in found.says


def test_t2_refuses_locked_runs_too_few_perturbed_ones_and_runs_that_were_not_perturbed(
    free: Callable[..., Trace], base: Trace
) -> None:
    run, perturbed = free("base"), [free(f"perturbed{seed}", seed) for seed in range(3)]
    with pytest.raises(ToleranceError, match="recorded under a lock"):
        check_drift(run, base, perturbed)
    with pytest.raises(ToleranceError, match="2 perturbed runs"):
        check_drift(run, run, perturbed[:2])
    with pytest.raises(ToleranceError, match="does not drift at all"):
        check_drift(run, run, [*perturbed, run])


def test_a_shifted_start_ends_with_its_block(tiny: Callable[..., Path]) -> None:
    engine = load_engine(tiny())
    own = engine(TINY).latents
    with shifted_start(engine, partial(perturbation, unit_roundoff=U, seed=0)):
        shifted = engine(TINY).latents
    assert not torch.equal(shifted, own)
    assert torch.allclose(shifted, own, atol=0.5)
    assert torch.equal(engine(TINY).latents, own)
