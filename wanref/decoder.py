"""From latents to pixels, as the stock pipeline does it."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from wanref.checkpoint import Checkpoint


class Decoder:
    """The checkpoint's VAE."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        vae = AutoencoderKLWan.from_pretrained(checkpoint.path / "vae", dtype=dtype, use_safetensors=True)
        self.vae = vae.to(device).eval().requires_grad_(False)

    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """Latents [batch, channels, frames, height, width] to float32 [batch, frames, height, width, 3] in [0, 1]."""
        vae = self.vae
        latents = latents.to(vae.device, vae.dtype)
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents)
        inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents)
        try:
            pixels = vae.decode(latents / inverse_std + mean, return_dict=False)[0]
        finally:
            # A decode that raised leaves its causal feature cache behind, alive until the next one.
            vae.clear_cache()
        frames = (pixels * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
        return np.ascontiguousarray(frames.cpu().float().numpy())
