"""A checkpoint is opened for what it is, refused by name for what wanref does not run, and known by its bytes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wanref import CheckpointError, open_checkpoint
from wanref.checkpoint import Size

pytestmark = pytest.mark.cpu

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def copy(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint that a test may damage."""
    return lambda layout="single", name="copy": shutil.copytree(tiny(layout=layout), tmp_path / name)


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# What is there.


@pytest.mark.parametrize(
    ("layout", "experts", "boundary"),
    [
        ("single", ["high"], None),
        ("dual", ["high", "low"], 0.875),
        ("high only", ["high"], 0.875),
        ("low only", ["low"], 0.875),
    ],
)
def test_a_checkpoint_is_known_by_the_experts_that_it_has(
    tiny: Callable[..., Path], layout: str, experts: list[str], boundary: float | None
) -> None:
    checkpoint = open_checkpoint(tiny(layout=layout))
    assert checkpoint.kind == layout
    assert list(checkpoint.experts) == experts
    assert checkpoint.boundary_ratio == boundary
    assert checkpoint.has_boundary == (layout != "single")
    assert checkpoint.transformer["num_layers"] == 4
    assert (checkpoint.flow_shift, checkpoint.latent_scale) == (3.0, (4, 8))
    assert checkpoint.size == Size(height=32, width=32, frames=5)


def test_a_checkpoint_without_wanref_json_recommends_no_size(copy: Callable[..., Path]) -> None:
    (folder := copy()).joinpath("wanref.json").unlink()
    assert open_checkpoint(folder).size is None


# What is refused.


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("model_index.json", {"_class_name": "WanImageToVideoPipeline"}, "image-to-video (I2V) checkpoint"),
        ("model_index.json", {"_class_name": "WanVACEPipeline"}, "VACE checkpoint (WanVACEPipeline)"),
        ("model_index.json", {"_class_name": "WanVideoToVideoPipeline"}, "video-to-video checkpoint"),
        ("model_index.json", {"_class_name": "WanAnimatePipeline"}, "Wan-Animate checkpoint"),
        ("model_index.json", {"_class_name": "FluxPipeline"}, "names 'FluxPipeline', not 'WanPipeline'"),
        ("model_index.json", {"_class_name": None}, "names None, not 'WanPipeline'"),
        ("model_index.json", {"expand_timesteps": True}, "TI2V checkpoint (expand_timesteps)"),
        ("model_index.json", {"transformer": [None, None]}, "neither expert"),
        ("model_index.json", {"vae": [None, None]}, "names no 'vae'"),
        ("model_index.json", {"scheduler": None}, "names no 'scheduler'"),
        ("transformer/config.json", {"_class_name": "WanVACETransformer3DModel"}, "transformer is a VACE"),
        ("transformer/config.json", {"_class_name": "FluxTransformer2DModel"}, "'FluxTransformer2DModel', not 'Wan"),
        ("transformer/config.json", {"image_dim": 1280}, "conditioned on images (I2V)"),
        ("transformer/config.json", {"added_kv_proj_dim": 24}, "conditioned on images (I2V)"),
        ("transformer/config.json", {"quantization_config": {"quant_method": "fp8"}}, "transformer is quantised (fp8)"),
        ("transformer/config.json", {"quantization_config": {}}, "transformer is quantised (unnamed)"),
        ("text_encoder/config.json", {"quantization_config": {"quant_method": "bnb"}}, "text_encoder is quantised (b"),
        ("wanref.json", {"size": {"height": 32}}, "size={'height': 32} is not accepted: give height, width and frames"),
        ("wanref.json", {"size": None}, "size=None is not accepted: give height, width and frames"),
    ],
)
def test_what_wanref_does_not_run_is_refused_by_name(
    copy: Callable[..., Path], file: str, changes: dict[str, Any], named: str
) -> None:
    edit_json((folder := copy()) / file, **changes)
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(folder)
    assert named in str(raised.value)


def test_a_null_quantisation_is_none(copy: Callable[..., Path]) -> None:
    edit_json((folder := copy()) / "transformer/config.json", quantization_config=None)
    assert open_checkpoint(folder).kind == "single"


def test_experts_whose_configs_differ_are_refused_by_what_differs(copy: Callable[..., Path]) -> None:
    edit_json((folder := copy("dual")) / "transformer_2/config.json", num_layers=5, _diffusers_version="0.1")
    with pytest.raises(CheckpointError, match=r"configs of its two experts differ in num_layers\."):
        open_checkpoint(folder)


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
@pytest.mark.parametrize("suffix", ["bin", "pt", "pth"])
def test_pickled_weights_alone_are_refused_by_file(copy: Callable[..., Path], component: str, suffix: str) -> None:
    (weights,) = ((folder := copy()) / component).glob("*.safetensors")
    weights.rename(weights.with_suffix(f".{suffix}"))
    with pytest.raises(
        CheckpointError, match=rf"pickled weights only \({weights.stem}\.{suffix}\).*safe_serialization"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "file",
    [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ],
)
def test_a_missing_file_is_named(copy: Callable[..., Path], file: str) -> None:
    ((folder := copy()) / file).unlink()
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(folder)
    expected = "holds no weights: no *.safetensors" if file.endswith(".safetensors") else f"{folder / file} is missing"
    assert expected in str(raised.value)
    assert str((folder / file).parent) in str(raised.value)


def test_a_missing_shard_is_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny(shards=3), tmp_path / "copy")
    assert open_checkpoint(folder).kind == "single"
    shard = sorted((folder / "transformer").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"transformer is incomplete: .*index.json names {shard.name}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{}", b"[]"])
@pytest.mark.parametrize("file", ["model_index.json", "vae/config.json", "wanref.json"])
def test_what_is_no_json_object_is_named(copy: Callable[..., Path], file: str, content: bytes) -> None:
    ((folder := copy()) / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is not valid JSON|not a JSON object") as raised:
        open_checkpoint(folder)
    assert str(folder / file) in str(raised.value)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint in diffusers layout: .*model_index\.json"):
        open_checkpoint(tmp_path)


# The hub.


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty local hub cache, offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("source", "command"),
    [("org/absent", "'hf download org/absent'"), ("org/absent@v2", "'hf download org/absent --revision v2'")],
)
def test_a_hub_id_that_is_absent_offline_says_how_to_get_it(hub: Path, source: str, command: str) -> None:
    with pytest.raises(CheckpointError, match=f"checkpoint '{source}' is not in the local hub cache") as raised:
        open_checkpoint(source)
    assert f"Run {command} where the hub can be reached" in str(raised.value)


def test_a_hub_id_opens_the_revision_that_it_names(tiny: Callable[..., Path], hub: Path) -> None:
    repository = hub / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    for revision, layout, commit in [("main", "single", HASH), ("v2", "dual", HASH[::-1])]:
        (repository / "refs" / revision).write_text(commit)
        shutil.copytree(tiny(layout=layout), repository / "snapshots" / commit)
    for source, layout in [("org/tiny", "single"), ("org/tiny@v2", "dual"), (f"org/tiny@{HASH[::-1]}", "dual")]:
        checkpoint = open_checkpoint(source)
        assert (checkpoint.kind, checkpoint.name) == (layout, source)


@pytest.mark.parametrize("source", ["", "absent", "./absent", "org--x/name", "/absent/folder", "org/name@", "a/b/c"])
def test_what_is_neither_folder_nor_hub_id_is_refused(hub: Path, source: str) -> None:
    with pytest.raises(CheckpointError, match=f"checkpoint '{source}' is neither a folder nor a hub id"):
        open_checkpoint(source)
