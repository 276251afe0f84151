"""What a pipeline stage holds of the transformers, and that the rest is not there to be used by mistake."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oracle.evidence.ranks import RankPool
from suites.stock import loaded
from suites.support import defaults, load_engine

pytestmark = pytest.mark.cpu


OUTER = ("patch_embedding", "condition_embedder", "norm_out", "proj_out", "scale_shift_table")


def held(folder: Path, topology: str) -> tuple[int, set[str], set[str]]:
    """Bytes of this rank's transformer weights, the components that it holds, and those that it does not."""
    engine = load_engine(folder, topology, defaults=defaults())
    bytes_held, there, absent = 0, set(), set()
    for stage in engine.stages.values():
        for name in OUTER:
            (absent if getattr(stage.transformer, name) is None else there).add(name)
        there.update(f"block {stage.stack.first + index}" for index in range(len(stage.transformer.blocks)))
        for name, parameter in stage.transformer.named_parameters():
            assert not parameter.is_meta, name
            bytes_held += parameter.numel() * parameter.element_size()
    return bytes_held, there, absent


@pytest.mark.parametrize("shards", [1, 4])
def test_a_stage_holds_its_own_blocks_and_no_others(ranks: RankPool, tiny: Callable[..., Path], shards: int) -> None:
    folder = tiny(layout="dual", blocks=7, shards=shards)
    (whole,) = ranks.run(1, held, folder, "pp1cfg1")
    first, second, last = ranks.run(3, held, folder, "pp3cfg1")
    assert whole[1] == {*OUTER, *(f"block {index}" for index in range(7))}
    assert whole[2] == set()
    head = {"norm_out", "proj_out", "scale_shift_table"}
    everywhere = {"condition_embedder"}
    assert first[1] == {"block 0", "block 1", "block 2", "patch_embedding"} | everywhere
    assert second[1] == {"block 3", "block 4"} | everywhere
    assert last[1] == {"block 5", "block 6"} | head | everywhere
    assert first[2] == head
    assert last[2] == {"patch_embedding"}
    assert second[2] == head | {"patch_embedding"}
    shared = (sum(part[0] for part in (first, second, last)) - whole[0]) / 2
    assert shared > 0, "only the condition embedder is held more than once"
    assert max(first[0], second[0], last[0]) < 0.6 * whole[0]


def test_weights_lie_in_their_cache_lines_as_those_of_stock_diffusers_do(tiny: Callable[..., Path]) -> None:
    """On some CPUs a product with a vector rounds otherwise where the matrix lies otherwise."""
    engine, pipe = loaded(tiny(), "float32")
    (stage,) = engine.stages.values()
    places = {name: weight.data_ptr() % 64 for name, weight in stage.transformer.named_parameters()}
    assert places == {name: weight.data_ptr() % 64 for name, weight in pipe.transformer.named_parameters()}
    assert set(places.values()) != {0}, "stock's are not aligned here, or this test shows nothing"


def test_using_what_a_stage_does_not_hold_fails_loudly(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    """A convolution whose weights are on the meta device returns garbage for CPU tensors, without an error."""
    outcomes = ranks.outcomes(2, misuse, tiny())
    assert [outcome.kind for outcome in outcomes] == ["raised", "raised"]
    assert all("NoneType" in outcome.text for outcome in outcomes)


def misuse(folder: Path) -> None:
    engine = load_engine(folder, "pp2cfg1")
    stage = engine.stages["high"]
    latents, timestep = torch.ones(1, 4, 2, 4, 4), torch.tensor([500.0])
    if engine.place.is_last:
        stage.embed(latents)
    else:
        step = stage.prepare_step(timestep, stage.prepare_rotary(latents), torch.float32)
        stage.project(torch.ones(1, 8, 24), step, latents.shape)
