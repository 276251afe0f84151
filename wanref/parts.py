"""The parts of a checkpoint that one rank holds: its stage of each expert, the text encoder, the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wanref.checkpoint import Checkpoint, CheckpointError, Expert
from wanref.decoder import Decoder
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
) -> Parts:
    """Load what `place` owns, and nothing else."""
    blocks = place.topology.blocks(place.stage, checkpoint.transformer["num_layers"])
    stages = {}
    for expert in experts:
        folder, config = checkpoint.folder(expert), checkpoint.experts[expert]
        stages[expert] = Stage(load_transformer(folder, config, blocks, dtype=dtype, device=device), blocks.start)
    return Parts(
        stages=stages,
        text_encoder=TextEncoder(checkpoint, dtype, device) if place.encodes_text else None,
        decoder=Decoder(checkpoint, vae_dtype, device) if place.decodes else None,
    )


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
