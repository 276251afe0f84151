"""What a test may claim through the plugin: traces, arrays, twins, bounds, noise and schedules, each judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from oracle.evidence.emitter import Emitter, Engine
from oracle.evidence.reader import Trace, open_trace
from oracle.fixtures import Oracle
from oracle.plugin import NotEquivalent
from oracle.report.claim import claim_equivalent
from oracle.verdict.tolerance import measure_t1
from suites.traced import ASKED, CACHE_DIT, edited, record_trace
from wanref.observe import TensorKey

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

pytestmark = pytest.mark.cpu

VALUES = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def changed(place: tuple[int, int] = (1, 2), by: float = 0.5) -> Any:
    values = VALUES.copy()
    values[place] += by
    return values


@pytest.fixture
def oracle(tmp_path: Path) -> Oracle:
    """As the plugin makes it for a test."""
    item: Any = SimpleNamespace(
        nodeid="test_theirs.py::test_it", user_properties=[], config=SimpleNamespace(rootpath=tmp_path)
    )
    return Oracle(item, tmp_path / "recorded", level=None, shared=True, warn=False, waivers=())


def properties(oracle: Oracle) -> dict[str, str]:
    return dict(oracle._item.user_properties)


# Arrays.


@pytest.mark.parametrize(
    "other",
    [
        VALUES.copy(),
        torch.from_numpy(VALUES),
        torch.from_numpy(VALUES.T.copy()).T,
        np.asfortranarray(VALUES),
    ],
    ids=["array", "tensor", "strided tensor", "other order"],
)
def test_arrays_are_equivalent_by_their_bytes_wherever_they_are(oracle: Oracle, other: Any) -> None:
    oracle.assert_equivalent(VALUES, other)
    oracle.assert_equivalent({"a": VALUES, "b": [VALUES]}, {"a": other, "b": [other]})
    assert properties(oracle)["oracle.2.verdict"] == "holds"


def test_bfloat16_tensors_are_compared_by_their_own_bytes(oracle: Oracle) -> None:
    one = torch.from_numpy(VALUES).bfloat16()
    oracle.assert_equivalent(one, one.clone())
    with pytest.raises(NotEquivalent, match=r"`output`: 1 of 12 elements differ, by 0.499 at most, first at \(1, 2\)"):
        oracle.assert_equivalent(one, torch.from_numpy(changed()).bfloat16())


@pytest.mark.parametrize(
    ("reference", "candidate", "says"),
    [
        (VALUES, changed(), "`output`: 1 of 12 elements differ, by 0.5 at most, first at (1, 2)"),
        ([VALUES, VALUES], (VALUES, changed()), "`1`: 1 of 12 elements differ"),
        ({"x": {"y": VALUES}}, {"x": {"y": changed()}}, "`x.y`: 1 of 12 elements differ"),
        (np.array([0.0, 1]), np.array([-0.0, 1]), "1 of 2 elements differ, in their bytes alone, as 0 and -0 do"),
        (VALUES, VALUES.astype(np.float64), "its dtype is float64, and float32 in the reference"),
        (VALUES, VALUES.T, "its shape is (4, 3), and (3, 4) in the reference"),
        (np.array([np.nan, 1]), np.array([np.nan, 1]), "1 NaN and 0 infinite elements"),
        (np.array([np.inf, 1]), np.array([0.0, 1]), "0 NaN and 1 infinite elements in the reference"),
        ({"a": VALUES}, {"a": VALUES, "b": VALUES}, "`b`: is here only"),
        ({"a": VALUES, "b": VALUES}, {"a": VALUES}, "`b`: is in the reference only"),
        ({}, {}, "not one value was compared"),
        (np.zeros((0, 4)), np.zeros((0, 4)), "not one value was compared"),
        (np.zeros(4), np.zeros(4), "every compared value is zero"),
    ],
)
def test_arrays_that_differ_or_show_nothing_fail_and_say_where(
    oracle: Oracle, reference: Any, candidate: Any, says: str
) -> None:
    with pytest.raises(NotEquivalent) as failed:
        oracle.assert_equivalent(reference, candidate)
    assert says in failed.value.sentence
    assert str(failed.value).startswith(failed.value.sentence)
    assert properties(oracle)["oracle.verdict"] == "fails"


def test_every_array_that_differs_is_found(oracle: Oracle) -> None:
    names = [f"block{number}" for number in range(6)]
    with pytest.raises(NotEquivalent, match="and 2 more findings") as failed:
        oracle.assert_equivalent(dict.fromkeys(names, VALUES), dict.fromkeys(names, changed()))
    assert failed.value.sentence.startswith("`block0`")
    assert "next: `block3`" in str(failed.value)


@pytest.mark.parametrize(
    ("reference", "candidate", "contract", "error", "says"),
    [
        (VALUES, Path("trace"), "rerun", TypeError, "give two traces or two sets of arrays"),
        (VALUES, VALUES, "cached", ValueError, "contract='cached' is not accepted for arrays"),
        (VALUES, VALUES, "kernels", ValueError, "contract='kernels' is not accepted for arrays"),
        (VALUES, VALUES, "equal", ValueError, "contract='equal' is not accepted: give one of rerun, topology"),
        ("a", "b", "kernals", ValueError, "contract='kernals' is not accepted"),
        ([None], [None], "rerun", ValueError, "dtype='object' is not accepted"),
    ],
)
def test_what_cannot_be_compared_is_an_error_and_no_verdict(
    oracle: Oracle, reference: Any, candidate: Any, contract: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as failed:
        oracle.assert_equivalent(reference, candidate, contract)
    assert not isinstance(failed.value, NotEquivalent)
    assert properties(oracle) == {}


# Traces, and evidence of a subject: a trace and an output.


@pytest.fixture(scope="module")
def native(ranks: RankPool, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record_trace(ranks, tiny(), tmp_path_factory.mktemp("native") / "trace", requests=(ASKED, ASKED))


def test_a_trace_is_taken_as_a_folder_a_word_a_trace_or_evidence(oracle: Oracle, native: Trace) -> None:
    for one in (native, native.folder, str(native.folder), SimpleNamespace(trace=native.folder, output=None)):
        oracle.assert_equivalent(native, one)
    oracle.assert_equivalent(native, native, "used engine", requests=(0, 1))
    assert properties(oracle)["oracle.5.contract"] == "used engine"


def test_evidence_is_compared_by_its_trace_and_by_its_output(oracle: Oracle, native: Trace) -> None:
    def evidence(output: Any) -> Any:
        return SimpleNamespace(trace=native.folder, output=output)

    oracle.assert_equivalent(evidence(VALUES), evidence(VALUES.copy()))
    with pytest.raises(NotEquivalent, match="1 of 12 elements differ"):
        oracle.assert_equivalent(evidence(VALUES), evidence(changed()))
    with pytest.raises(NotEquivalent, match="`output`: is in the reference only"):
        oracle.assert_equivalent(evidence(VALUES), evidence(None))


def test_a_claim_tells_of_the_first_place_that_differs_and_of_both_final_digests(native: Trace, tmp_path: Path) -> None:
    def edit(event: dict[str, Any]) -> dict[str, Any]:
        if event["kind"] == "tensor" and (event["step"], event["block"]) in ((2, 1), (3, "scheduler")):
            event["digest"] = "0" * 31 + "1"
        return event

    other = edited(native, tmp_path / "other", edit)
    claim = claim_equivalent(native, other, "rerun")
    assert not claim.holds
    assert claim.facts["first_divergence"] == "rank 0, stage 0, step 2, cond, block 1"
    assert claim.facts["digest.candidate"] == "0" * 31 + "1"
    assert claim.facts["digest.reference"] != claim.facts["digest.candidate"]
    assert claim.facts["subject"] == "wanref"
    assert claim.traces == {"reference": native.folder, "candidate": other.folder}


def test_twins_of_an_engine_of_wanref_hold(oracle: Oracle, tiny: Callable[..., Path]) -> None:
    from suites.support import load_engine

    engine = load_engine(str(tiny()), "pp1cfg1", "float32")
    three = oracle.record(engine, ASKED, CACHE_DIT)
    oracle.assert_twins(three)
    said = properties(oracle)
    assert (said["oracle.contract"], said["oracle.2.contract"]) == ("forced", "cached")
    assert int(said["oracle.2.hits"]) > 0
    assert open_trace(three.cached).manifest["cache"]["method"] == "cache-dit"
    with pytest.raises(ValueError, match="request and cache go together"):
        oracle.record(engine, ASKED)


# Bounds, noise, schedules.


def module_outputs() -> tuple[Any, Any]:
    precise = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    return precise, precise.bfloat16()


def test_a_bound_tells_the_worst_rho_and_where_it_is_passed(oracle: Oracle) -> None:
    precise, base = module_outputs()
    oracle.assert_bounded({"a": precise, "b": precise}, {"a": base, "b": base}, {"a": base, "b": base})
    right = measure_t1(*(each.float().numpy() for each in (precise, base, base)), 2.0**-8)
    assert properties(oracle)["oracle.worst_rho"] == f"{right.rho:.4g}"
    wrong = base.clone()
    wrong[0, 3] = 0
    with pytest.raises(NotEquivalent, match=r"`b`: rho is \d"):
        oracle.assert_bounded({"a": precise, "b": precise}, {"a": base, "b": base}, {"a": base, "b": wrong})
    expected = measure_t1(*(each.float().numpy() for each in (precise, base, wrong)), 2.0**-8)
    assert properties(oracle)["oracle.2.worst_rho"] == f"{expected.rho:.4g}"
    assert properties(oracle)["oracle.2.worst_token_rho"] == f"{expected.token_rho:.4g}"


def test_a_bound_is_no_claim_without_all_three_sides_or_in_another_dtype(oracle: Oracle) -> None:
    precise, base = module_outputs()
    with pytest.raises(NotEquivalent, match="`b`: is not on all three sides"):
        oracle.assert_bounded({"a": precise, "b": precise}, {"a": base}, {"a": base})
    with pytest.raises(NotEquivalent, match="its dtype is float16, and bfloat16 in the base"):
        oracle.assert_bounded(precise, base, base.half())
    with pytest.raises(NotEquivalent, match="not one value was compared"):
        oracle.assert_bounded({}, {}, {})


def noisy_trace(folder: Path, seed: int, shift: float = 0.0) -> Path:
    emitter = Emitter(folder, Engine("other", "2.0", layers=1), level="tensor")
    schedule = [{"index": 0, "timestep": 999.0, "sigma": 1.0, "expert": "high", "guidance_scale": 1.0}]
    request = emitter.begin(schedule)
    noise = np.random.default_rng(seed).normal(0, 1e-3, (4, 8))
    value = (np.linspace(-1, 1, 32).reshape(4, 8) + noise + shift).astype(np.float32)
    for branch, block in (("cond", "embed"), ("cond", 0), ("cond", "project"), (None, "combine"), (None, "scheduler")):
        emitter.tensor(TensorKey(request, 0, "high", branch, block), value)  # type: ignore[arg-type]
    emitter.end(request)
    emitter.close()
    return folder


def test_runs_that_do_not_repeat_are_judged_by_their_own_noise(oracle: Oracle, tmp_path: Path) -> None:
    base = [noisy_trace(tmp_path / f"base{n}", n) for n in range(6)]
    head = [noisy_trace(tmp_path / f"head{n}", 100 + n) for n in range(2)]
    oracle.assert_within_noise(base, head)
    assert properties(oracle)["oracle.contract"] == "noise"
    moved = [noisy_trace(tmp_path / f"moved{n}", 200 + n, shift=0.5) for n in range(2)]
    with pytest.raises(NotEquivalent, match="outside noise from"):
        oracle.assert_within_noise(base, moved)


def test_what_an_engine_logged_is_held_to_the_schedule_that_it_ran(oracle: Oracle, native: Trace) -> None:
    line = "DBCache_F1B0_W{}I1M0MC3_R0.24_N{}_CFG1"
    oracle.assert_schedule(f"INFO: {line.format(2, 4)}\nINFO: done", native.folder)
    with pytest.raises(NotEquivalent, match="its budget is 50 steps, and the schedule gives this expert 4"):
        oracle.assert_schedule(line.format(2, 50), native.folder)
    with pytest.raises(NotEquivalent, match="the log has no context line"):
        oracle.assert_schedule("INFO: done", native.folder)
    with pytest.raises(ValueError, match="request=2 is not accepted"):
        oracle.assert_schedule(line.format(2, 4), native.folder, request=2)
