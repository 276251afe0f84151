"""The identity of a run in one topology, asked of an engine there, and kept as a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from oracle.campaign.content import Content
from oracle.campaign.freeze import identity_for
from oracle.campaign.pair import Pair
from oracle.campaign.setting import Setting, open_engine, request_of
from oracle.campaign.shards import Shard
from wanref.caching.profile import ProfileIdentity


def identity_shard(setting: Setting, pair: Pair, key: str) -> Shard:
    """Every prompt and seed has the same."""
    return Shard(f"identity/{setting.topology}", _ask, _keep, (setting, pair), key, setting.world_size)


def read_identity(content: Content) -> ProfileIdentity:
    values = dict(content.values)
    return ProfileIdentity(**{**values, "latent_shape": tuple(values["latent_shape"])})


def _ask(setting: Setting, pair: Pair) -> ProfileIdentity:
    return identity_for(open_engine(setting), request_of(setting, pair))


def _keep(by_rank: Sequence[ProfileIdentity], *_: Any) -> Content:
    return Content({**asdict(by_rank[0]), "latent_shape": list(by_rank[0].latent_shape)}, {})
