"""A digest of what a cache remembers, equal exactly for equal numbers and equal bytes of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

import torch


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def digest_of(value: Any) -> str:
    """SHA-256 of plain values, tensors, and containers and objects of them."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: _Hash, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{list(value.shape)}:".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        _feed_all(digest, "mapping", [each for item in value.items() for each in item])
    elif isinstance(value, list | tuple):
        _feed_all(digest, "sequence", value)
    elif hasattr(value, "__dict__") and not isinstance(value, Enum):
        # A library's state is an object of its own: what it holds, since its repr may be an address.
        _feed_all(digest, type(value).__qualname__, [each for item in vars(value).items() for each in item])
    else:
        digest.update(f"{value!r};".encode())


def _feed_all(digest: _Hash, kind: str, values: list[Any] | tuple[Any, ...]) -> None:
    digest.update(f"{kind} of {len(values)}:".encode())
    for value in values:
        _feed(digest, value)
