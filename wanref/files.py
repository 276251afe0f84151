"""Writes what a request made: an MP4, a folder of PNG frames, or latents. Never a half-written file under its name."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

SUFFIXES = {".mp4": "video", ".safetensors": "latent", "": "frames"}
"""What a path's suffix asks for; a path without one names a folder of frames."""

_FRAME = re.compile(r"\d{3,}\.png")


def output_kind(path: Path, count: int = 1) -> str:
    """`video`, `latent` or `frames`.

    Raises ValueError for another suffix, for a folder that is not there, and where writing `count` videos would replace
    a folder that holds anything but frames.
    """
    if path.suffix not in SUFFIXES or not path.name:
        raise ValueError(
            f"output={str(path)!r} is not accepted: give NAME.mp4, NAME.safetensors for latents, or NAME for PNGs."
        )
    if not path.parent.is_dir():
        raise ValueError(f"output={str(path)!r} is not accepted: the folder {str(path.parent)!r} does not exist.")
    for taken in filter(Path.is_dir, numbered(path, count)):
        kept = [file.name for file in taken.iterdir() if path.suffix or not _FRAME.fullmatch(file.name)]
        if kept:
            raise ValueError(
                f"output={str(path)!r} is not accepted: the folder {str(taken)!r} would be replaced, and {kept[0]!r} "
                "in it lost. Give a new name, or a folder of frames."
            )
    return SUFFIXES[path.suffix]


def numbered(path: Path, count: int) -> list[Path]:
    """`path` itself for one video, else `name-0`, `name-1`, ..."""
    return [path] if count == 1 else [path.with_name(f"{path.stem}-{index}{path.suffix}") for index in range(count)]


def write_video(path: Path, frames: np.ndarray, fps: int) -> None:
    """Frames, float32 [frames, height, width, 3] in [0, 1], as H.264 in MP4."""
    import av

    pixels = _to_uint8(frames)
    with _whole(path) as draft, av.open(str(draft), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options={"crf": "12"})
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for image in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))


def write_frames(path: Path, frames: np.ndarray) -> None:
    """The same as a folder of PNGs, `000.png` on. An existing folder of that name is replaced."""
    from PIL import Image

    with _whole(path) as draft:
        draft.mkdir()
        for index, image in enumerate(_to_uint8(frames)):
            Image.fromarray(image).save(draft / f"{index:03d}.png")


def write_latents(path: Path, latents: torch.Tensor, metadata: Mapping[str, str]) -> None:
    """Latents [batch, channels, frames, height, width] as the tensor `latents` of a safetensors file."""
    from safetensors.torch import save_file

    with _whole(path) as draft:
        save_file({"latents": latents.cpu().contiguous()}, draft, dict(metadata))


def write_each(path: Path, videos: np.ndarray, write: Callable[[Path, np.ndarray], None]) -> list[Path]:
    """Write each of [batch, frames, height, width, 3] under its numbered name."""
    paths = numbered(path, len(videos))
    for name, frames in zip(paths, videos, strict=True):
        write(name, frames)
    return paths


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A name to write under, which becomes `path` only when the block has ended well."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield draft
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(draft, path)
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        draft.unlink(missing_ok=True)


def _to_uint8(frames: np.ndarray) -> np.ndarray:
    return (frames * 255).round().astype("uint8")
