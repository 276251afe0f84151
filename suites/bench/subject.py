"""What is measured: a mid-size random checkpoint, and the one request that every side runs."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

from fixtures.tiny import TinySpec, build_tiny
from wanref import Request

SIZE = (320, 320, 17)
"""Height, width, frames: latents of 5 x 40 x 40, which patches of 1 x 2 x 2 make 2,000 tokens."""

STEPS = 2
PROMPT = "a red square moving left"


def build_midsize(folder: Path) -> Path:
    """Write it to `folder`, which must not exist: dim 512 (4 heads of 128), 8 blocks; text encoder and VAE are tiny."""
    build_tiny(folder, TinySpec(blocks=1, size=SIZE))
    shutil.rmtree(folder / "transformer")
    transformer = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=128,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=256,
        ffn_dim=2048,
        num_layers=8,
    )
    transformer.save_pretrained(folder / "transformer")
    return folder


def request(steps: int = STEPS) -> Request:
    """Both branches at every step; latents are the output, so that the tiny VAE has no part in it."""
    return Request(prompt=PROMPT, steps=steps, guidance_scale=4.0, seed=7, output_type="latent")


def digest(*tensors: torch.Tensor) -> str:
    """SHA-256 of the tensors' bytes."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()
