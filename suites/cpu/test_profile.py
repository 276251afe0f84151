"""Cache profiles and cache options: what is read, what is refused and by which name, and what counts as qualified."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from suites.cached import hits_and_misses, output_of
from suites.support import defaults, load_engine
from wanref.caching.base import Begin, identity_of
from wanref.caching.error import CacheError
from wanref.caching.profile import VERSION, CacheProfile, ProfileIdentity, read_profile, write_profile
from wanref.caching.scope import SCOPES, Scope
from wanref.caching.spec import METHODS, CacheSpec, parse_cache
from wanref.pipeline import WanReference
from wanref.plan import latents_shape
from wanref.request import Request

pytestmark = pytest.mark.cpu

IDENTITY = ProfileIdentity("digest", "cpu", "float32", "pp2cfg1", (1, 16, 5, 8, 8), "steps")
PROFILE = CacheProfile(
    method="teacache",
    options={
        "threshold": 0.1,
        "coefficients": [[1.0, 0.0], [0.5, 0.0]],
        "ranges": {"high": [[0.0, 0.5], [0.0, 0.4]]},
        "sign": "clamp",
        "first": 2,
    },
    identity=IDENTITY,
    calibrated_on="12 prompts",
    qualified=True,
)
REQUEST = Request(prompt="a red circle", steps=8, seed=3, output_type="latent")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


def written(path: Path) -> dict[str, Any]:
    write_profile(path, PROFILE)
    content = json.loads(path.read_text())
    assert isinstance(content, dict)
    return content


def test_a_profile_comes_back_as_it_was_written_and_nothing_else_is_left(path: Path) -> None:
    write_profile(path, PROFILE)
    assert read_profile(path) == PROFILE
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]
    assert parse_cache(str(path)) == CacheSpec("teacache", PROFILE.options, PROFILE)


PARTS = [("profile", field.name) for field in fields(CacheProfile)]
PARTS += [("identity", field.name) for field in fields(ProfileIdentity)]


@pytest.mark.parametrize(("part", "field"), PARTS)
def test_a_missing_field_is_refused_by_name(path: Path, part: str, field: str) -> None:
    content = written(path)
    del (content if part == "profile" else content["identity"])[field]
    path.write_text(json.dumps(content))
    match = "identity is None" if (part, field) == ("profile", "identity") else rf"{part} lacks \['{field}'\]"
    with pytest.raises(CacheError, match=match):
        read_profile(path)


@pytest.mark.parametrize("part", ["profile", "identity"])
def test_an_unknown_field_is_refused_by_name(path: Path, part: str) -> None:
    content = written(path)
    (content if part == "profile" else content["identity"])["decay"] = 0.95
    path.write_text(json.dumps(content))
    with pytest.raises(CacheError, match=rf"{part} lacks \[\] and has unknown \['decay'\]"):
        read_profile(path)


@pytest.mark.parametrize(("part", "field"), PARTS)
def test_a_field_of_another_type_is_refused_by_name(path: Path, part: str, field: str) -> None:
    for wrong in (3, None, ["x"]):
        content = written(path)
        (content if part == "profile" else content["identity"])[field] = wrong
        path.write_text(json.dumps(content))
        with pytest.raises(CacheError, match=rf"{field} is "):
            read_profile(path)


@pytest.mark.parametrize("version", [None, 0, VERSION + 1, str(VERSION)])
def test_another_version_is_refused_naming_both(path: Path, version: object) -> None:
    path.write_text(json.dumps({**written(path), "version": version}))
    with pytest.raises(CacheError, match=f"version {VERSION} is read, not {version!r}"):
        read_profile(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"null"])
def test_a_file_that_is_no_profile_is_refused_by_its_name(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CacheError, match=r"cache profile .*profile\.json"):
        read_profile(path)
    with pytest.raises(CacheError, match=r"cache profile .*absent\.json"):
        parse_cache(str(path.with_name("absent.json")))


@pytest.mark.parametrize("field", [field.name for field in fields(ProfileIdentity)])
def test_another_identity_is_refused_with_both_values_of_each_field(field: str) -> None:
    PROFILE.check(IDENTITY)
    value: Any = (9, 9) if field == "latent_shape" else "another"
    with pytest.raises(CacheError) as error:
        PROFILE.check(replace(IDENTITY, **{field: value}))
    assert f"{field}: the profile is for {getattr(IDENTITY, field)!r}, this run is {value!r}" in str(error.value)
    assert sum(f"{other.name}: the profile" in str(error.value) for other in fields(ProfileIdentity)) == 1


def profile_of(engine: WanReference, request: Request, **changes: Any) -> CacheProfile:
    """A fixed schedule, as if it had been calibrated on this engine and request."""
    plan = engine._plan(request)
    shape = latents_shape(plan.request, engine.checkpoint)
    begin = Begin(plan.schedule, engine.place, engine.stages, shape, engine.dtype, engine.device)
    identity = identity_of(begin, engine.checkpoint.identity())
    return CacheProfile("fixed", {"steps": "*.*=3+5"}, replace(identity, **changes), "this test", True)


def test_a_profile_runs_where_it_was_calibrated(tiny: Callable[..., Path], path: Path) -> None:
    engine = load_engine(tiny(), defaults=defaults())
    write_profile(path, profile_of(engine, REQUEST))
    decisions = output_of(engine, REQUEST, parse_cache(str(path))).decisions
    assert hits_and_misses(decisions) == (4, 12)


@pytest.mark.parametrize(
    ("request_change", "field"),
    [
        ({"steps": 7}, "schedule"),
        ({"guidance_scale": 4.0}, "schedule"),
        ({"flow_shift": 4.0}, "schedule"),
        ({"frames": 9}, "latent_shape"),
        ({"videos_per_prompt": 2}, "latent_shape"),
        ({"prompt": "a blue square", "seed": 4}, None),
    ],
)
def test_a_request_that_a_profile_is_not_for_is_refused_before_any_work(
    tiny: Callable[..., Path], request_change: dict[str, Any], field: str | None
) -> None:
    events: list[object] = []
    engine = load_engine(tiny(), defaults=defaults(), observer=events.append)
    profile = profile_of(engine, REQUEST)
    engine.mount(CacheSpec("fixed", profile.options, profile))
    changed = replace(REQUEST, **request_change)
    if field is None:
        assert engine(changed).decisions
        return
    with pytest.raises(CacheError, match=f"{field}: the profile is for"):
        engine(changed)
    assert not events, "no request began"


def test_a_profile_of_other_weights_or_another_dtype_is_refused(tiny: Callable[..., Path]) -> None:
    profile = profile_of(load_engine(tiny(), defaults=defaults()), REQUEST)
    for folder, dtype, field in ((tiny(seed=9), "float32", "checkpoint"), (tiny(), "bfloat16", "dtype")):
        other = load_engine(folder, dtype=dtype, defaults=defaults())
        with pytest.raises(CacheError, match=f"{field}: the profile is for"):
            output_of(other, REQUEST, CacheSpec("fixed", profile.options, profile))


def test_only_a_profile_that_passed_is_qualified() -> None:
    assert CacheSpec("teacache", PROFILE.options, PROFILE).qualified
    assert not CacheSpec("teacache", PROFILE.options, replace(PROFILE, qualified=False)).qualified
    assert not CacheSpec("teacache", PROFILE.options).qualified


# Options given by hand.


def test_options_are_read_as_given() -> None:
    spec = parse_cache("cache-dit:fn=2,threshold=0.1,mask=", forced=True)
    assert spec == CacheSpec("cache-dit", {"fn": "2", "threshold": "0.1", "mask": ""}, None, True)
    assert parse_cache("fixed:steps=0.cond=3-5").options == {"steps": "0.cond=3-5"}


def test_an_unknown_method_of_a_spec_built_by_hand_is_refused_likewise(tiny: Callable[..., Path]) -> None:
    spec = CacheSpec("magcache", {})
    match = "cache='magcache' is not accepted: give one of teacache, fixed, cache-dit"
    with pytest.raises(CacheError, match=match):
        load_engine(tiny(), cache=spec)
    engine = load_engine(tiny())
    with pytest.raises(CacheError, match=match):
        engine.mount(spec)
    assert engine.cache is None


@pytest.mark.parametrize("text", ["", "magcache", "TeaCache", "teacache2:threshold=1", ":threshold=1"])
def test_an_unknown_method_is_refused_naming_those_there_are(text: str) -> None:
    with pytest.raises(CacheError, match=f"is not accepted: give one of {', '.join(METHODS)}"):
        parse_cache(text)


@pytest.mark.parametrize("text", ["teacache:threshold", "teacache:threshold=1,threshold=2", "teacache:a=1,0.2"])
def test_what_is_not_one_value_for_an_option_is_refused_with_the_entry(text: str) -> None:
    with pytest.raises(CacheError, match="is not one option=value, given once"):
        parse_cache(text)


def test_a_method_of_a_profile_is_checked_too(path: Path) -> None:
    write_profile(path, replace(PROFILE, method="magcache"))
    with pytest.raises(CacheError, match="'magcache' is not accepted"):
        parse_cache(str(path))


def test_the_scope_table_says_something_of_every_cache_in_every_dimension() -> None:
    assert set(SCOPES) == set(METHODS)
    dimensions = {field.name for field in fields(Scope)}
    assert dimensions == {"families", "dtypes", "topologies", "experts", "sharding", "quantisation"}
    for scope in SCOPES.values():
        assert all(getattr(scope, dimension) for dimension in dimensions)
