"""How far a cached video is from the native one of the same prompt and seed.

All on floats before any video encoding: [frames, height, width, 3] in [0, 1]. Pixels of 8 bits are refused, since a
difference of unsigned bytes wraps; who has nothing else converts them with `from_uint8`, and so says that he did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.campaign.refusal import CampaignError

Video = npt.NDArray[Any]
"""Float, [frames, height, width, 3], RGB in [0, 1]."""

SSIM_SETTINGS: Mapping[str, Any] = {
    "gaussian_weights": True,
    "sigma": 1.5,
    "use_sample_covariance": False,
    "data_range": 1.0,
    "channel_axis": -1,
}
"""Of scikit-image's structural_similarity, on each frame. Every report prints them: others shift it by up to .13."""

WINDOW = 11
"""Pixels on a side of that Gaussian window, and so of the smallest frame."""

TEMPORAL_FLOOR = 1 / 255
"""Least motion, as a mean absolute difference of successive frames, that a temporal error is taken relative to.

One level of an 8-bit video: below it nothing moves on a screen. A static clip so neither divides by zero nor drops out.
"""


@dataclass(frozen=True, slots=True)
class Metrics:
    """One cached video beside its native one.

    ssim: mean over frames. temporal_error: see that function. latent_error: rms of the difference over the native rms.
    saturation, brightness: means of S and V of HSV, of the cached video; native_*: of the native one.
    """

    ssim: float
    temporal_error: float
    latent_error: float
    saturation: float
    native_saturation: float
    brightness: float
    native_brightness: float


def measure(native: Video, cached: Video, native_latents: npt.NDArray[Any], latents: npt.NDArray[Any]) -> Metrics:
    """All of it for one pair. latents: [channels, frames, height, width]. Raises CampaignError for what is no pair."""
    saturation, brightness = saturation_and_brightness(cached)
    native_saturation, native_brightness = saturation_and_brightness(native)
    return Metrics(
        ssim=ssim(native, cached),
        temporal_error=temporal_error(native, cached),
        latent_error=latent_error(native_latents, latents),
        saturation=saturation,
        native_saturation=native_saturation,
        brightness=brightness,
        native_brightness=native_brightness,
    )


def ssim(native: Video, cached: Video) -> float:
    """Structural similarity, the mean over frames; see SSIM_SETTINGS. Raises CampaignError."""
    structural_similarity = _structural_similarity()
    pair = _checked_pair(native, cached)
    if min(pair[0].shape[1:3]) < WINDOW:
        raise CampaignError(f"video: shape={native.shape} has frames below {WINDOW} x {WINDOW}, SSIM's window.")
    return float(np.mean([structural_similarity(*frames, **SSIM_SETTINGS) for frames in zip(*pair, strict=True)]))


def temporal_error(native: Video, cached: Video, floor: float = TEMPORAL_FLOOR) -> float:
    """mean |D cached - D native| / max(mean |D native|, floor), D the difference of successive frames.

    Raises CampaignError, also for a video of one frame, which has no motion to be wrong about.
    """
    native, cached = _checked_pair(native, cached)
    if len(native) < 2:
        raise CampaignError("video: frames=1 has no temporal error: give 2 or more.")
    moved = np.diff(native, axis=0)
    return float(np.abs(np.diff(cached, axis=0) - moved).mean() / max(np.abs(moved).mean(), floor))


def latent_error(native: npt.NDArray[Any], cached: npt.NDArray[Any]) -> float:
    """rms of the difference of two final latents over the rms of the native. Raises CampaignError."""
    native, cached = (_finite(name, array) for name, array in (("native latents", native), ("latents", cached)))
    if native.shape != cached.shape:
        raise CampaignError(f"latents: shape={cached.shape} is not that of the native ones, {native.shape}.")
    size = float(np.sqrt(np.square(native).mean()))
    if size == 0:
        raise CampaignError("native latents: rms=0 is no render.")
    return float(np.sqrt(np.square(cached - native).mean())) / size


def saturation_and_brightness(video: Video) -> tuple[float, float]:
    """Means of S and V of HSV over all pixels: (max - min) / max, 0 for black, and max. Raises CampaignError."""
    video = _checked("video", video)
    brightest, darkest = video.max(axis=-1), video.min(axis=-1)
    saturation = np.divide(brightest - darkest, brightest, out=np.zeros_like(brightest), where=brightest > 0)
    return float(saturation.mean()), float(brightest.mean())


def from_uint8(video: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Pixels 0..255 to [0, 1]. Raises CampaignError for any other dtype."""
    if video.dtype != np.uint8:
        raise CampaignError(f"video: dtype={video.dtype} is not uint8.")
    return video.astype(np.float64) / 255


def _structural_similarity() -> Any:
    """Imported when it is first used: it brings SciPy, which a command line should not wait for."""
    try:
        from skimage.metrics import structural_similarity
    except ImportError as error:
        raise CampaignError("metrics: SSIM needs scikit-image, which comes with wanref[campaign].") from error
    return structural_similarity


def _checked_pair(native: Video, cached: Video) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    one, two = _checked("native video", native), _checked("video", cached)
    if one.shape != two.shape:
        raise CampaignError(f"video: shape={two.shape} is not that of the native one, {one.shape}.")
    return one, two


def _checked(name: str, video: Video) -> npt.NDArray[np.float64]:
    """The video in float64. Differences of float32 frames are exact in it."""
    if not np.issubdtype(video.dtype, np.floating):
        raise CampaignError(f"{name}: dtype={video.dtype} is not accepted: give floats in [0, 1] (see from_uint8).")
    if video.ndim != 4 or video.shape[-1] != 3 or 0 in video.shape:
        raise CampaignError(f"{name}: shape={video.shape} is not accepted: give [frames, height, width, 3].")
    exact = _finite(name, video)
    if exact.min() < 0 or exact.max() > 1:
        raise CampaignError(f"{name}: values from {exact.min():g} to {exact.max():g} are not in [0, 1].")
    return exact


def _finite(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wrong = int(array.size - np.isfinite(array).sum())
    if wrong:
        raise CampaignError(f"{name}: {wrong} of {array.size} values are not finite.")
    return array.astype(np.float64)
