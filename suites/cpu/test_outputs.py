"""Two outputs beside each other: by hand-computed cases, and by `wanref diff` on what `wanref generate` wrote."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oracle.evidence.outputs import OutputError, is_output, read_output
from oracle.verdict.outputs import compare_outputs
from suites.cpu.command import SHOW, invoke

pytestmark = pytest.mark.cpu


def frames(value: float) -> np.ndarray:
    return np.full((2, 16, 16, 3), value, dtype=np.float32)


def test_a_constant_shift_is_its_own_mean_rms_and_largest_difference() -> None:
    difference = compare_outputs(frames(0.25), frames(0.5))
    assert (difference.mae, difference.rmse, difference.largest, difference.relative) == (0.25, 0.25, 0.25, 1.0)
    assert difference.psnr == pytest.approx(20 * math.log10(4))
    assert difference.differing == difference.elements == 2 * 16 * 16 * 3
    assert not difference.same


def test_one_pixel_is_found_and_its_share_is_right() -> None:
    moved = frames(0.5)
    moved[1, 3, 4, 2] = 1.0
    difference = compare_outputs(frames(0.5), moved)
    assert difference.differing == 1
    assert difference.largest == 0.5
    assert difference.mae == pytest.approx(0.5 / moved.size)
    assert difference.rmse == pytest.approx(0.5 / math.sqrt(moved.size))


def test_equal_frames_have_no_end_of_psnr_and_latents_have_none() -> None:
    assert compare_outputs(frames(0.5), frames(0.5)).psnr == math.inf
    latents = np.ones((1, 4, 2, 4, 4), dtype=np.float32)
    assert compare_outputs(latents, latents).psnr is None
    assert compare_outputs(latents * 0, latents).relative is None


def test_the_sign_of_zero_is_other_bytes_and_no_difference() -> None:
    difference = compare_outputs(frames(0.0), -frames(0.0))
    assert not difference.same
    assert difference.differing == 0


@pytest.mark.parametrize(
    ("candidate", "says"),
    [(frames(0.5)[:1], "are no pair"), (frames(float("nan")), "the candidate has 1536 values that are not finite")],
)
def test_what_is_no_pair_is_refused(candidate: np.ndarray, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compare_outputs(frames(0.5), candidate)


@pytest.fixture(scope="module")
def outputs(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layouts of one checkpoint, and of another request."""
    folder = tmp_path_factory.mktemp("outputs")
    whole, sharded = tiny(), tiny(shards=3)
    for checkpoint, name, seed in ((whole, "whole", 7), (sharded, "sharded", 7), (whole, "other", 8)):
        for suffix in (".safetensors", ".mp4", ""):
            arguments = [*SHOW, "--seed", str(seed), "--output", str(folder / f"{name}{suffix}")]
            done = invoke("generate", checkpoint, *arguments)
            assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize("suffix", [".safetensors", ".mp4", ""])
def test_another_request_differs_and_says_how_far(outputs: Path, suffix: str) -> None:
    assert is_output(outputs / f"whole{suffix}")
    same = invoke("diff", outputs / f"whole{suffix}", "--against", outputs / f"whole{suffix}")
    assert same.exit_code == 0, same.output
    assert "differing  0 of" in same.stdout
    other = invoke("diff", outputs / f"whole{suffix}", "--against", outputs / f"other{suffix}")
    assert other.exit_code == 1
    told = dict(line.split(maxsplit=1) for line in other.stdout.splitlines())
    assert float(told["MAE"]) > 0
    assert float(told["largest"]) >= float(told["RMSE"]) >= float(told["MAE"])
    assert ("PSNR" in told) == ("SSIM" in told) == (suffix != ".safetensors")


def test_two_layouts_of_one_checkpoint_are_compared_by_what_they_render(outputs: Path) -> None:
    done = invoke("diff", outputs / "whole.safetensors", "--against", outputs / "sharded.safetensors")
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    # On a CPU whose products round by where a matrix lies, another layout may give another last bit, and no more.
    assert float(told["relative"]) < 1e-4
    assert (done.exit_code == 0) == (len(set(told["digests"].split())) == 1)


def test_what_is_no_output_is_refused_by_name(tmp_path: Path, outputs: Path) -> None:
    (tmp_path / "broken.mp4").write_text("no video")
    with pytest.raises(OutputError, match=r"broken\.mp4.* is not accepted: give NAME\.mp4"):
        read_output(tmp_path / "broken.mp4")
    whole = outputs / "whole.safetensors"
    done = invoke("diff", whole, whole, "--against", whole)
    assert done.exit_code == 2
    assert "2 outputs against 1 are not accepted" in " ".join(done.stderr.split())
