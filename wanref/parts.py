"""The parts of a checkpoint that one rank holds: its stage of each expert, the text encoder, the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wanref.checkpoint import Checkpoint, CheckpointError, Expert
from wanref.decoder import Decoder
from wanref.exchange import Exchange
from wanref.liveness import RankFailure
from wanref.request import EngineDefaults
from wanref.stage import Stage
from wanref.text import TextEncoder
from wanref.topology import Place
from wanref.weights import load_transformer


@dataclass(frozen=True, slots=True)
class Parts:
    """What one rank has loaded; rank 0 encodes text, the last stage of the cond chain decodes."""

    stages: dict[Expert, Stage]
    text_encoder: TextEncoder | None
    decoder: Decoder | None


def load_parts(
    checkpoint: Checkpoint,
    experts: Sequence[Expert],
    place: Place,
    dtype: torch.dtype,
    vae_dtype: torch.dtype,
    device: torch.device,
    compiled: bool = False,
) -> Parts:
    """Load what `place` owns, and nothing else."""
    blocks = place.topology.blocks(place.stage, checkpoint.transformer["num_layers"])
    stages = {}
    for expert in experts:
        folder, config = checkpoint.folder(expert), checkpoint.experts[expert]
        stages[expert] = Stage(
            load_transformer(folder, config, blocks, dtype=dtype, device=device), blocks.start, compiled
        )
    return Parts(
        stages=stages,
        text_encoder=TextEncoder(checkpoint, dtype, device) if place.encodes_text else None,
        decoder=Decoder(checkpoint, vae_dtype, device) if place.decodes else None,
    )


def load_parts_together(
    exchange: Exchange,
    checkpoint: Checkpoint,
    experts: Sequence[Expert],
    dtype: torch.dtype,
    vae_dtype: torch.dtype,
    compiled: bool = False,
) -> Parts:
    """`load_parts` on every rank. Where one of several cannot load its part, every rank raises an error that names it:

    CheckpointError if it is the checkpoint's fault (ValueError, OSError), else RankFailure.
    """
    place, parts, failure = exchange.place, None, None
    try:
        parts = load_parts(checkpoint, experts, place, dtype, vae_dtype, exchange.device, compiled)
    except Exception as error:  # whatever it is, the others wait to hear of it
        if exchange.world_size == 1:
            raise
        failure = error
    note = failure and [isinstance(failure, ValueError | OSError), f"{type(failure).__name__}: {failure}"]
    for rank, of_rank in enumerate(exchange.gather_notes(note)):
        if of_rank is not None:
            kind = CheckpointError if of_rank[0] else RankFailure
            raise kind(f"rank {rank} could not load its part of {checkpoint.name}: {of_rank[1]}") from failure
    assert parts is not None
    return parts


def needed_experts(checkpoint: Checkpoint, defaults: EngineDefaults) -> tuple[Expert, ...]:
    """The experts that the engine's own boundary leaves in use; all that are there without one."""
    forced: dict[float | None, tuple[Expert, ...]] = {0.0: ("high",), 1.0: ("low",)}
    needed = forced.get(defaults.boundary_ratio, tuple(checkpoint.experts)) if checkpoint.has_boundary else ("high",)
    for expert in needed:
        if expert not in checkpoint.experts:
            raise CheckpointError(
                f"boundary_ratio={defaults.boundary_ratio} (engine) runs the {expert}-noise expert alone, which "
                f"{checkpoint.name} lacks."
            )
    return needed
