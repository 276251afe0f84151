"""Metrics of a campaign, against other implementations and cases computed by hand."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import correlate1d

from oracle.campaign import extras
from oracle.campaign.metrics import (
    TEMPORAL_FLOOR,
    from_uint8,
    latent_error,
    measure,
    saturation_and_brightness,
    ssim,
    temporal_error,
)
from oracle.campaign.refusal import CampaignError
from suites.campaigned import clip

pytestmark = pytest.mark.cpu


# SSIM.


def gaussian(size: int = 11, sigma: float = 1.5) -> np.ndarray:
    weights = np.exp(-0.5 * ((np.arange(size) - size // 2) / sigma) ** 2)
    return weights / weights.sum()


def ssim_by_its_formula(one: np.ndarray, two: np.ndarray) -> float:
    """Wang et al. 2004, with a window of 11 x 11, sigma 1.5, where it lies whole within the frame."""

    def blurred(values: np.ndarray) -> np.ndarray:
        return correlate1d(correlate1d(values, gaussian(), axis=1), gaussian(), axis=2)[:, 5:-5, 5:-5]

    mu1, mu2 = blurred(one), blurred(two)
    var1, var2 = blurred(one * one) - mu1**2, blurred(two * two) - mu2**2
    cov = blurred(one * two) - mu1 * mu2
    c1, c2 = 0.01**2, 0.03**2
    return float((((2 * mu1 * mu2 + c1) * (2 * cov + c2)) / ((mu1**2 + mu2**2 + c1) * (var1 + var2 + c2))).mean())


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_ssim_is_that_of_the_paper(noise: float) -> None:
    native = clip()
    cached = np.clip(native + noise * np.random.default_rng(1).standard_normal(native.shape), 0, 1)
    assert ssim(native, cached) == pytest.approx(ssim_by_its_formula(native, cached), abs=1e-12)
    assert ssim(native, native) == 1


def test_ssim_of_a_constant_shift_of_a_flat_clip_is_its_luminance_term() -> None:
    flat = np.full((3, 16, 16, 3), 0.4)
    assert ssim(flat, flat + 0.1) == pytest.approx((2 * 0.4 * 0.5 + 1e-4) / (0.4**2 + 0.5**2 + 1e-4), abs=1e-12)


def test_ssim_is_the_mean_over_frames() -> None:
    native = clip(frames=4)
    cached = native.copy()
    cached[2] = 1 - cached[2]
    by_frame = [ssim(native[i : i + 1], cached[i : i + 1]) for i in range(4)]
    assert by_frame[0] == by_frame[1] == by_frame[3] == 1
    assert ssim(native, cached) == pytest.approx((3 + by_frame[2]) / 4, abs=1e-12)


# Temporal error.


def test_a_constant_shift_has_no_temporal_error() -> None:
    assert temporal_error(clip(), clip() + 0.1) == pytest.approx(0, abs=1e-12)


def test_temporal_error_of_one_frozen_frame_by_hand() -> None:
    # One pixel's worth of motion: .1 a frame. Frame 2 is frame 1 again, so that the two differences around it, of .1
    # each, become 0 and .2: an error of .1 in two of the four differences.
    native = np.linspace(0.1, 0.5, 5)[:, None, None, None] * np.ones((5, 12, 12, 3))
    cached = native.copy()
    cached[2] = cached[1]
    assert temporal_error(native, cached) == pytest.approx((0 + 0.1 + 0.1 + 0) / 4 / 0.1)


def test_a_wholly_frozen_clip_has_an_error_of_one() -> None:
    native = clip()
    assert temporal_error(native, np.broadcast_to(native[:1], native.shape)) == pytest.approx(1)


def test_a_static_clip_neither_explodes_nor_drops_out() -> None:
    static = np.broadcast_to(clip(frames=1), (5, 24, 24, 3))
    assert temporal_error(static, static) == 0
    flicker = static.copy()
    flicker[1::2] += 0.002
    assert temporal_error(static, flicker) == pytest.approx(0.002 / TEMPORAL_FLOOR)


def test_the_floor_leaves_a_moving_clip_alone() -> None:
    native, cached = clip(), clip(seed=1)
    by_formula = (
        np.abs(np.diff(cached, axis=0) - np.diff(native, axis=0)).mean() / np.abs(np.diff(native, axis=0)).mean()
    )
    assert temporal_error(native, cached) == pytest.approx(by_formula)


# Latents and colours.


def test_latent_error_of_a_scaled_latent_is_the_scale() -> None:
    latents = np.random.default_rng(0).standard_normal((4, 2, 4, 4)).astype(np.float32)
    assert latent_error(latents, latents * np.float32(1.25)) == pytest.approx(0.25)
    assert latent_error(latents, latents) == 0


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1, allow_subnormal=False)] * 3), min_size=1, max_size=12))
def test_saturation_and_brightness_are_those_of_hsv(pixels: list[tuple[float, float, float]]) -> None:
    expected = np.array([colorsys.rgb_to_hsv(*pixel)[1:] for pixel in pixels]).mean(axis=0)
    assert saturation_and_brightness(np.array(pixels)[None, None]) == pytest.approx(tuple(expected), abs=1e-12)


def test_measure_tells_the_cached_videos_colours_from_the_natives() -> None:
    native, grey = clip(), np.full((5, 24, 24, 3), 0.25)
    latents = np.ones((4, 2, 3, 3))
    measured = measure(native, grey, latents, latents)
    assert (measured.saturation, measured.brightness) == (0, 0.25)
    assert (measured.native_saturation, measured.native_brightness) == saturation_and_brightness(native)


# What is refused.


def test_bytes_are_refused_unless_they_are_converted() -> None:
    pixels = (clip() * 255).round().astype(np.uint8)
    with pytest.raises(CampaignError, match=r"dtype=uint8 is not accepted: give floats in \[0, 1\]"):
        ssim(pixels, pixels)
    with pytest.raises(CampaignError, match="video: dtype=uint8"):
        temporal_error(clip(), pixels)
    # As floats of 0..255 they are refused as well: SSIM's constants would be those of another range.
    with pytest.raises(CampaignError, match=r"are not in \[0, 1\]"):
        ssim(pixels.astype(float), pixels.astype(float))
    assert np.abs(from_uint8(pixels) - clip()).max() <= 0.5 / 255 + 1e-12
    with pytest.raises(CampaignError, match="dtype=float64 is not uint8"):
        from_uint8(clip())  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused(value: float) -> None:
    broken = clip()
    broken[3, 1, 2, 0] = value
    for metric in (ssim, temporal_error):
        with pytest.raises(CampaignError, match=r"^video: 1 of 8640 values are not finite"):
            metric(clip(), broken)
    with pytest.raises(CampaignError, match="native latents: 1 of 2 values"):
        latent_error(np.array([1.0, value]), np.array([1.0, 1.0]))


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(CampaignError, match="is not that of the native one"):
        ssim(clip(), clip(frames=4))
    with pytest.raises(CampaignError, match=r"give \[frames, height, width, 3\]"):
        ssim(clip()[0], clip()[0])
    with pytest.raises(CampaignError, match="frames below 11 x 11"):
        ssim(clip(side=10), clip(side=10))
    with pytest.raises(CampaignError, match="frames=1 has no temporal error"):
        temporal_error(clip(frames=1), clip(frames=1))
    with pytest.raises(CampaignError, match="rms=0 is no render"):
        latent_error(np.zeros(3), np.ones(3))


# Extras.


def test_an_extra_that_is_absent_says_so_and_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert extras.psnr(clip(), clip()) == extras.Extra(None, "torchmetrics not installed")
    assert extras.lpips(clip(), clip()) == extras.Extra(None, "torchmetrics and torchvision not installed")


def test_lpips_without_its_weights_downloads_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    absent = extras.lpips(clip(), clip()).absent
    assert absent is not None
    assert "are not in torch.hub's folder of checkpoints" in absent
