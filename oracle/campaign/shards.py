"""A campaign's work as a graph of independent shards, each of which writes one file, whole or not at all.

What is there and whole is never run again: that is all there is to resuming. An executor runs shards where it likes, in
this process, on a pool of ranks or on other machines; what they leave is the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from oracle.campaign.content import Content, read_content, write_content
from oracle.campaign.refusal import CampaignError

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

ATTEMPTS = "attempts.jsonl"
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*(/[\w-]+(\.[\w-]+)*)*")


@dataclass(frozen=True, slots=True)
class Shard:
    """A piece of work. Its functions are importable ones and its arguments plain, so that it can travel.

    name: of its file, `/` for a folder. work: called with `arguments` on each of `world_size` ranks. join: called once,
    with what they returned, in rank order, and `arguments`; makes the content. key: of all that the content depends on:
    a file of another key is out of date. needs: names of shards whose files must be there before.
    """

    name: str
    work: Callable[..., Any]
    join: Callable[..., Content]
    arguments: tuple[Any, ...]
    key: str
    world_size: int = 1
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """A shard that was run: its content, or the reason why there is none."""

    shard: Shard
    content: Content | None
    reason: str = ""


class Executor(Protocol):
    """Runs shards none of which needs another, and gives back each as it is done, in any order."""

    def run(self, shards: Sequence[Shard]) -> Iterator[Done]: ...


class InProcess:
    """One after the other, in this process: shards of one rank."""

    def run(self, shards: Sequence[Shard]) -> Iterator[Done]:
        for shard in shards:
            if shard.world_size == 1:
                yield attempt(shard, lambda shard=shard: [shard.work(*shard.arguments)])  # type: ignore[misc]
            else:
                yield Done(shard, None, f"{shard.world_size} ranks are not this one process: run it on a pool of ranks")


@dataclass(frozen=True, slots=True)
class OnRanks:
    """One after the other, on a pool of ranks of this machine, each within `timeout` seconds."""

    pool: RankPool
    timeout: float = 600.0

    def run(self, shards: Sequence[Shard]) -> Iterator[Done]:
        for shard in shards:
            yield attempt(shard, lambda shard=shard: self._ranks(shard))  # type: ignore[misc]

    def _ranks(self, shard: Shard) -> list[Any]:
        return self.pool.run(shard.world_size, shard.work, *shard.arguments, timeout=self.timeout)


def attempt(shard: Shard, ranks: Callable[[], Sequence[Any]]) -> Done:
    """Join what `ranks` returns. Whatever is raised ends this shard alone, as the reason why it has no content."""
    try:
        return Done(shard, shard.join(ranks(), *shard.arguments))
    except Exception as error:
        return Done(shard, None, f"{type(error).__name__}: {error}")


class ShardsFailed(CampaignError):
    """At least one shard has no file; `reasons` by name."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__("\n".join(f"shard {name}: {reason}" for name, reason in reasons.items()))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a graph is. ran: how many shards were run now, rather than found."""

    done: int
    ran: int
    total: int


def run_graph(
    shards: Sequence[Shard],
    folder: Path,
    executor: Executor,
    report: Callable[[Progress], object] = lambda progress: None,
) -> None:
    """Run what has no whole file in `folder` yet, in waves of shards that need nothing more.

    What failed does not keep others from running. Raises ShardsFailed at the end if anything has; every attempt that
    did not simply succeed is a line of `attempts.jsonl`. Raises CampaignError for a graph that cannot be.
    """
    check_graph(shards)
    left = {shard.name: shard for shard in shards}
    reasons: dict[str, str] = {}
    ran = 0
    for shard in shards:
        if _is_whole(shard, folder):
            del left[shard.name]
    report(Progress(len(shards) - len(left), ran, len(shards)))
    while ready := [s for s in left.values() if s.name not in reasons and not any(need in left for need in s.needs)]:
        for done in executor.run(ready):
            if done.content is None:
                reasons[done.shard.name] = done.reason
                _note(folder, done.shard, "failed", done.reason)
                continue
            write_content(path_of(done.shard.name, folder), done.shard.key, done.content)
            del left[done.shard.name]
            ran += 1
            report(Progress(len(shards) - len(left), ran, len(shards)))
        for shard in ready:
            if shard.name in left:
                reasons.setdefault(shard.name, "the executor did not give it back")
    for name, shard in left.items():
        lacking = [need for need in shard.needs if need in left]
        reasons.setdefault(name, f"not run: it needs {', '.join(lacking)}")
    if reasons:
        raise ShardsFailed(reasons)


def path_of(name: str, folder: Path) -> Path:
    """Where a shard's file lies."""
    return folder / f"{name}.safetensors"


def check_graph(shards: Sequence[Shard]) -> None:
    """Raise CampaignError unless names are good, each is there once, and behind all that it needs."""
    seen: set[str] = set()
    for shard in shards:
        if _NAME.fullmatch(shard.name) is None:
            raise CampaignError(f"shard={shard.name!r} is not accepted: give words of letters, digits, '-', '.', '/'.")
        if shard.name in seen:
            raise CampaignError(f"shard={shard.name!r} is there twice.")
        for need in shard.needs:
            if need not in seen:
                raise CampaignError(f"shard={shard.name!r} needs {need!r}, which does not come before it.")
        seen.add(shard.name)


def _is_whole(shard: Shard, folder: Path) -> bool:
    path = path_of(shard.name, folder)
    if not path.exists():
        return False
    try:
        read_content(path, shard.key)
    except CampaignError as error:
        _note(folder, shard, "run again", str(error))
        return False
    return True


def _note(folder: Path, shard: Shard, outcome: str, reason: str) -> None:
    line = json.dumps({"shard": shard.name, "key": shard.key, "outcome": outcome, "reason": reason})
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ATTEMPTS).open("ab", buffering=0) as file:  # one write of a whole line
        file.write(line.encode() + b"\n")
