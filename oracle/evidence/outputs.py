"""What a run left for people, read back: a video, a folder of frames, or latents, as `wanref generate` writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
KINDS = "NAME.mp4, a folder of PNG frames, NAME.safetensors with `latents`, or NAME.npy"


class OutputError(ValueError):
    """A file that is no output."""


def is_output(path: Path) -> bool:
    """Whether it is one of KINDS, and not a trace, say."""
    return path.suffix in (".mp4", ".safetensors", ".npy") or any(path.glob("*.png"))


def read_output(path: Path) -> Array:
    """Frames [frames, height, width, 3] in [0, 1], or latents as they were kept, in float32. Raises OutputError."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return np.asarray(load_file(path)["latents"], dtype=np.float32)
        if path.suffix == ".npy":
            return np.asarray(np.load(path, allow_pickle=False), dtype=np.float32)
        return _frames([path] if path.suffix == ".mp4" else sorted(path.glob("*.png")))
    except (OSError, KeyError, ValueError) as error:
        raise OutputError(f"output={str(path)!r} is not accepted: give {KINDS}. {error}") from error


def _frames(files: list[Path]) -> Array:
    """8-bit pixels, so that a difference of less than 1/255 cannot be seen, and an MP4 has lost more."""
    try:
        import av
    except ImportError as error:
        raise OutputError("frames are decoded by PyAV: install wanref[reference].") from error
    frames: list[npt.NDArray[np.uint8]] = []
    for file in files:
        with av.open(str(file)) as container:
            frames += [np.asarray(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    if not frames:
        raise ValueError("it has no frame")
    return np.stack(frames).astype(np.float32) / np.float32(255)
