"""A checkpoint's identity is a digest of the bytes of its configs and weights, computed once a file."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wanref import open_checkpoint
from wanref.digest import file_digest

pytestmark = pytest.mark.cpu

COMPONENTS = {"scheduler", "text_encoder", "tokenizer", "vae"}


@pytest.fixture
def copy(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint that a test may damage."""
    return lambda layout="single", name="copy": shutil.copytree(tiny(layout=layout), tmp_path / name)


@pytest.fixture(autouse=True)
def digest_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Digests are remembered here, never in the user's own cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "wanref" / "digests"


def change_one_byte(file: Path) -> None:
    """In place: the size stays the same. In JSON, the white space at the end of a line."""
    content = bytearray(file.read_bytes())
    at = content.index(b"{") + 1 if file.suffix == ".json" else -1
    content[at] = ord(" ") if file.suffix == ".json" else content[at] ^ 1
    file.write_bytes(content)


def test_identity_changes_with_any_file_of_weights_or_configs(copy: Callable[..., Path]) -> None:
    folder = copy("dual")
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "wanref.json"]
    assert {file.parent.name for file in files} == COMPONENTS | {"transformer", "transformer_2", "copy"}
    identities = [open_checkpoint(folder).identity()]
    for file in files:
        size = file.stat().st_size
        change_one_byte(file)
        assert file.stat().st_size == size
        identities.append(open_checkpoint(folder).identity())
    assert len(set(identities)) == len(files) + 1


def test_identity_is_of_the_bytes_not_of_the_place_or_time(copy: Callable[..., Path]) -> None:
    folder, other = copy(name="one"), copy(name="other")
    identity = open_checkpoint(folder).identity()
    assert open_checkpoint(other).identity() == identity
    for file in folder.rglob("*"):
        os.utime(file, (1, 1))
    assert open_checkpoint(folder).identity() == identity


def test_identity_is_of_the_names_of_files_too(copy: Callable[..., Path]) -> None:
    folder = copy()
    identity = open_checkpoint(folder).identity()
    (file,) = (folder / "transformer").glob("*.safetensors")
    file.rename(file.with_name("renamed.safetensors"))
    assert open_checkpoint(folder).identity() != identity


def test_identity_tells_swapped_experts_apart(copy: Callable[..., Path]) -> None:
    folder = copy("dual")
    identity = open_checkpoint(folder).identity()
    (folder / "transformer").rename(folder / "held")
    (folder / "transformer_2").rename(folder / "transformer")
    (folder / "held").rename(folder / "transformer_2")
    assert open_checkpoint(folder).identity() != identity


def test_identity_is_remembered_by_size_and_time_of_change(
    copy: Callable[..., Path], digest_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = hashlib.file_digest

    def counting(stream: Any, algorithm: str) -> Any:
        read.append(Path(stream.name).name)
        return original(stream, algorithm)

    monkeypatch.setattr("hashlib.file_digest", counting)
    folder = copy()
    identity = open_checkpoint(folder).identity()
    assert len(read) == len(list(digest_cache.iterdir())) > 0
    read.clear()
    assert open_checkpoint(folder).identity() == identity
    assert read == []
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    os.utime(weights, (1, 1))
    assert open_checkpoint(folder).identity() == identity
    assert read == [weights.name]


def test_digests_are_kept_under_the_home_folder_unless_xdg_says_otherwise(
    copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    digest = file_digest(copy() / "model_index.json")
    (memo,) = (tmp_path / ".cache" / "wanref" / "digests").iterdir()
    assert memo.read_text() == digest


def test_a_cache_folder_that_cannot_be_written_costs_only_time(
    copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy()
    identity = open_checkpoint(folder).identity()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "model_index.json"))  # a file: nothing can be made in it
    assert open_checkpoint(folder).identity() == identity
