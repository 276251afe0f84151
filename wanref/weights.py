"""Loads the part of a transformer that one pipeline stage owns, straight from the safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from safetensors import SafetensorError, safe_open

from wanref.checkpoint import CheckpointError

_STORED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FIRST_ONLY = ("patch_embedding",)
_LAST_ONLY = ("scale_shift_table", "proj_out", "norm_out")
_CACHE_LINE = 64


def load_transformer(
    folder: Path,
    config: Mapping[str, Any],
    blocks: range,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> WanTransformer3DModel:
    """A `WanTransformer3DModel` that holds only `blocks`, renumbered from 0.

    The patch embedding is loaded with the first block, the output head with the last; elsewhere they are None, so that
    using them fails loudly. Parameters get the dtypes of `from_pretrained(torch_dtype=dtype)`: what diffusers keeps in
    float32 stays there. Raises CheckpointError for a missing, left-over or misshapen tensor.
    """
    layers = config["num_layers"]
    own_config = {key: value for key, value in config.items() if not key.startswith("_")}
    with torch.device("meta"):
        model = WanTransformer3DModel(**{**own_config, "num_layers": len(blocks)})
    model.rope = WanRotaryPosEmbed(
        model.config.attention_head_dim, model.config.patch_size, model.config.rope_max_seq_len
    )
    absent = (() if blocks.start == 0 else _FIRST_ONLY) + (() if blocks.stop == layers else _LAST_ONLY)
    wanted = [name for name in model.state_dict() if name.partition(".")[0] not in absent]
    on_disk = {name: _global_name(name, blocks.start) for name in wanted}
    files = _files_by_tensor(folder)
    _check_names(folder, files, on_disk.values(), _whole_model(model, layers))
    tensors = _read(files, on_disk, lambda name: _dtype_of(name, dtype), device)
    for name, tensor in tensors.items():
        expected = model.get_parameter(name).shape
        if tensor.shape != expected:
            raise CheckpointError(
                f"{folder}: {on_disk[name]} is {list(tensor.shape)}, its config asks for {list(expected)}."
            )
    model.load_state_dict(tensors, strict=False, assign=True)
    for name in absent:
        # Not left on the meta device: there a convolution of CPU tensors returns garbage without an error.
        setattr(model, name, None)
    model.rope.to(device)
    return model.eval().requires_grad_(False)


def _global_name(name: str, first_block: int) -> str:
    if not name.startswith("blocks."):
        return name
    _, index, rest = name.split(".", 2)
    return f"blocks.{int(index) + first_block}.{rest}"


def _whole_model(part: WanTransformer3DModel, layers: int) -> set[str]:
    """The names of all tensors of the transformer, of which `part` has some blocks."""
    names: set[str] = set()
    for name in part.state_dict():
        if name.startswith("blocks.0."):
            names.update(_global_name(name, index) for index in range(layers))
        elif not name.startswith("blocks."):
            names.add(name)
    return names


def _check_names(folder: Path, there: Iterable[str], wanted: Iterable[str], known: Iterable[str]) -> None:
    missing = sorted(set(wanted).difference(there))
    if missing:
        raise CheckpointError(
            f"{folder} is incomplete: no weights for {', '.join(missing[:5])} ({len(missing)} missing)."
        )
    ignored = WanTransformer3DModel._keys_to_ignore_on_load_unexpected or ()
    unknown = sorted(
        name for name in set(there).difference(known) if not any(re.search(pattern, name) for pattern in ignored)
    )
    if unknown:
        raise CheckpointError(
            f"{folder} holds weights that its config has no place for: {', '.join(unknown[:5])} ({len(unknown)} of "
            "them). Quantised and otherwise extended transformers are not run."
        )


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    keep = WanTransformer3DModel._keep_in_fp32_modules
    return torch.float32 if any(part in keep for part in name.split(".")) else dtype


def _read(
    files: Mapping[str, Path], names: Mapping[str, str], dtype_of: Callable[[str], torch.dtype], device: torch.device
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({files[name] for name in names.values()}):
        with _opened(file) as weights:
            for local, name in names.items():
                if files[name] != file:
                    continue
                stored = weights.get_tensor(name)
                if stored.dtype not in _STORED:
                    raise CheckpointError(f"{file}: {name} is {stored.dtype}: quantised weights are not run yet.")
                # A copy of its own, not a view of a file that may change while the engine lives.
                own = dtype_of(local)
                as_stored = device.type == "cpu" and stored.dtype == own
                tensors[local] = _copy(stored) if as_stored else stored.to(device=device, dtype=own, copy=True)
    return tensors


def _copy(stored: torch.Tensor) -> torch.Tensor:
    """A copy that lies in its cache line as `stored` does.

    Some CPUs' products of a matrix and a vector round otherwise where the matrix lies otherwise, and diffusers computes
    on views of the file: an aligned copy would give other bytes.
    """
    size = stored.element_size()
    room = torch.empty(stored.numel() + _CACHE_LINE // size, dtype=stored.dtype)
    start = (stored.data_ptr() - room.data_ptr()) % _CACHE_LINE // size
    return room[start : start + stored.numel()].view(stored.shape).copy_(stored)


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    for index in folder.glob("*.safetensors.index.json"):
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with _opened(file) as weights:
            files.update(dict.fromkeys(weights.keys(), file))
    return files


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as weights:
            yield weights
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
