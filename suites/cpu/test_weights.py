"""A stage holds the very parameters that stock diffusers loads, and reads nothing else from the files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wanref import CheckpointError, Topology, open_checkpoint
from wanref.weights import load_transformer

pytestmark = pytest.mark.cpu

BLOCKS = 5
HEAD = {"scale_shift_table", "proj_out.weight", "proj_out.bias"}
EMBEDDING = {"patch_embedding.weight", "patch_embedding.bias"}
CPU = torch.device("cpu")


def load_stage(folder: Path, blocks: range, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    checkpoint = open_checkpoint(folder)
    return load_transformer(checkpoint.folder("high"), checkpoint.experts["high"], blocks, dtype=dtype, device=CPU)


def global_name(name: str, first_block: int) -> str:
    prefix, dot, rest = name.removeprefix("blocks.").partition(".")
    return f"blocks.{int(prefix) + first_block}{dot}{rest}" if name.startswith("blocks.") else name


@pytest.fixture
def copy(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint that a test may damage."""
    return lambda **options: shutil.copytree(tiny(blocks=BLOCKS, **options), tmp_path / "copy")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are read, in order."""
    names: list[str] = []

    class Counting:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = safe_open(*arguments, **options)

        def __enter__(self) -> "Counting":
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self.file.keys())

        def get_tensor(self, name: str) -> torch.Tensor:
            names.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr("wanref.weights.safe_open", Counting)
    return names


# What a stage holds.


@pytest.mark.parametrize("shards", [1, 3], ids=["one file", "index"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_every_stage_holds_the_parameters_of_stock_diffusers_bit_for_bit(
    tiny: Callable[..., Path], stored: torch.dtype, dtype: torch.dtype, shards: int
) -> None:
    folder = tiny(blocks=BLOCKS, dtype=stored, shards=shards)
    assert len(list((folder / "transformer").glob("*.index.json"))) == (shards > 1)
    stock = WanTransformer3DModel.from_pretrained(folder / "transformer", torch_dtype=dtype)
    expected = dict(stock.named_parameters()) | dict(stock.named_buffers())
    held: set[str] = set()
    for stage in range(3):
        blocks = Topology(pp=3).blocks(stage, BLOCKS)
        model = load_stage(folder, blocks, dtype)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                continue
            name = global_name(name, blocks.start)
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name
            held.add(name)
    assert held == expected.keys()
    kept = {name for name, tensor in expected.items() if tensor.dtype == torch.float32}
    assert (kept == expected.keys()) == (dtype == torch.float32)  # else some are kept in float32, and not all
    assert any("time_embedder" in name for name in kept)


@pytest.mark.parametrize("shards", [1, 3], ids=["one file", "index"])
@pytest.mark.parametrize(
    ("blocks", "ends"), [(range(2), EMBEDDING), (range(2, 4), set()), (range(4, 5), HEAD), (range(5), EMBEDDING | HEAD)]
)
def test_a_stage_reads_its_own_tensors_once_and_no_others(
    tiny: Callable[..., Path], read: list[str], blocks: range, ends: set[str], shards: int
) -> None:
    model = load_stage(tiny(blocks=BLOCKS, shards=shards), blocks)
    assert len(set(read)) == len(read)
    assert {int(name.split(".")[1]) for name in read if name.startswith("blocks.")} == set(blocks)
    others = {name for name in read if not name.startswith(("blocks.", "condition_embedder."))}
    assert others == ends
    held = {global_name(name, blocks.start) for name, tensor in model.named_parameters() if not tensor.is_meta}
    assert held == set(read)


def test_parameters_do_not_change_with_the_file_that_they_came_from(copy: Callable[..., Path]) -> None:
    folder = copy()
    model = load_stage(folder, range(BLOCKS))
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    (file,) = (folder / "transformer").glob("*.safetensors")
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(b"\xff" * size)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_parameters_ask_for_no_gradient(tiny: Callable[..., Path]) -> None:
    model = load_stage(tiny(blocks=BLOCKS), range(BLOCKS))
    assert not model.training
    assert not any(tensor.requires_grad for tensor in model.parameters())


# What is refused.


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of the transformer's only file."""
    (file,) = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("blocks.3.norm2.weight"), "incomplete: no weights for blocks.3.norm2.weight (1 missing)"),
        (lambda t: t.pop("patch_embedding.bias"), "incomplete: no weights for patch_embedding.bias (1 missing)"),
        (lambda t: t.update({"blocks.5.norm2.weight": torch.ones(24)}), "no place for: blocks.5.norm2.weight"),
        (lambda t: t.update({"blocks.0.attn1.to_q.scale": torch.ones(1)}), "no place for: blocks.0.attn1.to_q.scale"),
        (lambda t: t.update({"proj_out.bias": torch.ones(3)}), "proj_out.bias is [3], its config asks for [16]"),
        (lambda t: t.update({"proj_out.bias": torch.ones(1)}), "proj_out.bias is [1], its config asks for [16]"),
        (
            lambda t: t.update({"proj_out.bias": torch.ones(16).to(torch.float8_e4m3fn)}),
            "proj_out.bias is torch.float8_e4m3fn: quantised",
        ),
        (lambda t: t.update({"proj_out.bias": torch.ones(16).to(torch.int8)}), "proj_out.bias is torch.int8: quanti"),
    ],
)
def test_a_tensor_that_is_missing_left_over_misshapen_or_quantised_is_named(
    copy: Callable[..., Path], change: Callable[[dict[str, torch.Tensor]], object], named: str
) -> None:
    folder = rewrite(copy(), change)
    with pytest.raises(CheckpointError) as raised:
        load_stage(folder, range(BLOCKS))
    assert named in str(raised.value)
    assert "transformer" in str(raised.value)


def test_what_stock_diffusers_ignores_is_ignored(copy: Callable[..., Path]) -> None:
    folder = rewrite(copy(), lambda t: t.update({"blocks.0.attn2.norm_added_q.weight": torch.ones(24)}))
    assert len(load_stage(folder, range(BLOCKS)).blocks) == BLOCKS


@pytest.mark.parametrize("shards", [1, 3], ids=["one file", "index"])
@pytest.mark.parametrize("keep", [0, 7, 2000, -1])
def test_a_truncated_file_is_named(copy: Callable[..., Path], shards: int, keep: int) -> None:
    folder = copy(shards=shards)
    file = sorted((folder / "transformer").glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"{file.name} cannot be read: "):
        load_stage(folder, range(BLOCKS))


def test_an_index_that_points_to_the_wrong_shard_is_an_error(copy: Callable[..., Path]) -> None:
    folder = copy(shards=3)
    (index,) = (folder / "transformer").glob("*.index.json")
    one, other = "-00001-of", "-00002-of"
    index.write_text(index.read_text().replace(one, "-held-").replace(other, one).replace("-held-", other))
    with pytest.raises(CheckpointError, match=r"cannot be read: .*does not contain tensor"):
        load_stage(folder, range(BLOCKS))
