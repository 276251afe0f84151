"""Ranks: joins the ones that torchrun (or the caller) started, or starts local ones with torch's elastic launcher."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from wanref.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def join(topology: Topology, device_type: str) -> tuple[int, DeviceMesh | None]:
    """This process's rank and the mesh of shape (cfg, pp); no mesh with one rank. Never starts a process.

    Raises ValueError if the world is not the size that the topology needs.
    """
    import torch.distributed as dist

    initialised = dist.is_initialized()
    world_size = dist.get_world_size() if initialised else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != topology.world_size:
        raise ValueError(
            f"topology={topology} needs {topology.world_size} ranks, but the world size is {world_size}. Start the "
            f"program with 'torchrun --nproc-per-node {topology.world_size} ...', or call wanref.launch.launch(...)."
        )
    if world_size == 1:
        return 0, None
    from torch.distributed.device_mesh import init_device_mesh

    if not initialised:
        dist.init_process_group("gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl")
    mesh = init_device_mesh(device_type, (topology.cfg, topology.pp), mesh_dim_names=("cfg", "pp"))
    return dist.get_rank(), mesh


def launch(entry: Callable[..., T], topology: Topology, *args: Any) -> dict[int, T]:
    """Run `entry(*args)` on as many local ranks as the topology has, and return what each returned, by rank.

    `entry` and `args` must be picklable, as for `multiprocessing`. With one rank `entry` runs right here. Raises
    torch's ChildFailedError, which names the rank that failed first.
    """
    if topology.world_size == 1:
        return {0: entry(*args)}
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # torch and diffusers are imported once, by the server that the ranks are forked from, and not once a rank.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["wanref.pipeline"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=topology.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    results: dict[int, T] = elastic_launch(config, entry)(*args)
    return results


def is_rank() -> bool:
    """Whether this process was started as a rank, by torchrun, by `launch` or by hand."""
    return "WORLD_SIZE" in os.environ
