"""Initial latents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers.utils.torch_utils import randn_tensor

from wanref.request import Noise


def draw_noise(noise: Sequence[Noise], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Standard normal latents of `shape` [batch, ...] float32, each slice of the batch from its own source.

    One source for the whole batch draws what stock diffusers draws with one generator; one for each video draws what
    it draws with a list of them. Seeds stand for CPU generators, so that noise does not depend on the device.
    """
    slices = []
    for source in noise:
        generator = source.generator
        if generator is None:
            assert source.seed is not None, "seeds are drawn before the latents"
            generator = torch.Generator("cpu").manual_seed(source.seed)
        slices.append(randn_tensor((source.videos, *shape[1:]), generator, device, torch.float32))
    return torch.cat(slices)
