"""A campaign's declarative file: what is calibrated and accepted, where, on which prompts, and what is tried."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from oracle.campaign.pair import Pair, pairs_of
from oracle.campaign.refusal import CampaignError
from oracle.campaign.setting import Setting
from wanref.topology import parse_topology


@dataclass(frozen=True, slots=True)
class PromptSet:
    """prompts: those of a JSON file with a list `prompts`. pairs: every prompt with every seed."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return pairs_of(self.prompts, self.seeds)


@dataclass(frozen=True, slots=True)
class Tries:
    """What is searched. computed: steps of a fixed schedule that are computed. weights: exponents of |d sigma| by which
    a step's error counts. reuse: `linear`, `plain`. teacache, cache_dit: thresholds; taylorseer: its orders, 0 is
    without. signals: of TeaCache."""

    computed: tuple[int, ...] = ()
    weights: tuple[float, ...] = (0.5, 0.75, 1.0)
    reuse: tuple[str, ...] = ("linear", "plain")
    teacache: tuple[float, ...] = ()
    signals: tuple[str, ...] = ("timestep_embedding", "timestep_projection", "modulated_input")
    cache_dit: tuple[float, ...] = ()
    taylorseer: tuple[int, ...] = (0, 1)
    control: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """collected: how many calibration pairs signals and residuals are collected from. timed: pairs of one timing."""

    name: str
    setting: Setting
    topologies: tuple[str, ...]
    calibration: PromptSet
    acceptance: PromptSet
    tries: Tries
    collected: int = 8
    timed: int = 12
    round_size: int = 4

    def setting_of(self, topology: str) -> Setting:
        values = {field.name: getattr(self.setting, field.name) for field in fields(Setting)}
        return Setting(**{**values, "topology": topology})

    @property
    def stages(self) -> tuple[int, ...]:
        """Each PP once: quality is the same at equal PP, so that it is searched once."""
        return tuple(sorted({parse_topology(name).pp for name in self.topologies}))


def read_plan(path: Path) -> Plan:
    """Raises CampaignError for a file that is none, and for whatever is not known in it."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CampaignError(f"plan={str(path)!r} is not accepted: {error}.") from error
    where = f"plan {path.name}"
    sets = {
        name: _prompt_set(path.parent, f"{where}: {name}", content.pop(name, None))
        for name in ("calibration", "acceptance")
    }
    try:
        setting = Setting(**_checkpoint(path.parent, content.pop("setting", {})))
        tries = Tries(**{name: _tuple(value) for name, value in content.pop("tries", {}).items()})
        topologies = tuple(str(parse_topology(name)) for name in content.pop("topologies", ()))
        plan = Plan(
            setting=setting,
            topologies=topologies,
            calibration=sets["calibration"],
            acceptance=sets["acceptance"],
            tries=tries,
            **content,
        )
    except (TypeError, ValueError) as error:
        raise CampaignError(f"{where}: {error}") from error
    if not topologies:
        raise CampaignError(f"{where}: topologies is empty: give at least one, as pp1cfg1.")
    if shared := {*plan.calibration.prompts} & {*plan.acceptance.prompts}:
        raise CampaignError(f"{where}: prompt={sorted(shared)[0]!r} is in calibration and in acceptance.")
    if len(plan.calibration.pairs) % plan.round_size or len(plan.acceptance.pairs) % plan.round_size:
        raise CampaignError(f"{where}: round_size={plan.round_size} does not divide the pairs of both prompt sets.")
    return plan


def _prompt_set(folder: Path, where: str, content: Any) -> PromptSet:
    if not isinstance(content, Mapping) or content.keys() - {"prompts", "seeds", "first"}:
        raise CampaignError(f"{where} is not accepted: give prompts (a file), seeds, and perhaps `first`, how many.")
    try:
        prompts = json.loads((folder / content["prompts"]).read_text("utf-8"))["prompts"]
        return PromptSet(tuple(prompts)[: content.get("first")], tuple(content["seeds"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CampaignError(f"{where}: {type(error).__name__}: {error}.") from error


def _checkpoint(folder: Path, setting: Mapping[str, Any]) -> dict[str, Any]:
    """A folder beside the file, or a hub id."""
    values = dict(setting)
    beside = folder / str(values.get("checkpoint", ""))
    if values.get("checkpoint") and beside.is_dir():
        values["checkpoint"] = str(beside.resolve())
    return values


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
