"""What the fixtures of the pytest plugin do: record runs, and assert what must hold between them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oracle.evidence.emit import LEVEL, VARIABLE
from oracle.evidence.reader import open_trace
from oracle.evidence.trace import MANIFEST, events_file
from oracle.plugin import NotEquivalent, NotEquivalentWarning
from oracle.report import claim as claims
from oracle.report.claim import Claim
from oracle.report.stale import checked_out, stale
from oracle.report.waivers import Waiver, applies, ended
from oracle.verdict.twin import NATIVE, cached_folder, forced_folder

if TYPE_CHECKING:
    from wanref import Request

CACHE = "cache"
NAMES: pytest.StashKey[Counter[str]] = pytest.StashKey()


@dataclass(frozen=True, slots=True)
class Twins:
    """Traces of one request: `native` without the cache, `forced` with its every decision overridden to compute, and
    `cached`."""

    folder: Path
    cache: str

    @property
    def native(self) -> Path:
        return self.folder / NATIVE

    @property
    def forced(self) -> Path:
        return self.folder / forced_folder(self.cache)

    @property
    def cached(self) -> Path:
        return self.folder / cached_folder(self.cache)


Record = Callable[..., Twins]


class Oracle:
    """One test's. Every assertion leaves its facts as properties of the test, which JUnit files carry."""

    def __init__(
        self, item: pytest.Item, folder: Path, level: str | None, shared: bool, warn: bool, waivers: Sequence[Waiver]
    ) -> None:
        self.folder = folder
        self.failed = False
        self._item = item
        self._level = level
        self._warn = warn
        self._waivers = waivers
        self._recorded: set[str] = set()
        self._claims = 0
        self._rank = int(os.environ.get("RANK", 0)) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None
        self._shared = shared
        _keep_apart(item)
        if self._rank is not None:
            self._say("oracle.rank", str(self._rank))

    @contextmanager
    def recording(self, name: str) -> Iterator[Path]:
        """What runs inside, and the processes that it starts, are recorded through `oracle.evidence.emit`.

        Gives the folder of the trace. Raises ValueError for a name that this test has used, and under torchrun for
        recordings that the ranks would not share.
        """
        folder = self._new(name)
        before = {variable: os.environ.get(variable) for variable in (VARIABLE, LEVEL)}
        os.environ[VARIABLE] = str(folder)
        if self._level is not None:
            os.environ[LEVEL] = self._level
        try:
            yield folder
        finally:
            for variable, value in before.items():
                if value is None:
                    os.environ.pop(variable, None)
                else:
                    os.environ[variable] = value

    def record(self, run: Any, request: Request | None = None, cache: str | None = None) -> Twins:
        """The fixture `twins`. `run(kind)` is called for `native`, `forced` and `cached`, and recorded as `recording`
        does; or `run` is an engine of wanref, with a request and a cache (`METHOD:option=value,...`)."""
        if request is None and cache is None:
            twins = Twins(self.folder, CACHE)
            for kind, folder in (("native", twins.native), ("forced", twins.forced), ("cached", twins.cached)):
                with self.recording(folder.name):
                    run(kind)
            return twins
        if request is None or cache is None:
            raise ValueError("twins(engine, request, cache): request and cache go together.")
        from oracle.verdict.twin import record_triplets
        from wanref.caching.spec import parse_cache

        spec = parse_cache(cache)
        folder = self._new(spec.method)
        level: Any = self._level or "stats"
        record_triplets(run, request, {CACHE: spec}, folder, level)
        return Twins(folder, CACHE)

    def assert_equivalent(
        self, reference: Any, candidate: Any, contract: str = "rerun", requests: tuple[int, int] | None = None
    ) -> None:
        """The candidate keeps the contract with the reference. Both are traces (folders, or `Trace`), arrays (NumPy's,
        or torch tensors on any device; several by name or in a sequence), or evidence with a `.trace` and an `.output`.

        `requests` takes one request of the one trace and one of the other. Raises NotEquivalent, an AssertionError.
        """
        __tracebackhide__ = True
        self._settle(claims.claim_equivalent(reference, candidate, contract, requests))

    def assert_twins(self, twins: Twins) -> None:
        """The forced run is the native one, bitwise, and the cached run decided and reused as it says."""
        __tracebackhide__ = True
        for claim in claims.claim_twins(twins.folder, twins.cache):
            self._settle(claim)

    def assert_bounded(self, precise: Any, base: Any, candidate: Any) -> None:
        """T1, for bf16 and fp16: outputs of one module, (..., tokens, channels), in higher precision, of the base, and
        of the candidate, all for the same inputs."""
        __tracebackhide__ = True
        self._settle(claims.claim_bounded(precise, base, candidate))

    def assert_within_noise(self, base: Sequence[Any], head: Sequence[Any], locked: Any = None) -> None:
        """For engines that do not repeat bitwise: traces of at least 5 runs of the base and 2 of the head, at level
        tensor; `locked` is a trace of the schedule that all were to replay."""
        __tracebackhide__ = True
        self._settle(claims.claim_within_noise(base, head, locked))

    def assert_schedule(self, log: str, trace: Path | str, request: int = 0) -> None:
        """The caches of Cache-DiT that an engine logged fit the schedule of the request that it ran."""
        __tracebackhide__ = True
        self._settle(claims.claim_schedule(log, trace, request))

    def _settle(self, claim: Claim) -> None:
        __tracebackhide__ = True
        self._claims += 1
        prefix = "oracle." if self._claims == 1 else f"oracle.{self._claims}."
        said = {"contract": claim.contract, "verdict": "holds" if claim.holds else "fails", **claim.facts}
        old = self._stale(claim)
        for name, value in {**said, **({"stale": old} if old else {})}.items():
            self._say(prefix + name, value)
        if claim.holds:
            return
        self.failed = True
        test, today = self._item.nodeid, date.today()
        if (waiver := applies(self._waivers, test, claim.sentence, today)) is not None:
            self._say("oracle.waived", waiver.label)
            # Not pytest.xfail(): under --runxfail that does nothing, and the test would go on and pass.
            raise pytest.xfail.Exception(f"{waiver.label} ({claim.sentence})")
        over = [f"{each.label} - it has ended" for each in ended(self._waivers, test, claim.sentence, today)]
        message = "\n".join([claim.message, *([f"stale      {old}"] if old else []), *over])
        if not self._warn:
            raise NotEquivalent(claim.sentence, message)
        self._say("oracle.warning", claim.sentence)
        with warnings.catch_warnings():
            # A project that makes errors of warnings has not asked for this one.
            warnings.simplefilter("always", NotEquivalentWarning)
            warnings.warn(NotEquivalentWarning(message), stacklevel=3)

    def _say(self, name: str, value: str) -> None:
        self._item.user_properties.append((name, value))

    def _stale(self, claim: Claim) -> str | None:
        """Of evidence that was recorded before this test: whether it is of the tree that is checked out."""
        for name, folder in claim.traces.items():
            if folder.is_relative_to(self.folder) or not (folder / MANIFEST).is_file():
                continue
            subject = claims.subject_of(open_trace(folder))
            old = stale(subject.revision, checked_out(subject.name, self._item.config.rootpath))
            if old is not None:
                return f"the {name} was {old}"
        return None

    def _new(self, name: str) -> Path:
        """A folder without a trace. An earlier run's is removed, but for what other ranks may be writing by now."""
        if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
            raise ValueError(f"recording={name!r} is not accepted: give a name of letters, digits, '.', '-' and '_'.")
        if name in self._recorded:
            raise ValueError(f"recording={name!r} is not accepted: this test has recorded it already.")
        self._recorded.add(name)
        folder = self.folder / name
        if self._rank is not None:
            if not self._shared:
                raise ValueError(f"recording={name!r}: ranks record into one folder: pass --oracle-traces DIR.")
            if (folder / events_file(self._rank)).exists():
                raise ValueError(f"recording={name!r}: {folder} has a trace: pass a new folder as --oracle-traces.")
        elif folder.exists():
            if not (folder / MANIFEST).is_file():
                raise ValueError(f"recording={name!r} is not accepted: {folder} is there, and is no trace.")
            shutil.rmtree(folder)
        return folder


def folder_of(item: pytest.Item) -> str:
    """A folder for a test: its name, or its whole id where several tests of the session have the name."""
    if NAMES not in item.session.stash:
        item.session.stash[NAMES] = Counter(each.name for each in item.session.items)
    text = item.name if item.session.stash[NAMES][item.name] == 1 else item.nodeid.replace("::", ".").replace("/", ".")
    safe = re.sub(r"[^\w.=,+\[\]-]", "_", text)[:100]
    return safe if safe == text else f"{safe}-{hashlib.sha256(item.nodeid.encode()).hexdigest()[:8]}"


def _keep_apart(item: pytest.Item) -> None:
    """Where a test is run again, what its earlier attempts left is theirs."""
    earlier = [name for name, _ in item.user_properties if name.startswith("oracle.")]
    if earlier:
        attempts = [int(match[1]) for name in earlier if (match := re.match(r"oracle\.attempt(\d+)\.", name))]
        mark = f"oracle.attempt{max(attempts, default=0) + 1}."
        item.user_properties[:] = [
            (name if not name.startswith("oracle.") or "oracle.attempt" in name else mark + name[7:], value)
            for name, value in item.user_properties
        ]
