"""A digest that any device computes alike, and in any order: two weighted sums of a tensor's words modulo 2^64.

The bytes, padded with zeros, are read as little-endian 64-bit words. Word i has the weight splitmix64(i), made odd, in
the first sum and splitmix64(i + 2^32), likewise, in the second: an odd weight loses no bit of its word, so that no
single changed word goes unseen. On an accelerator only the sums travel.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

NAME = "weighted64x2"
_SECOND = 1 << 32


def weights(count: int) -> npt.NDArray[np.uint64]:
    """Weights of the first `count` words, [2, count]."""
    position = np.arange(count, dtype=np.uint64)
    return np.stack([_splitmix64(position), _splitmix64(position + np.uint64(_SECOND))]) | np.uint64(1)


def array_digest(array: npt.NDArray[np.generic]) -> str:
    """Digest of an array's bytes: 32 hexadecimal digits."""
    data = np.ascontiguousarray(array).tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), dtype="<u8")
    return _format(*(int(each) for each in (words * weights(words.size)).sum(axis=1, dtype=np.uint64)))


def tensor_digest(tensor: torch.Tensor) -> str:
    """The same of a tensor, computed where it lives."""
    import torch

    data = tensor.detach().contiguous().view(torch.uint8).flatten() if tensor.numel() else torch.empty(0).byte()
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    words = data.view(torch.int64)
    # int64 products and sums wrap as uint64 ones do: the same 64 bits.
    first, second = (words * row[: words.numel()] for row in _device_weights(_room(words.numel()), str(words.device)))
    sums = torch.stack([first.sum(), second.sum()]).tolist()
    return _format(*(int(each) % (1 << 64) for each in sums))


def _room(count: int) -> int:
    """Weights are kept for the next power of two, so that few tables serve all sizes."""
    return 1 << max(count - 1, 1).bit_length()


@cache
def _device_weights(count: int, device: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(weights(count).view(np.int64)).to(device)


def _format(first: int, second: int) -> str:
    return f"{first:016x}{second:016x}"


def _splitmix64(position: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Sebastiano Vigna's splitmix64, of seed 0 after `position + 1` steps."""
    z = (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
