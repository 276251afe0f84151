"""A diffusers-layout Wan checkpoint: where it lies, which experts it has, what it is. Reads JSON only, no weights."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wanref.digest import file_digest

Expert = Literal["high", "low"]

EXPERT_FOLDERS: dict[Expert, str] = {"high": "transformer", "low": "transformer_2"}
"""`high` is diffusers' `transformer`: the high-noise expert of Wan 2.2, the only one of Wan 2.1. `low` is the other."""

_OTHER_KINDS = {
    "WanImageToVideoPipeline": "image-to-video (I2V)",
    "WanVACEPipeline": "VACE",
    "WanVideoToVideoPipeline": "video-to-video",
    "WanAnimatePipeline": "Wan-Animate",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


class CheckpointError(ValueError):
    """The checkpoint is not there, is not one that wanref runs, or is incomplete."""


@dataclass(frozen=True, slots=True)
class Size:
    """A video's size: height and width in pixels, and its number of frames."""

    height: int
    width: int
    frames: int


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint's JSON files say. Open one with `open_checkpoint`.

    `experts` holds the config of each transformer that is there; `size` is what its `wanref.json` recommends.
    """

    path: Path
    name: str
    experts: Mapping[Expert, Mapping[str, Any]]
    boundary_ratio: float | None
    scheduler_class: str
    scheduler: Mapping[str, Any]
    vae: Mapping[str, Any]
    text_classes: tuple[str, str]
    size: Size | None

    @property
    def kind(self) -> str:
        """`single` (Wan 2.1), `dual` (Wan 2.2), or `high only` / `low only`: one expert of a dual checkpoint."""
        if len(self.experts) == 2:
            return "dual"
        if "low" in self.experts:
            return "low only"
        return "single" if self.boundary_ratio is None else "high only"

    @property
    def has_boundary(self) -> bool:
        return self.kind != "single"

    @property
    def transformer(self) -> Mapping[str, Any]:
        """A config from which to read what both experts share (patch size, channels, number of blocks)."""
        return next(iter(self.experts.values()))

    @property
    def flow_shift(self) -> float | None:
        """What the scheduler's config names: `shift` for Euler, `flow_shift` for the others."""
        shift: float | None = self.scheduler.get("flow_shift", self.scheduler.get("shift"))
        return shift

    @property
    def latent_scale(self) -> tuple[int, int]:
        """(frames, pixels) a latent stands for, along time and along each side."""
        return int(self.vae.get("scale_factor_temporal", 4)), int(self.vae.get("scale_factor_spatial", 8))

    def folder(self, expert: Expert) -> Path:
        return self.path / EXPERT_FOLDERS[expert]

    def weight_files(self, component: str) -> list[Path]:
        """The safetensors files of one component, in a fixed order."""
        return sorted((self.path / component).glob("*.safetensors"))

    def identity(self) -> str:
        """SHA-256 over the configs and weights of every component, computed once per file (see `file_digest`)."""
        whole = hashlib.sha256()
        for file in _identity_files(self.path):
            whole.update(f"{file.relative_to(self.path).as_posix()}\0{file_digest(file)}\n".encode())
        return whole.hexdigest()


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder, or a hub id `org/name` or `org/name@revision`.

    Raises CheckpointError, before anything is loaded, for a checkpoint that is absent (saying how to get it), of a kind
    that wanref does not run (naming it), incomplete, or without safetensors weights.
    """
    path = Path(source)
    if not os.fspath(source) or not path.is_dir():  # an unset shell variable must not mean the current folder
        path = _from_hub(os.fspath(source))
    index = _read_json(path / "model_index.json")
    _refuse_other_kinds(path, index)
    experts: dict[Expert, Mapping[str, Any]] = {}
    for expert, folder in EXPERT_FOLDERS.items():
        if _is_present(index, folder):
            experts[expert] = _read_json(path / folder / "config.json")
            _refuse_other_transformers(folder, experts[expert])
            _require_safetensors(path / folder)
    if not experts:
        raise CheckpointError(
            f"{path} has neither expert: its model_index.json names no 'transformer' and no 'transformer_2'."
        )
    for component in ("text_encoder", "vae"):
        _refuse_quantised(component, _read_json(path / component / "config.json"))
        _require_safetensors(path / component)
    _read_json(path / "tokenizer" / "tokenizer_config.json")
    _require_same_architecture(path, experts)
    return Checkpoint(
        path=path,
        name=os.fspath(source),
        experts=experts,
        boundary_ratio=index.get("boundary_ratio"),
        scheduler_class=index["scheduler"][1],
        scheduler=_read_json(path / "scheduler" / "scheduler_config.json"),
        vae=_read_json(path / "vae" / "config.json"),
        text_classes=(index["tokenizer"][1], index["text_encoder"][1]),
        size=_recommended_size(path / "wanref.json"),
    )


def _from_hub(source: str) -> Path:
    if not _HUB_ID.fullmatch(source):
        raise CheckpointError(
            f"checkpoint {source!r} is neither a folder nor a hub id 'org/name' or 'org/name@revision'."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    repository, _, revision = source.partition("@")
    try:
        return Path(
            snapshot_download(repository, revision=revision or None, ignore_patterns=["*.bin", "*.pt", "*.pth"])
        )
    except HFValidationError as error:
        raise CheckpointError(f"checkpoint {source!r} is neither a folder nor a hub id: {error}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        command = f"hf download {repository}" + (f" --revision {revision}" if revision else "")
        raise CheckpointError(
            f"checkpoint {source!r} is not in the local hub cache and could not be fetched ({type(error).__name__}). "
            f"Run '{command}' where the hub can be reached, or give the path of a folder in diffusers layout."
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{file.parent} is not a complete checkpoint in diffusers layout: {file} is missing."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, not a JSON object.")
    return content


def _recommended_size(file: Path) -> Size | None:
    if not file.is_file():
        return None
    size = _read_json(file).get("size")
    if not isinstance(size, dict) or set(size) != {"height", "width", "frames"}:
        raise CheckpointError(f"{file}: size={size!r} is not accepted: give height, width and frames.")
    return Size(**size)


def _is_present(index: Mapping[str, Any], component: str) -> bool:
    entry = index.get(component)
    return entry is not None and entry[0] is not None


def _refuse_other_kinds(path: Path, index: Mapping[str, Any]) -> None:
    name = index.get("_class_name")
    if name in _OTHER_KINDS:
        raise CheckpointError(
            f"{path} is a {_OTHER_KINDS[name]} checkpoint ({name}). wanref runs text-to-video: WanPipeline."
        )
    if name != "WanPipeline":
        raise CheckpointError(
            f"{path} is not a Wan checkpoint: its model_index.json names {name!r}, not 'WanPipeline'."
        )
    if index.get("expand_timesteps"):
        raise CheckpointError(f"{path} is a TI2V checkpoint (expand_timesteps): per-token timesteps are not run yet.")
    for component in ("scheduler", "vae", "text_encoder", "tokenizer"):
        if not _is_present(index, component):
            raise CheckpointError(f"{path} is incomplete: its model_index.json names no {component!r}.")


def _refuse_other_transformers(folder: str, config: Mapping[str, Any]) -> None:
    name = config.get("_class_name")
    if name == "WanVACETransformer3DModel":
        raise CheckpointError(f"{folder} is a VACE transformer ({name}): not run yet.")
    if name != "WanTransformer3DModel":
        raise CheckpointError(f"{folder} is {name!r}, not 'WanTransformer3DModel'.")
    if config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None:
        raise CheckpointError(f"{folder} is conditioned on images (I2V): not run yet.")
    _refuse_quantised(folder, config)


def _refuse_quantised(folder: str, config: Mapping[str, Any]) -> None:
    if config.get("quantization_config") is not None:
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise CheckpointError(f"{folder} is quantised ({method}): not run yet. Give the unquantised checkpoint.")


def _require_safetensors(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        _require_all_shards(folder)
        return
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} holds pickled weights only ({', '.join(pickled)}). Reading pickle runs code: convert the "
            "checkpoint with diffusers' save_pretrained(..., safe_serialization=True)."
        )
    raise CheckpointError(f"{folder} holds no weights: no *.safetensors file is there.")


def _require_all_shards(folder: Path) -> None:
    for index in folder.glob("*.safetensors.index.json"):
        missing = sorted({name for name in _read_json(index)["weight_map"].values() if not (folder / name).is_file()})
        if missing:
            raise CheckpointError(f"{folder} is incomplete: {index.name} names {', '.join(missing)}.")


def _require_same_architecture(path: Path, experts: Mapping[Expert, Mapping[str, Any]]) -> None:
    if len(experts) < 2:
        return
    high, low = ({k: v for k, v in config.items() if not k.startswith("_")} for config in experts.values())
    differing = sorted(key for key in high.keys() | low.keys() if high.get(key) != low.get(key))
    if differing:
        raise CheckpointError(f"{path}: the configs of its two experts differ in {', '.join(differing)}.")


def _identity_files(path: Path) -> Iterator[Path]:
    index = _read_json(path / "model_index.json")
    yield path / "model_index.json"
    for component in sorted(key for key in index if not key.startswith("_") and isinstance(index[key], list)):
        if _is_present(index, component):
            yield from sorted(
                file for file in (path / component).iterdir() if file.suffix in {".json", ".model", ".safetensors"}
            )
