"""Holds an XML file to `junit.xsd`, as far as that schema goes: elements, what may be in them, attributes, their types.

The standard library has no validator. This one reads the few constructs that the schema uses, and refuses any other, so
that none is passed over in silence; the order in which children come is left free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

XS = "{http://www.w3.org/2001/XMLSchema}"
SCHEMA = Path(__file__).with_name("junit.xsd")
TYPES = {
    "xs:string": re.compile(r".*", re.DOTALL),
    "xs:decimal": re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)"),
    "xs:nonNegativeInteger": re.compile(r"\d+"),
    "xs:dateTime": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?"),
}
KNOWN = {"schema", "complexType", "element", "attribute", "choice", "sequence"}


def schema_problems(file: Path, strict: bool = False) -> list[str]:
    """What is wrong with the file. strict: as Jenkins' xUnit plugin reads, without what is marked as beyond it."""
    schema = ElementTree.parse(SCHEMA).getroot()
    unknown = {each.tag.removeprefix(XS) for each in schema.iter()} - KNOWN
    assert not unknown, f"{SCHEMA.name} has {unknown}, which this reader does not know"
    if strict:
        for parent in list(schema.iter()):
            for child in [each for each in parent if each.get("id", "").startswith("beyond")]:
                parent.remove(child)
    types = {each.get("name", ""): each for each in schema.findall(f"{XS}complexType")}
    elements = {each.get("name", ""): each for each in schema.findall(f"{XS}element")}
    root = ElementTree.parse(file).getroot()
    if root.tag not in elements:
        return [f"{file.name}: <{root.tag}> is not known"]
    return [f"{file.name}: {says}" for says in dict.fromkeys(_check(root, elements, types))]


def _check(node: Element, elements: dict[str, Element], types: dict[str, Element]) -> Iterator[str]:
    declared = elements[node.tag]
    named = declared.get("type")
    content = types[named] if named in types else declared.find(f"{XS}complexType")
    parts = [] if content is None else list(content.iter(f"{XS}element"))
    attributes = [] if content is None else content.findall(f"{XS}attribute")
    known = {each.get("name", ""): each for each in attributes}
    for name, value in node.attrib.items():
        if name not in known:
            yield f"<{node.tag}> has no attribute {name!r}"
        elif not TYPES[known[name].get("type", "")].fullmatch(value):
            yield f"<{node.tag} {name}={value!r}> is no {known[name].get('type')}"
    for each in attributes:
        if each.get("use") == "required" and each.get("name") not in node.attrib:
            yield f"<{node.tag}> lacks {each.get('name')}"
    texts = content is None or content.get("mixed") == "true"
    if not texts and ((node.text or "").strip() or any((child.tail or "").strip() for child in node)):
        yield f"<{node.tag}> has text"
    allowed = {part.get("ref", "") for part in parts}
    single = {part.get("ref", "") for part in parts} if content is not None and content.find(f"{XS}sequence") else set()
    for child in node:
        if child.tag not in allowed:
            yield f"<{child.tag}> is not allowed in <{node.tag}>"
            continue
        if child.tag in single and len(node.findall(child.tag)) > 1:
            yield f"<{node.tag}> has several <{child.tag}>"
        yield from _check(child, elements, types)


def count_problems(file: Path) -> list[str]:
    """Where the counts of a suite, or of the file, are not those of its cases."""
    root = ElementTree.parse(file).getroot()
    problems = []
    for node in (root, *root.iter("testsuite")):
        cases = list(node.iter("testcase"))
        true = {"tests": len(cases)}
        for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            true[count] = sum(case.find(tag) is not None for case in cases)
        said = {name: int(node.get(name, "-1")) for name in true if name in node.attrib or node.tag == "testsuite"}
        if said != {name: true[name] for name in said}:
            problems.append(f"{file.name}: <{node.tag}> says {said}, and has {true}")
    return problems
