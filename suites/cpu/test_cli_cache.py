"""`wanref generate --cache ...`: what it prints and refuses, and that `--force-compute` changes no byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from suites.cpu.command import invoke
from suites.support import load_engine
from wanref.caching.base import Begin, identity_of
from wanref.caching.profile import CacheProfile, write_profile
from wanref.caching.scope import SCOPES
from wanref.request import Request

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "fixtures" / "micro"
STEPS = 12
ASKED = ("--prompt", "a red circle moving left", "--frames", 5, "--steps", STEPS, "--seed", 7)
TEACACHE = "teacache:dialect=teacache,signal=timestep_projection,threshold=0.08,coefficients=t2v-1.3b"
CACHE_DIT = "cache-dit:threshold=0.3,max_warmup_steps=3"


def generate(output: Path, *more: object) -> Any:
    return invoke("generate", MICRO, *ASKED, "--output", output, *more, COLUMNS="160")


def rows(text: str) -> list[list[str]]:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    return [row for row in cells if row[0] in ("high", "low")]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("native") / "out.safetensors"
    assert generate(file).exit_code == 0
    return file.read_bytes()


@pytest.mark.parametrize("cache", [TEACACHE, CACHE_DIT])
def test_a_row_for_each_expert_branch_and_stage_says_what_was_saved(tmp_path: Path, native: bytes, cache: str) -> None:
    result = generate(tmp_path / "out.safetensors", "--cache", cache)
    assert result.exit_code == 0, result.output
    table = rows(result.stdout)
    assert [row[:3] for row in table] == [["high", "cond", "0"], ["high", "uncond", "0"]]
    skipped = 6 if cache == TEACACHE else 5  # of six blocks at a hit
    for _, _, _, computed, reused, guard, saved, over in table:
        assert int(computed) + int(reused) == STEPS
        assert int(computed) > 0
        assert int(reused) > 0
        assert guard == "0"
        assert saved == f"{int(reused) * skipped / (STEPS * 6):.1%}"
        assert float(over) >= 1
    assert "unqualified" in result.stdout
    assert "never fired" not in result.stdout
    assert "Cache-DiT]" not in result.output, "the library's own notices"
    assert (tmp_path / "out.safetensors").read_bytes() != native


@pytest.mark.parametrize("cache", [TEACACHE, CACHE_DIT])
def test_force_compute_leaves_the_bytes_and_shows_the_shadow(tmp_path: Path, native: bytes, cache: str) -> None:
    result = generate(tmp_path / "out.safetensors", "--cache", cache, "--force-compute")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.safetensors").read_bytes() == native
    for row in rows(result.stdout):
        assert row[3] == str(STEPS)
        assert re.fullmatch(r"0 \([1-9]\d* in the shadow\)", row[4])
        assert row[6] == "0.0%"
    assert "never fired" not in result.stdout


def test_a_cache_that_never_fired_says_so(tmp_path: Path, native: bytes) -> None:
    result = generate(tmp_path / "out.safetensors", "--cache", CACHE_DIT.replace("=3", f"={STEPS}"))
    assert result.exit_code == 0, result.output
    assert "cache-dit never fired: every block was computed, and the cache saved nothing." in result.stdout
    assert [row[4] for row in rows(result.stdout)] == ["0", "0"]
    assert (tmp_path / "out.safetensors").read_bytes() == native


def test_every_stage_of_a_pipeline_has_its_rows(tmp_path: Path) -> None:
    result = generate(tmp_path / "out.safetensors", "--cache", TEACACHE, "--topology", "pp2cfg1")
    assert result.exit_code == 0, result.output
    expected = [["high", branch, stage] for stage in "01" for branch in ("cond", "uncond")]
    assert [row[:3] for row in rows(result.stdout)] == expected
    assert all(int(row[4]) > 0 and int(row[3]) > 0 for row in rows(result.stdout))


# Profiles.


@pytest.fixture(scope="module")
def profile() -> CacheProfile:
    """Of the run that `ASKED` asks for."""
    engine = load_engine(MICRO)
    request = Request(prompt="a red circle moving left", frames=5, steps=STEPS, seed=7, output_type="latent")
    output = engine(request)
    begin = Begin(
        output.schedule, engine.place, engine.stages, tuple(output.latents.shape), engine.dtype, engine.device
    )
    options = {"threshold": 0.08, "signal": "timestep_projection", "coefficients": "t2v-1.3b"}
    return CacheProfile("teacache", options, identity_of(begin, engine.checkpoint.identity()), "a test", True)


def test_a_profile_for_this_very_run_is_taken_and_decides_as_its_options_do(
    tmp_path: Path, profile: CacheProfile
) -> None:
    write_profile(tmp_path / "profile.json", profile)
    by_profile = generate(tmp_path / "a.safetensors", "--cache", tmp_path / "profile.json")
    by_hand = generate(tmp_path / "b.safetensors", "--cache", TEACACHE)
    assert by_profile.exit_code == 0, by_profile.output
    assert "(qualified)" in by_profile.stdout
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert all(int(row[4]) > 0 for row in rows(by_profile.stdout))
    assert [row[3:5] for row in rows(by_profile.stdout)] == [row[3:5] for row in rows(by_hand.stdout)]


@pytest.mark.parametrize(
    ("option", "value", "differs"),
    [("--frames", 9, "latent_shape"), ("--steps", 13, "schedule"), ("--dtype", "bfloat16", "dtype")],
)
def test_a_profile_for_another_run_is_refused_with_both_values(
    tmp_path: Path, profile: CacheProfile, option: str, value: object, differs: str
) -> None:
    write_profile(tmp_path / "profile.json", profile)
    result = generate(tmp_path / "out.safetensors", "--cache", tmp_path / "profile.json", option, value)
    assert result.exit_code == 2
    assert f"{differs}: the profile is for {getattr(profile.identity, differs)!r}, this run is " in result.stderr
    assert str(value) in result.stderr or differs != "dtype"
    assert not (tmp_path / "out.safetensors").exists()


# Refusals.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--force-compute",), "force_compute is for a cache, and there is none: give --cache"),
        (("--cache", "magcache"), "cache='magcache' is not accepted: give one of teacache, fixed, cache-dit"),
        (("--cache", "cache-dit:tresh=1"), "option 'tresh' is not known"),
        (("--cache", "cache-dit:fn"), "'fn' is not one option=value"),
        (("--cache", "cache-dit:fn=6"), "fn=6 and bn=0"),
        (("--cache", "teacache:threshold=0.1"), "no coefficients for the high-noise expert"),
        (("--cache", TEACACHE.replace("0.08", "low")), "threshold='low' is not float"),
        (("--cache", TEACACHE + "x"), "neither a published table"),
        (("--cache", "fixed:steps=*.*=0"), "before the high-noise expert has computed there"),
        (("--cache", "absent.json"), "absent.json"),
    ],
)
def test_what_cannot_be_honoured_is_a_usage_error_that_names_it(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    result = generate(tmp_path / "out.safetensors", *options)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_inspect_shows_what_each_cache_supports_and_why_not_otherwise() -> None:
    shown = invoke("inspect", MICRO, COLUMNS="200").stdout
    words = " ".join(re.sub(r"[│┃]", " ", shown).split())
    for name in SCOPES:
        assert name in words
    for dimension in ("families", "dtypes", "topologies", "experts", "sharding", "quantisation"):
        assert dimension in words
    assert "I2V," in words
