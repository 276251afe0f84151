"""All communication between ranks, in one numbered log per rank.

Data travels on the device's backend (gloo on the CPU, NCCL on CUDA), agreements on gloo. Shape and dtype are checked
before each call, on the rank that would break the contract, so that a mismatch is an error and not a hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from wanref.observe import ExchangeEvent, Observer
from wanref.topology import Place


class ExchangeError(RuntimeError):
    """A communication failed: a peer is gone, or closed its connections because it failed itself."""


class Exchange:
    """One rank's communication. With one rank every agreement is its own and nothing is sent."""

    def __init__(self, place: Place, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.place = place
        self.mesh = mesh
        self.device = device
        self.log: list[ExchangeEvent] = []
        self.observer: Observer | None = None
        self._sequence = 0
        self._sends: list[tuple[dist.Work, torch.Tensor, int]] = []

    @property
    def world_size(self) -> int:
        return self.place.topology.world_size

    def begin(self, observer: Observer | None) -> None:
        """A new request: the log starts anew, its numbers go on."""
        self.observer = observer
        self.log.clear()

    def send(self, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, peer: int) -> None:
        """Send without waiting. The tensor is held until it has been delivered; nobody may write to it."""
        tensor = tensor.contiguous()
        _check("send", tensor, shape, dtype)
        with self._recorded("send", (peer,), shape, dtype):
            work = dist.isend(tensor, dst=peer)
            assert work is not None, "the sender is in the default group"
            self._sends.append((work, tensor, peer))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> torch.Tensor:
        """Wait for a tensor of this shape and dtype from `peer`."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with self._recorded("receive", (peer,), shape, dtype):
            dist.recv(tensor, src=peer)
        return tensor

    def drain(self) -> None:
        """Wait until every send has been delivered."""
        while self._sends:
            work, tensor, peer = self._sends[0]
            with self._recorded("delivered", (peer,), tensor.shape, tensor.dtype):
                work.wait()
            del self._sends[0]

    def gather_branches(
        self, prediction: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The (cond, uncond) predictions on both last stages, each giving its own."""
        _check("gather", prediction, shape, dtype)
        parts = [torch.empty_like(prediction) for _ in range(2)]
        with self._recorded("gather", self._across_branches(), shape, dtype):
            dist.all_gather(parts, prediction.contiguous(), group=self._branch_group())
        return parts[0], parts[1]

    def share_prediction(
        self, prediction: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The cond chain's prediction on both last stages, at a step that runs no negative branch."""
        with self._recorded("share", self._across_branches(), shape, dtype):
            return self._broadcast(prediction, shape, dtype, self.place.topology.pp - 1, self._branch_group())

    def broadcast(
        self, tensor: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int
    ) -> torch.Tensor:
        """`source`'s tensor on every rank."""
        if self.world_size == 1:
            assert tensor is not None
            return tensor
        with self._recorded("broadcast", self._others(), shape, dtype):
            return self._broadcast(tensor, shape, dtype, source, None)

    def agree(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank; the same answer on all of them."""
        if self.world_size == 1:
            return flag
        value = torch.tensor([flag], dtype=torch.int32)
        with self._recorded("agree", self._others(), value.shape, value.dtype):
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    def gather_notes(self, note: Any) -> list[Any]:
        """Every rank's small JSON-like note, in rank order."""
        if self.world_size == 1:
            return [note]
        notes: list[Any] = [None] * self.world_size
        with self._recorded("notes", self._others(), (), torch.uint8):
            dist.all_gather_object(notes, note)
        return notes

    def abandon(self) -> None:
        """Forget sends that will never be delivered, so that their tensors are freed."""
        self._sends.clear()

    def _broadcast(
        self, tensor: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int, group: Any
    ) -> torch.Tensor:
        if self.place.rank == source:
            assert tensor is not None, "the source gives the tensor"
            tensor = tensor.contiguous()
            _check("broadcast", tensor, shape, dtype)
        else:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        dist.broadcast(tensor, src=source, group=group)
        return tensor

    def _branch_group(self) -> dist.ProcessGroup:
        # Looked up each time: a group that is referred to keeps its connections open after it has been destroyed.
        assert self.mesh is not None
        return self.mesh.get_group("cfg")

    def _across_branches(self) -> tuple[int, ...]:
        pp = self.place.topology.pp
        return tuple(rank for rank in (self.place.stage, self.place.stage + pp) if rank != self.place.rank)

    def _others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank != self.place.rank)

    @contextmanager
    def _recorded(self, kind: str, peers: tuple[int, ...], shape: Sequence[int], dtype: torch.dtype) -> Iterator[None]:
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._emit(ExchangeEvent(sequence, kind, peers, tuple(shape), str(dtype), completed=False))
        try:
            yield
        except RuntimeError as error:
            where = f" with rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}" if peers else ""
            raise ExchangeError(f"exchange #{sequence} ({kind}{where}) failed: {error}") from error
        self._emit(ExchangeEvent(sequence, kind, peers, tuple(shape), str(dtype), completed=True))

    def _emit(self, event: ExchangeEvent) -> None:
        if event.completed:
            self.log[-1] = event
        else:
            self.log.append(event)
        if self.observer is not None:
            self.observer(event)


def _check(kind: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"{kind}: the tensor is {list(tensor.shape)} {tensor.dtype}, but the peers expect {list(shape)} {dtype}."
        )
