"""What `wanref generate` writes, and that a failure leaves nothing under a final name."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from suites.cpu.command import PROMPT, SHOW, STEPS, invoke
from wanref import Output, Request, WanReference
from wanref.files import write_video

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def single(tiny: Callable[..., Path]) -> Path:
    return tiny(blocks=2)


@pytest.fixture(scope="module")
def engine(single: Path) -> WanReference:
    return WanReference.from_pretrained(single)


@pytest.fixture(scope="module")
def expected(engine: WanReference) -> Output:
    return engine(Request(prompt=PROMPT, steps=STEPS, seed=7))


def pixels(frames: np.ndarray) -> np.ndarray:
    return (frames * 255).round().astype(np.uint8)


def read_frames(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(file)) for file in sorted(folder.iterdir())])


# What generate writes.


def test_latents_are_the_engines_and_say_what_request_they_are_of(
    single: Path, expected: Output, tmp_path: Path
) -> None:
    result = invoke("generate", single, *SHOW, "--output", tmp_path / "out.safetensors")
    assert result.exit_code == 0, result.output
    with safe_open(tmp_path / "out.safetensors", framework="np") as file:
        assert file.get_tensor("latents").tobytes() == expected.latents.numpy().tobytes()
        assert json.loads(file.metadata()["request"])["noise"][0]["seed"] == 7
    assert f"wrote {tmp_path / 'out.safetensors'}" in result.stdout


def test_video_is_an_mp4_of_the_engines_frames(single: Path, expected: Output, tmp_path: Path) -> None:
    result = invoke("generate", single, *SHOW, "--output", tmp_path / "out.mp4", "--fps", 12)
    assert result.exit_code == 0, result.output
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert container.streams.video[0].average_rate == 12
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert expected.video is not None
    assert decoded.shape == expected.video[0].shape == (5, 32, 32, 3)
    error = np.mean((decoded / 255 - expected.video[0]) ** 2)
    assert -10 * np.log10(error) > 30


def test_frames_are_pngs_of_exactly_the_engines_pixels(single: Path, expected: Output, tmp_path: Path) -> None:
    for _ in range(2):  # the second run replaces the first one's folder
        result = invoke("generate", single, *SHOW, "--output", tmp_path / "out")
        assert result.exit_code == 0, result.output
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [f"{index:03d}.png" for index in range(5)]
    assert expected.video is not None
    np.testing.assert_array_equal(read_frames(tmp_path / "out"), pixels(expected.video[0]))


def test_a_batch_is_numbered_in_prompt_order(single: Path, engine: WanReference, tmp_path: Path) -> None:
    prompts = ("a red square", "a blue circle")
    batch = engine(Request(prompt=prompts, steps=STEPS, seed=7, videos_per_prompt=2))
    options = ("--prompt", prompts[0], "--prompt", prompts[1], "--videos-per-prompt", 2, "--steps", STEPS, "--seed", 7)
    result = invoke("generate", single, *options, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["out-0", "out-1", "out-2", "out-3"]
    assert batch.video is not None
    for index, frames in enumerate(batch.video):
        np.testing.assert_array_equal(read_frames(tmp_path / f"out-{index}"), pixels(frames))


def test_the_seed_that_was_drawn_is_printed_and_repeats_the_video(single: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    drawn = invoke("generate", single, *SHOW[:4], "--output", first)
    found = re.search(r"seed (\d+) \(drawn\)", drawn.stdout)
    assert found is not None, drawn.output
    assert invoke("generate", single, *SHOW[:4], "--seed", found[1], "--output", again).exit_code == 0
    np.testing.assert_array_equal(read_frames(first), read_frames(again))


# Failures leave nothing under a final name.


def test_a_failed_write_exits_with_1_and_leaves_what_was_there(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", half)
    (tmp_path / "out.safetensors").write_bytes(b"old")
    result = invoke("generate", single, *SHOW, "--output", tmp_path / "out.safetensors")
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1].startswith("failed: could not write ")
    assert [file.name for file in tmp_path.iterdir()] == ["out.safetensors"]
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"


def test_frames_that_cannot_all_be_written_leave_no_folder(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Image.Image.save

    def fail_at_the_third(image: Image.Image, file: Path) -> None:
        if file.name == "002.png":
            raise OSError("no space left")
        save(image, file)

    monkeypatch.setattr(Image.Image, "save", fail_at_the_third)
    assert invoke("generate", single, *SHOW, "--output", tmp_path / "out").exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_video_that_the_encoder_refuses_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(av.FFmpegError):
        write_video(tmp_path / "out.mp4", np.zeros((5, 31, 31, 3), np.float32), 16)  # H.264 wants even sides
    assert list(tmp_path.iterdir()) == []
