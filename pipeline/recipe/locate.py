"""A YAML document as plain data, with the line of every key and list item, and every flaw of its YAML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from pipeline.recipe.yaml_advice import line_and_fix

KeyPath = tuple[str | int, ...]
"""From the top: keys and list indices, such as ("datasets", 0, "path")."""

_PLAIN = ("bool", "int", "float", "null", "str")
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Flaw:
    """Something wrong with the document at `path`, in `line` (from 1)."""

    path: KeyPath
    line: int
    what: str
    fix: str


@dataclass
class Document:
    """A parsed YAML document.

    Attributes:
        data: Mappings, lists, text, numbers, booleans and None; None for an empty or unreadable document.
        lines: The line, from 1, in which each key or list item stands; `()` is where the first one does.
        flaws: What is wrong with the document as YAML, in the order of its lines.
    """

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    flaws: list[Flaw] = field(default_factory=list)

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest section above it that is in the document."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def parse(text: str) -> Document:
    """`text` as a document; never raises for what a file can hold."""
    document = Document()
    try:
        nodes: list[Node | None] = list(_yaml().compose_all(text))
    except YAMLError as error:
        document.flaws.append(_syntax_flaw(error, text))
        return document
    except RecursionError:
        document.flaws.append(
            Flaw((), 1, "lists or mappings are nested too deeply", "use the recipe's sections")
        )
        return document
    if len(nodes) > 1 and nodes[1] is not None:
        line = nodes[1].start_mark.line + 1
        document.flaws.append(Flaw((), line, "a second YAML document starts here", "write one recipe a file"))
    if nodes and nodes[0] is not None:
        document.data = _Reader(document).value(nodes[0], ())
    return document


def dotted(path: KeyPath) -> str:
    """`path` as a person writes it: datasets[0].captions.from."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)


@cache
def _scalars() -> SafeConstructor:
    """What turns scalars into values; it keeps nothing of a document, and is slow to make."""
    return SafeConstructor(loader=_yaml())


def _syntax_flaw(error: YAMLError, text: str) -> Flaw:
    """The flaw of a document that cannot be parsed; nothing after it can be looked at."""
    line, problem, fix = 1, str(error), "correct this line first: what follows it cannot be read before"
    if isinstance(error, MarkedYAMLError):
        line, fix = line_and_fix(error, text)
        problem = ", ".join(part for part in (error.context, error.problem) if part)
    elif (position := getattr(error, "position", None)) is not None:
        line = text.count("\n", 0, position) + 1
        problem = f"character {ord(text[position]):#x} cannot stand in YAML: {getattr(error, 'reason', '')}"
    return Flaw((), line, f"not valid YAML: {' '.join(problem.split())}", fix)


class _Reader:
    """Turns composed nodes into plain data, filling in a document's lines and flaws."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._open: set[int] = set()

    def value(self, node: Node, path: KeyPath) -> Any:
        """The plain data of `node`, which stands at `path`."""
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._flaw(path, node, "an alias leads back into itself", "write the values out")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
        finally:
            self._open.discard(id(node))
        raise AssertionError(f"ruamel.yaml composed an unknown node {type(node)}")

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in self._pairs(node):
            if not isinstance(key_node, ScalarNode):
                self._flaw(path, key_node, "a key is a list or a mapping", "use text as the key")
                continue
            try:
                key = _text(str(key_node.value))
            except ValueError as error:
                self._flaw(
                    path, key_node, f"{_quoted(str(key_node.value))} is no key: {error}", "use letters"
                )
                continue
            here = (*path, key)
            if key in values:
                first = self._document.lines[here]
                self._flaw(here, key_node, f"{key} is given twice, first in line {first}", "keep one of them")
                continue
            self._document.lines[here] = key_node.start_mark.line + 1
            values[key] = self.value(value_node, here)
        return values

    def _pairs(self, node: MappingNode) -> Iterator[tuple[Node, Node]]:
        """The pairs of `node`, and after them those that `<<` merges in and `node` does not set itself."""
        merged: list[Node] = []
        own: set[str] = set()
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                merged += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
            else:
                own.add(str(key_node.value))
                yield key_node, value_node
        for source in merged:
            if not isinstance(source, MappingNode):
                self._flaw((), source, "<< merges something that is no mapping", "name an anchored mapping")
            elif id(source) in self._open:
                self._flaw((), source, "<< leads back into itself", "write the values out")
            else:
                for key_node, value_node in source.value:
                    if str(key_node.value) not in own:
                        own.add(str(key_node.value))
                        yield key_node, value_node

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        kind = str(node.tag).removeprefix(_TAG)
        if kind == "timestamp" and node.style is None:
            return str(node.value)
        if kind not in _PLAIN:
            self._flaw(path, node, f"the tag {node.tag} is not known", "remove it")
            return None
        try:
            value = _scalars().construct_non_recursive_object(node)
            return value if not isinstance(value, str) else _text(value)
        except (YAMLError, ValueError) as error:
            self._flaw(path, node, f"{_quoted(str(node.value))} is no value: {error}", "write a plain value")
            return None

    def _flaw(self, path: KeyPath, node: Node, what: str, fix: str) -> None:
        self._document.flaws.append(Flaw(path, node.start_mark.line + 1, what, fix))


def _text(text: str) -> str:
    """`text`; ValueError where an escape made half a character of it, which no file can hold."""
    text.encode("utf-8")
    return text


def _quoted(text: str) -> str:
    """The beginning of `text`, escaped where a terminal cannot show it."""
    return text[:40] if text[:40].isprintable() else repr(text[:40])
