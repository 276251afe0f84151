"""The page of a real verification, read as a person reads it: by its text, and never by the program that made it."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oracle.evidence.reader import open_trace
from oracle.verdict.align import align
from oracle.verdict.matrix import judge_matrix, read_matrix
from suites.paged import CACHE, FOLDER, FRAMES, PROMPT, STEPS, TOPOLOGIES, Node, page_of, record_small, with_events
from suites.traced import Event

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

pytestmark = pytest.mark.cpu

EXPERTS = ("high", "low")


@pytest.fixture(scope="module")
def verified(ranks: RankPool, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_small(ranks, tiny(layout="dual"), tmp_path_factory.getbasetemp() / FOLDER)


@pytest.fixture(scope="module")
def page(verified: Path, tmp_path_factory: pytest.TempPathFactory) -> Node:
    return page_of(verified, tmp_path_factory.mktemp("page"))


def claims_on(page: Node) -> list[list[str]]:
    lines = page.one("table", class_="claims").one("tbody").all("tr")
    return [[*(cell.text for cell in line.elements[:4]), str(line.elements[4].children[0]).strip()] for line in lines]


def cells_on(page: Node) -> dict[str, list[str]]:
    lines = page.one("table", class_="matrix").one("tbody").all("tr")
    return {line.one("th").text: [cell.text for cell in line.all("td")] for line in lines}


def test_a_reader_finds_every_claim_with_the_verdict_and_the_sentence_that_verify_prints(
    verified: Path, page: Node
) -> None:
    rows = list(judge_matrix(read_matrix(verified), verified, {}))
    assert len(rows) == 1 + 2 + 2 * 2  # used engine, topology, forced and cached
    expected = [[r.topology, r.cache or "no cache", r.verdict.contract, "holds", r.sentence] for r in rows]
    assert claims_on(page) == expected
    assert page.one("h1").text == page.one("head").one("title").text == "7 of 7 claims hold"


def test_the_matrix_counts_what_each_expert_reused(verified: Path, page: Node) -> None:
    table = page.one("table", class_="matrix")
    assert [head.text for head in table.all("th", scope="colgroup")] == ["no cache", CACHE]
    assert [head.text for head in table.all("th", scope="col")][1:] == ["high noise", "low noise"] * 2
    seen = set()
    for topology, claims in zip(TOPOLOGIES, ("1 claim", "2 claims"), strict=True):
        counted: Counter[tuple[str, str]] = Counter()
        for file in (verified / topology / f"{CACHE}-cached").glob("*.jsonl"):
            events = map(json.loads, file.read_text().splitlines())
            counted.update((e["expert"], e["verdict"]) for e in events if e["kind"] == "decision")
        reused = [(counted[each, "reuse"], counted[each, "reuse"] + counted[each, "compute"]) for each in EXPERTS]
        assert cells_on(page)[topology] == [f"holds {claims}"] * 2 + [f"holds {a} of {b} reused" for a, b in reused]
        seen.update(reused)
    assert all(0 < some < calls for some, calls in seen)


def test_every_decision_is_in_the_page(verified: Path, page: Node) -> None:
    data = json.loads(page.one("script", id="decisions").raw)
    assert list(data["runs"]) == [f"run-{topology}-{CACHE}" for topology in TOPOLOGIES]
    for topology in TOPOLOGIES:
        cached, forced = (align(open_trace(verified / topology / f"{CACHE}-{part}")) for part in ("cached", "forced"))
        rows = [dict(zip(data["columns"], row, strict=True)) for row in data["runs"][f"run-{topology}-{CACHE}"]]
        assert len(rows) == len(cached.decisions)
        for row in rows:
            key = (0, int(row["step"]), row["branch"], int(row["stage"]))
            decision = cached.decisions[key]
            assert (row["verdict"], row["reason"], row["expert"]) == (
                decision.verdict,
                decision.reason,
                decision.expert,
            )
            assert row["rule in the twin"] == forced.decisions[key].shadow
            assert row["residual of"] == ", ".join(f"step {origin.step}" for origin in decision.origins)
            assert row["signal"] == ("" if decision.signal is None else f"{decision.signal:.4g}")
        assert page.one("details", data_run=f"run-{topology}-{CACHE}").one("summary").text == f"{len(rows)} decisions"


def test_the_hit_map_shows_each_call_and_what_the_rule_said_of_it_in_the_twin(verified: Path, page: Node) -> None:
    for topology, lanes in zip(TOPOLOGIES, (["cond", "uncond"], None), strict=True):
        cached, forced = (align(open_trace(verified / topology / f"{CACHE}-{part}")) for part in ("cached", "forced"))
        svg = page.one("article", id=f"run-{topology}-{CACHE}").one("svg", class_="plot")
        texts = [text.text for text in svg.all("text")]
        assert lanes is None or texts[2:4] == lanes
        assert texts[:2] == ["high noise", "low noise"]
        calls = {call.one("title").text.partition(":")[0]: call for call in svg.all("g")}
        assert len(calls) == len(cached.decisions) == STEPS * 2 * int(topology[2])
        for (_, step, branch, stage), decision in cached.decisions.items():
            call = calls[f"step {step}, {branch}, stage {stage}"]
            assert call.one("rect").attributes["class"] == {"compute": "computed", "reuse": "reused"}[decision.verdict]
            shadow = forced.decisions[0, step, branch, stage].shadow
            assert len(call.all("circle", class_="forced")) == (shadow == "reuse")


def test_the_page_has_everything_in_it(page: Node) -> None:
    for node in page.descendants():
        for name, value in node.attributes.items():
            if name in ("src", "href", "poster", "action", "data", "srcset"):
                assert value.startswith(("data:", "#")), f"<{node.tag} {name}={value[:80]}>"
    style = page.one("style").raw
    assert not re.search(r"url\(|@import", style)
    assert "://" not in page.raw
    policy = page.one("meta", http_equiv="Content-Security-Policy").attributes["content"]
    assert policy.startswith("default-src 'none'")


def test_whatever_is_pointed_at_is_there_once(page: Node) -> None:
    nodes = list(page.descendants())
    names = Counter(node.attributes["id"] for node in nodes if "id" in node.attributes)
    assert max(names.values()) == 1
    pointed = [node.attributes["aria-labelledby"] for node in nodes if "aria-labelledby" in node.attributes]
    pointed += [value[1:] for node in nodes if (value := node.attributes.get("href", "")).startswith("#")]
    assert len(pointed) > 10
    assert set(pointed) <= set(names)


def test_text_of_a_prompt_and_of_a_trace_stays_text(verified: Path, page: Node, tmp_path: Path) -> None:
    assert f"prompt {PROMPT}" in page.one("p", class_="asked").text
    assert len(page.all("script")) == 2

    def hostile(event: Event) -> Event:
        return {**event, "reason": "</script><b>&"} if event["kind"] == "decision" else event

    folder = with_events(verified, tmp_path / "traces", f"pp1cfg1/{CACHE}-cached", hostile)
    changed = page_of(folder, tmp_path)
    assert len(changed.all("script")) == 2
    data = json.loads(changed.one("script", id="decisions").raw)
    assert {row[5] for row in data["runs"][f"run-pp1cfg1-{CACHE}"]} == {"</script><b>&"}


def test_the_videos_are_the_files_that_the_run_left(verified: Path, page: Node) -> None:
    for topology in TOPOLOGIES:
        here = verified / topology
        files = {
            "native": here / "native" / "video.mp4",
            CACHE: here / f"{CACHE}-cached" / "video.mp4",
            "difference × 4": here / f"{CACHE}-cached" / "difference.mp4",
        }
        videos = page.one("article", id=f"run-{topology}-{CACHE}").all("video")
        assert [video.attributes["aria-label"] for video in videos] == list(files)
        for video, file in zip(videos, files.values(), strict=True):
            kind, _, data = video.attributes["src"].partition(",")
            assert kind == "data:video/mp4;base64"
            assert base64.b64decode(data) == file.read_bytes()


def test_the_difference_is_that_of_the_pixels_times_four(verified: Path) -> None:
    import av
    import numpy as np

    native, cached = (align(open_trace(verified / "pp2cfg1" / part)) for part in ("native", f"{CACHE}-cached"))
    (key,) = (key for key in native.ordered if key.block == "decode")
    pixels = [each.array(key, 1)[0] for each in (native, cached)]
    expected = np.minimum(4 * np.abs(pixels[1] - pixels[0]), 1).mean(-1)  # H.264 keeps brightness best
    with av.open(str(verified / "pp2cfg1" / f"{CACHE}-cached" / "difference.mp4")) as container:
        shown = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).mean(-1) / 255
    assert shown.shape == expected.shape == (FRAMES, 32, 32)
    bright = expected > 0.05
    assert bright.sum() > 50
    assert shown[bright].mean() / expected[bright].mean() == pytest.approx(1, abs=0.12)
