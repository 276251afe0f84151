"""The rank grid: every coordinate is taken once, every role has its owner, every block its stage."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wanref import Topology, parse_topology
from wanref.topology import BRANCHES, Place, idle_ranks

pytestmark = pytest.mark.cpu

GRIDS = [Topology(pp, cfg) for pp, cfg in product(range(1, 17), (1, 2)) if pp * cfg <= 16]


def places(topology: Topology) -> list[Place]:
    return [topology.place(rank) for rank in range(topology.world_size)]


# Names.


@pytest.mark.parametrize("topology", GRIDS, ids=str)
def test_a_topology_is_parsed_from_the_name_that_it_prints(topology: Topology) -> None:
    assert parse_topology(str(topology)) == topology
    assert str(topology) == f"pp{topology.pp}cfg{topology.cfg}"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "pp2",
        "cfg2",
        "pp0cfg1",
        "pp1cfg0",
        "pp1cfg3",
        "pp-1cfg1",
        "pp01cfg1",
        "PP1CFG1",
        "pp1cfg1 ",
        "cfg1pp1",
        "pp1cfg1x",
    ],
)
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"topology='{name}' is not accepted: give ppNcfgM"):
        parse_topology(name)


@pytest.mark.parametrize(("pp", "cfg"), [(0, 1), (-1, 1), (1, 0), (1, 3), (2.0, 1), (True, 1), (1, True), ("2", 1)])
def test_a_grid_that_cannot_be_is_refused(pp: int, cfg: int) -> None:
    with pytest.raises(ValueError, match=f"pp={pp!r}, cfg={cfg!r} is not accepted: pp is at least 1, cfg is 1 or 2"):
        Topology(pp, cfg)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_grid_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank} is not in topology pp2cfg2, which has ranks 0 to 3"):
        Topology(2, 2).place(rank)


# The grid.


@pytest.mark.parametrize("topology", GRIDS, ids=str)
def test_t7_each_rank_is_once_in_each_dimension_and_partners_differ_in_that_coordinate_only(topology: Topology) -> None:
    """Groups that assume neighbouring ranks go wrong once there is a second dimension (sgl-project/sglang#16532)."""
    grid = places(topology)
    assert [place.rank for place in grid] == list(range(topology.world_size))
    assert {(place.chain, place.stage) for place in grid} == set(product(range(topology.cfg), range(topology.pp)))
    mesh = torch.arange(topology.world_size).reshape(topology.cfg, topology.pp)
    for place in grid:
        assert mesh[place.chain, place.stage] == place.rank
        partners = {"first": (place.first, 0), "last": (place.last, topology.pp - 1)}
        if not place.is_first:
            partners["previous"] = (place.previous, place.stage - 1)
        if not place.is_last:
            partners["next"] = (place.next, place.stage + 1)
        for rank, stage in partners.values():
            assert (grid[rank].chain, grid[rank].stage) == (place.chain, stage)


@pytest.mark.parametrize("topology", GRIDS, ids=str)
def test_text_and_video_have_one_owner_and_the_solver_one_a_chain(topology: Topology) -> None:
    grid = places(topology)
    assert [place.rank for place in grid if place.encodes_text] == [0]
    assert [place.rank for place in grid if place.decodes] == [topology.pp - 1]
    assert [place.chain for place in grid if place.is_last] == list(range(topology.cfg))
    assert [place.chain for place in grid if place.is_first] == list(range(topology.cfg))


@pytest.mark.parametrize("topology", GRIDS, ids=str)
@pytest.mark.parametrize("guided", [True, False])
def test_each_stage_runs_each_branch_once_and_who_has_none_is_called_idle(topology: Topology, guided: bool) -> None:
    grid = places(topology)
    for stage in range(topology.pp):
        run = [branch for place in grid if place.stage == stage for branch in place.branches(guided)]
        assert run == list(BRANCHES if guided else BRANCHES[:1])
    assert list(idle_ranks(topology, guided)) == [place.rank for place in grid if not place.branches(guided)]
    assert len(idle_ranks(topology, guided)) == (topology.pp if topology.cfg == 2 and not guided else 0)


# Blocks.


@given(layers=st.integers(1, 64), data=st.data())
def test_blocks_are_shared_out_whole_in_order_and_evenly(layers: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, layers))
    shares = [Topology(pp).blocks(stage, layers) for stage in range(pp)]
    assert [block for share in shares for block in share] == list(range(layers))
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 1
    assert all(earlier - later in (0, 1) for earlier, later in pairwise(sizes))
    assert sizes[0] - sizes[-1] in (0, 1)


@pytest.mark.parametrize("cfg", [1, 2])
def test_more_stages_than_blocks_are_refused(cfg: int) -> None:
    with pytest.raises(
        ValueError, match=rf"topology=pp5cfg{cfg} is not accepted: 5 stages for 4 blocks\. Give at most pp4"
    ):
        Topology(5, cfg).blocks(0, 4)
