"""PSNR and LPIPS beside the gates, through torchmetrics where it is installed. What is absent is said, not replaced."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from oracle.campaign.metrics import Video

BACKBONE = "squeeze"
_WEIGHTS = "squeezenet1_1-*.pth"


@dataclass(frozen=True, slots=True)
class Extra:
    """A value, or the reason why there is none."""

    value: float | None
    absent: str | None = None


def psnr(native: Video, cached: Video) -> Extra:
    """In dB over the whole video, of floats in [0, 1]; infinite for equal videos."""
    if reason := _missing("torchmetrics"):
        return Extra(None, reason)
    functional: Any = import_module("torchmetrics.functional.image")
    return Extra(float(functional.peak_signal_noise_ratio(_images(cached), _images(native), data_range=1.0)))


def lpips(native: Video, cached: Video) -> Extra:
    """Mean over frames, with torchmetrics' weights on SqueezeNet. Its weights are never downloaded from here."""
    if reason := _missing("torchmetrics", "torchvision"):
        return Extra(None, reason)
    if not _has_weights():
        return Extra(None, f"the weights {_WEIGHTS} are not in torch.hub's folder of checkpoints")
    functional: Any = import_module("torchmetrics.functional.image")
    distance = functional.learned_perceptual_image_patch_similarity(
        _images(native), _images(cached), net_type=BACKBONE, normalize=True
    )
    return Extra(float(distance))


def _missing(*packages: str) -> str | None:
    absent = [package for package in packages if find_spec(package) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def _has_weights() -> bool:
    hub: Any = import_module("torch.hub")
    return any(Path(hub.get_dir(), "checkpoints").glob(_WEIGHTS))


def _images(video: Video) -> Any:
    """[frames, height, width, 3] to a tensor [frames, 3, height, width] float32."""
    torch: Any = import_module("torch")
    return torch.from_numpy(video.astype("float32")).permute(0, 3, 1, 2)
