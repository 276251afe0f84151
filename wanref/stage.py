"""A pipeline stage of one expert: embed -> BlockStack -> project, over the modules of diffusers' Wan transformer.

Native and cached runs go through the same three calls. `BlockStack` is the only thing that a cache wraps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from diffusers import WanTransformer3DModel

from wanref import block

Tap = Callable[[int, torch.Tensor], None]
"""Called with a block's global index and its output, [batch, tokens, dim]."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the blocks of a stage read at one step, besides the hidden states; the same for both branches.

    timestep_embedding: [batch, dim]. modulations: one a block of the stage. rotary: see `block.rotary_table`.
    """

    timestep_embedding: torch.Tensor
    modulations: tuple[block.BlockModulation, ...]
    rotary: torch.Tensor


class BlockStack:
    """The successive transformer blocks of one stage."""

    def __init__(self, blocks: Sequence[torch.nn.Module], first: int, compiled: bool = False) -> None:
        self.blocks = tuple(blocks)
        self.first = first
        # Regional: one graph serves every block, since blocks differ in their weights alone.
        self._run_block = torch.compile(block.run_block, dynamic=False) if compiled else block.run_block

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def last(self) -> int:
        """Global index of the last block."""
        return self.first + len(self.blocks) - 1

    def __call__(
        self, hidden: torch.Tensor, text: Sequence[block.TextKV], step: StepInputs, tap: Tap | None = None
    ) -> torch.Tensor:
        """hidden [batch, tokens, dim] through all blocks; `tap` sees each block's output."""
        for index in range(len(self.blocks)):
            hidden = self.run(index, hidden, text, step, tap)
        return hidden

    def run(
        self, index: int, hidden: torch.Tensor, text: Sequence[block.TextKV], step: StepInputs, tap: Tap | None = None
    ) -> torch.Tensor:
        """hidden through one block, by its index in this stack."""
        hidden = self._run_block(self.blocks[index], hidden, text[index], step.modulations[index], step.rotary)
        if tap is not None:
            tap(self.first + index, hidden)
        return hidden


class Stage:
    """The part of one expert that one rank runs. A stage that is not the last (first) has no `project` (`embed`)."""

    def __init__(self, transformer: WanTransformer3DModel, first_block: int, compiled: bool = False) -> None:
        self.transformer = transformer
        self.stack = BlockStack(tuple(transformer.blocks), first_block, compiled)

    @property
    def dim(self) -> int:
        config = self.transformer.config
        return int(config.num_attention_heads * config.attention_head_dim)

    def tokens(self, latents_shape: Sequence[int]) -> int:
        """Tokens of latents [batch, channels, frames, height, width]."""
        sides = zip(latents_shape[2:], self.transformer.config.patch_size, strict=True)
        return math.prod(side // patch for side, patch in sides)

    def prepare_text(self, prompt_embeds: torch.Tensor) -> tuple[block.TextKV, ...]:
        """Cross-attention keys and values of each block, from [batch, text_tokens, text_dim]. Once a request."""
        text = self.transformer.condition_embedder.text_embedder(prompt_embeds)
        return tuple(block.text_keys_values(module, text) for module in self.stack.blocks)

    def prepare_rotary(self, latents: torch.Tensor) -> torch.Tensor:
        """The rotary table for latents of this shape. Once a request."""
        return block.rotary_table(self.transformer.rope, latents)

    def prepare_step(self, timestep: torch.Tensor, rotary: torch.Tensor, dtype: torch.dtype) -> StepInputs:
        """What every branch shares at a step, from timesteps [batch].

        All rows go through the embedder at once, as in the stock forward: another batch shape rounds otherwise.
        """
        embedding, projection = self.time_embedding(timestep, dtype)
        return StepInputs(
            timestep_embedding=embedding,
            modulations=tuple(block.modulate(module, projection) for module in self.stack.blocks),
            rotary=rotary,
        )

    def time_embedding(self, timestep: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding [batch, dim] and projection [batch, 6, dim] of timesteps [batch]."""
        embedder = self.transformer.condition_embedder
        projected = embedder.timesteps_proj(timestep)
        embedding = embedder.time_embedder(projected.to(embedder.time_embedder.linear_1.weight.dtype)).to(dtype)
        return embedding, embedder.time_proj(embedder.act_fn(embedding)).unflatten(1, (6, -1))

    def embed(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [batch, channels, frames, height, width] to hidden states [batch, tokens, dim]."""
        patches: torch.Tensor = self.transformer.patch_embedding(latents)
        return patches.flatten(2).transpose(1, 2).contiguous()

    def project(self, hidden: torch.Tensor, step: StepInputs, latents_shape: Sequence[int]) -> torch.Tensor:
        """Hidden states [batch, tokens, dim] to a prediction in the shape of the latents."""
        model = self.transformer
        shift, scale = (model.scale_shift_table + step.timestep_embedding.unsqueeze(1)).chunk(2, dim=1)
        hidden = model.proj_out((model.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden))
        batch, _, frames, height, width = latents_shape
        p_t, p_h, p_w = model.config.patch_size
        patches = hidden.reshape(batch, frames // p_t, height // p_h, width // p_w, p_t, p_h, p_w, -1)
        return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
