"""What tests of the page share: a small verification, and a reader of HTML that takes nothing for granted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

from oracle.evidence.reader import open_trace
from oracle.report.page import write_page
from oracle.verdict.matrix import Matrix, record_matrix
from suites.support import defaults
from suites.traced import ASKED, Event, edited
from wanref.caching.spec import parse_cache

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

FOLDER = "verified"
CACHE = "teacache"
TOPOLOGIES = ("pp1cfg1", "pp2cfg1")
STEPS, FRAMES = 6, 9
PROMPT = "a red <script>alert('square')</script> & 'dots'"
VOID = {"meta", "link", "input", "br", "img"}


@cache
def record_small(ranks: RankPool, checkpoint: Path, folder: Path) -> Path:
    """Two topologies under one cache, both experts, with every tensor; returns the folder. Once a session."""
    asked = Matrix(
        checkpoint=str(checkpoint),
        request=replace(ASKED, prompt=PROMPT, steps=STEPS, frames=FRAMES),
        topologies=TOPOLOGIES,
        caches={
            CACHE: parse_cache(
                "teacache:coefficients=1/0,coefficients_low=1/0,dialect=vllm-omni,signal=modulated_input,threshold=0.25"
            )
        },
        defaults=defaults(),
        level="tensor",
    )
    failed = record_matrix(asked, folder, ranks, lambda topology: None)
    assert failed == {}
    return folder


@dataclass(slots=True)
class Node:
    """An element. Its text is that of all that is in it, with white space as a browser would show it."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    def all(self, tag: str, **attributes: str | None) -> list[Node]:
        """Descendants of that tag and these attributes (`data_run` for data-run, `class_` for one class of several)."""
        return [node for node in self.descendants() if node.tag == tag and node.has(attributes)]

    def has(self, attributes: dict[str, str | None]) -> bool:
        for name, value in attributes.items():
            found = self.attributes.get(name.rstrip("_").replace("_", "-"))
            wanted = found is not None and (value in found.split() if name == "class_" else value in (None, found))
            if not wanted:
                return False
        return True

    def one(self, tag: str, **attributes: str | None) -> Node:
        found = self.all(tag, **attributes)
        assert len(found) == 1, f"{len(found)} of {tag} {attributes}"
        return found[0]

    def descendants(self) -> Iterator[Node]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child.descendants()

    @property
    def elements(self) -> list[Node]:
        return [child for child in self.children if isinstance(child, Node)]

    @property
    def raw(self) -> str:
        return "".join(child if isinstance(child, str) else child.raw for child in self.children)

    @property
    def text(self) -> str:
        return " ".join(self.raw.split())


class PageReader(HTMLParser):
    """Builds the tree. Raises AssertionError for an element that is not closed, or closed by another's end tag."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Node("document")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = self.add(tag, attrs)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert any(node.tag == "svg" for node in self.open), f"{self.get_starttag_text()}: HTML knows no such end"
        self.add(tag, attrs)

    def add(self, tag: str, attrs: list[tuple[str, str | None]]) -> Node:
        node = Node(tag, {name: value or "" for name, value in attrs})
        assert len(node.attributes) == len(attrs), f"an attribute comes twice in {self.get_starttag_text()}"
        self.open[-1].children.append(node)
        return node

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open[-1].tag, f"</{tag}> ends <{self.open[-1].tag}>, line {self.getpos()[0]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read_page(text: str) -> Node:
    reader = PageReader()
    reader.feed(text)
    reader.close()
    assert [node.tag for node in reader.open] == ["document"], f"never closed: {reader.open[-1].tag}"
    return reader.open[0]


def page_of(verified: Path, folder: Path) -> Node:
    """The page of these traces, written into a folder and read."""
    write_page(verified, folder / "report.html")
    return read_page((folder / "report.html").read_text("utf-8"))


def with_events(verified: Path, folder: Path, part: str, edit: Callable[[Event], Event | None], rank: int = 0) -> Path:
    """A copy of a verification in which each event of a rank of one trace has gone through `edit`."""
    shutil.copytree(verified, folder)
    shutil.rmtree(folder / part)
    edited(open_trace(verified / part), folder / part, edit, rank)
    return folder
