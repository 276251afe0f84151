"""The record of a calibration: what was searched on which pairs, what was selected, and whether it passed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oracle.campaign.candidate import Candidate, candidate_of
from oracle.campaign.gates import Outcome, judge, passed, quality_gates
from oracle.campaign.metrics import SSIM_SETTINGS, TEMPORAL_FLOOR
from oracle.campaign.pair import Pair, Row, prompt_digest, row_of
from oracle.campaign.record import digest_of, read_record, write_record
from oracle.campaign.refusal import CampaignError
from oracle.campaign.search import Searched, Tried
from wanref.caching.profile import ProfileIdentity

SCHEMA = "wanref.campaign.calibration/1"


@dataclass(frozen=True, slots=True)
class Calibration:
    """No seconds are in here: two calibrations of one revision are equal byte for byte.

    identity: of the native runs; its topology gives the PP that this holds for. rows: of the selected candidate, or of
    the one that came closest where none passed; `selected` is None only if no candidate has rows for all pairs.
    table: every candidate's standing.
    """

    name: str
    identity: ProfileIdentity
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    selected: Candidate | None
    rows: tuple[Row, ...]
    table: tuple[Mapping[str, Any], ...]

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return tuple(Pair(prompt, seed) for prompt in self.prompts for seed in self.seeds)

    def outcomes(self) -> dict[str, Outcome]:
        """The gates of quality, taken again from the rows. Raises CampaignError for rows that are no evidence."""
        return judge(self.rows, self.pairs, None)

    @property
    def passed(self) -> bool:
        """Whether a candidate was selected whose rows, as they stand here, meet every gate of quality."""
        if self.selected is None:
            return False
        try:
            return passed(self.outcomes(), quality_gates())
        except CampaignError:
            return False

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passed": self.passed,
            "identity": asdict(self.identity) | {"latent_shape": list(self.identity.latent_shape)},
            "metrics": {"ssim": dict(SSIM_SETTINGS), "temporal_floor": TEMPORAL_FLOOR},
            "prompts": list(self.prompts),
            "prompt_digests": [prompt_digest(prompt) for prompt in self.prompts],
            "seeds": list(self.seeds),
            "selected": None if self.selected is None else self.selected.as_json(),
            "table": [dict(row) for row in self.table],
            "rows": [row.as_json() for row in self.rows],
        }

    def digest(self) -> str:
        """What a profile names as its evidence."""
        return digest_of(_plain(self.as_json()))


def calibrate(
    name: str, identity: ProfileIdentity, prompts: Sequence[str], seeds: Sequence[int], searched: Searched
) -> Calibration:
    """From a search over these prompts and seeds. Where nothing passed, what came closest is kept, as not passed."""
    chosen = searched.selected or _closest(searched.tried, len(prompts) * len(seeds))
    return Calibration(
        name=name,
        identity=identity,
        prompts=tuple(prompts),
        seeds=tuple(seeds),
        selected=None if chosen is None else chosen.candidate,
        rows=() if chosen is None else chosen.rows,
        table=tuple(each.as_json() for each in searched.tried),
    )


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the record whole."""
    write_record(path, SCHEMA, _plain(calibration.as_json()))


def read_calibration(path: Path) -> Calibration:
    """Raises CampaignError for a file that is none, or one that says `passed` though its rows do not."""
    body = read_record(path, SCHEMA)
    try:
        identity = dict(body["identity"])
        calibration = Calibration(
            name=body["name"],
            identity=ProfileIdentity(**{**identity, "latent_shape": tuple(identity["latent_shape"])}),
            prompts=tuple(body["prompts"]),
            seeds=tuple(body["seeds"]),
            selected=None if body["selected"] is None else candidate_of(body["selected"]),
            rows=tuple(row_of(row) for row in body["rows"]),
            table=tuple(body["table"]),
        )
    except (KeyError, TypeError) as error:
        raise CampaignError(f"{path.name}: {type(error).__name__}: {error}.") from error
    if _plain(calibration.as_json()) != body:
        raise CampaignError(f"{path.name}: what it says does not follow from its rows.")
    return calibration


def _closest(tried: Sequence[Tried], pairs: int) -> Tried | None:
    """Of those that failed on all pairs, the one with the smallest temporal error, which is the gate that binds."""
    whole = [each for each in tried if each.standing == "failed" and len(each.rows) == pairs]
    return min(whole, key=lambda each: each.outcomes["temporal_error"].value, default=None)


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: tuples are lists there."""
    plain: dict[str, Any] = json.loads(json.dumps(body, allow_nan=False))
    return plain
