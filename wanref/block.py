"""The arithmetic of one Wan transformer block, over the modules of diffusers' own `WanTransformerBlock`.

Each function returns the bytes that `WanTransformerBlock.forward` (diffusers 0.42) returns. What it saves is work
that diffusers repeats: text keys and values and rotary tables depend on the request alone, the modulation on the step
alone. Elementwise steps reuse the buffers of tensors that nothing else refers to; every operation is rounded on its
own, in the same order, so the bytes stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanAttention, WanRotaryPosEmbed, WanTransformerBlock


@dataclass(frozen=True, slots=True)
class TextKV:
    """Keys and values of the text for one block's cross-attention, each [batch, text_tokens, heads, head_dim]."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class BlockModulation:
    """Shift, 1 + scale and gate of one block's self-attention and feed-forward, each [batch, 1, dim] float32."""

    attn_shift: torch.Tensor
    attn_scale: torch.Tensor
    attn_gate: torch.Tensor
    ffn_shift: torch.Tensor
    ffn_scale: torch.Tensor
    ffn_gate: torch.Tensor


def rotary_table(rope: WanRotaryPosEmbed, latents: torch.Tensor) -> torch.Tensor:
    """`cos + i sin` for latents [batch, channels, frames, height, width]: [1, tokens, 1, head_dim / 2] complex64."""
    cos, sin = rope(latents)
    return torch.complex(cos[..., 0::2].contiguous(), sin[..., 1::2].contiguous())


def text_keys_values(block: WanTransformerBlock, text: torch.Tensor) -> TextKV:
    """Cross-attention keys and values of embedded text [batch, text_tokens, dim]."""
    attn = block.attn2
    key = attn.norm_k(attn.to_k(text)).unflatten(2, (attn.heads, -1))
    value = attn.to_v(text).unflatten(2, (attn.heads, -1))
    return TextKV(key, value)


def modulate(block: WanTransformerBlock, timestep_proj: torch.Tensor) -> BlockModulation:
    """Modulation from the time projection [batch, 6, dim]."""
    shift, scale, gate, c_shift, c_scale, c_gate = (block.scale_shift_table + timestep_proj.float()).chunk(6, dim=1)
    return BlockModulation(shift, 1 + scale, gate, c_shift, 1 + c_scale, c_gate)


def modulated_input(block: WanTransformerBlock, hidden: torch.Tensor, modulation: BlockModulation) -> torch.Tensor:
    """What the block's self-attention reads: norm1, scaled and shifted, [batch, tokens, dim] in the dtype of hidden."""
    normed: torch.Tensor = block.norm1(hidden.float())
    return normed.mul_(modulation.attn_scale).add_(modulation.attn_shift).type_as(hidden)


def run_block(
    block: WanTransformerBlock, hidden: torch.Tensor, text: TextKV, modulation: BlockModulation, rotary: torch.Tensor
) -> torch.Tensor:
    """One block: hidden [batch, tokens, dim] to the same. `hidden` is read only."""
    attended = _self_attention(block.attn1, modulated_input(block, hidden, modulation), rotary)
    hidden = attended.float().mul_(modulation.attn_gate).add_(hidden).type_as(hidden)

    # norm2 may be an identity, whose output is `hidden` itself: nothing is written in place here.
    crossed = _cross_attention(block.attn2, block.norm2(hidden.float()).type_as(hidden), text)
    hidden = crossed.add_(hidden)

    normed = block.norm3(hidden.float()).mul_(modulation.ffn_scale).add_(modulation.ffn_shift).type_as(hidden)
    fed: torch.Tensor = block.ffn(normed)
    return fed.float().mul_(modulation.ffn_gate).add_(hidden).type_as(hidden)


def _self_attention(attn: WanAttention, hidden: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    query = _rotate(attn.norm_q(attn.to_q(hidden)).unflatten(2, (attn.heads, -1)), rotary)
    key = _rotate(attn.norm_k(attn.to_k(hidden)).unflatten(2, (attn.heads, -1)), rotary)
    value = attn.to_v(hidden).unflatten(2, (attn.heads, -1))
    return _attend(attn, query, key, value)


def _cross_attention(attn: WanAttention, hidden: torch.Tensor, text: TextKV) -> torch.Tensor:
    query = attn.norm_q(attn.to_q(hidden)).unflatten(2, (attn.heads, -1))
    return _attend(attn, query, text.key, text.value)


def _attend(attn: WanAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    out = dispatch_attention_fn(query, key, value, backend=attn.processor._attention_backend)
    projected: torch.Tensor = attn.to_out[0](out.flatten(2, 3).type_as(query))
    return projected


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    pairs = x.float().unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and x.shape[-1] % 16 == 0:
        # One pass instead of six. The CPU's vector kernel rounds each product on its own, as diffusers does; what does
        # not fill a vector of 8 pairs, and CUDA, contract them to fused multiply-adds, which round otherwise.
        rotated = torch.view_as_real(torch.view_as_complex(pairs).mul_(rotary))
    else:
        x1, x2 = pairs.unbind(-1)
        cos, sin = rotary.real, rotary.imag
        rotated = torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)
    return rotated.flatten(-2).type_as(x)
