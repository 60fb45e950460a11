"""A YAML document as plain data, with the line of every key and all of its YAML flaws."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top, such as ("datasets", 0, "path")."""

MAX_CHARACTERS = 1_000_000
"""Maximum length of a document."""

MAX_VALUES = 10_000
"""Maximum number of values in a document."""

MAX_DEPTH = 100
"""Maximum number of lists and mappings around a value."""

# Python refuses to write larger integers as decimal text, so no message could show them.
_MAX_BITS = 10_000
"""Maximum size of an integer."""

_PLAIN = ("bool", "int", "float", "null", "str")
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Flaw:
    """A flaw of the YAML itself, at `path` in `line` (counted from 1)."""

    path: KeyPath
    line: int
    what: str
    fix: str


@dataclass
class Document:
    """A parsed YAML document.

    Attributes:
        data: Mappings, lists, strings, numbers, booleans and None; None for an empty or unreadable document.
        lines: Line of each key and list item, counted from 1; `()` has the line of the first one.
        flaws: All flaws of the YAML, in line order.
    """

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    flaws: list[Flaw] = field(default_factory=list)

    def line(self, path: KeyPath) -> int:
        """Return the line of `path`, or of the nearest enclosing section in the document."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def parse(text: str) -> Document:
    """Parse `text`; flaws are collected, never raised."""
    document = Document()
    if len(text) > MAX_CHARACTERS:
        what = f"the document must have at most {MAX_CHARACTERS:,} characters, got {len(text):,}"
        document.flaws.append(Flaw((), 1, what, "use a smaller file"))
        return document

    # Nodes only: ruamel's own loaders stop at the first duplicate key or unknown tag, and a user should see
    # all flaws at once.
    try:
        nodes: list[Node | None] = list(_yaml().compose_all(text))
    except YAMLError as error:
        document.flaws.append(_syntax_flaw(error, text))
        return document
    except RecursionError:
        document.flaws.append(_too_deep(1))
        return document

    if len(nodes) > 1 and nodes[1] is not None:
        line = nodes[1].start_mark.line + 1
        document.flaws.append(
            Flaw((), line, "a second YAML document starts here", "write one document per file")
        )
    if nodes and nodes[0] is not None:
        try:
            document.data = _Reader(document).value(nodes[0], ())
        except _LimitExceededError as error:
            document.flaws.append(error.flaw)
    return document


def dotted(path: KeyPath) -> str:
    """Return `path` as text, such as datasets[0].captions.from."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


class _LimitExceededError(Exception):
    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw.what)
        self.flaw = flaw


def _too_deep(line: int) -> Flaw:
    return Flaw((), line, "lists or mappings are nested too deeply", "use the documented sections")


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)


# The constructor is slow to create and keeps no state of a document.
@cache
def _scalar_constructor() -> SafeConstructor:
    return SafeConstructor(loader=_yaml())


class _Reader:
    """Converts YAML nodes into dicts, lists and scalars, and records their line numbers and any flaws."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._num_values = 0

    def value(self, node: Node, path: KeyPath) -> Any:
        self._count(node)
        if len(path) > MAX_DEPTH:
            raise _LimitExceededError(_too_deep(node.start_mark.line + 1))
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        # Without anchors, aliases and merges, a key has one value, in one line.
        if node.anchor is not None:
            # ruamel.yaml composes an alias as the node of its anchor, perhaps within that node itself.
            line = self._document.lines[path]
            what = f"anchors and aliases of YAML are not supported, got &{node.anchor} or *{node.anchor}"
            fix = "write the values in each place; if it is text, put it in quotes"
            self._document.flaws.append(Flaw(path, line, what, fix))
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        raise AssertionError(f"ruamel.yaml composed an unknown node {type(node)}")

    def _count(self, node: Node) -> None:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            what = f"the document must have at most {MAX_VALUES:,} values"
            raise _LimitExceededError(Flaw((), node.start_mark.line + 1, what, "use a smaller file"))

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                self._flaw(
                    path, key_node, "merging with << is not supported", "write the keys that it merges"
                )
                continue
            if not isinstance(key_node, ScalarNode):
                self._flaw(
                    path, key_node, "a key must be text, got a list or a mapping", "use text as the key"
                )
                continue
            try:
                key = _encodable(str(key_node.value))
            except ValueError as error:
                what = f"a key must be valid text, got {_excerpt(str(key_node.value))}: {error}"
                self._flaw(path, key_node, what, "use letters")
                continue

            key_path = (*path, key)
            if key in values:
                what = f"duplicate key {key}, first used in line {self._document.lines[key_path]}"
                self._flaw(key_path, key_node, what, "keep one of them")
                continue
            self._document.lines[key_path] = key_node.start_mark.line + 1
            values[key] = self.value(value_node, key_path)
        return values

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        kind = str(node.tag).removeprefix(_TAG)
        # Dates appear only in captions and names, where they are text.
        if kind == "timestamp" and node.style is None:
            return str(node.value)
        if kind not in _PLAIN:
            self._flaw(path, node, f"unknown YAML tag {node.tag}", "remove the tag")
            return None

        try:
            value = _scalar_constructor().construct_non_recursive_object(node)
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                raise ValueError(f"an integer must have at most {_MAX_BITS:,} bits")
            return value if not isinstance(value, str) else _encodable(value)
        except (YAMLError, ValueError) as error:
            what = f"invalid value {_excerpt(str(node.value))}: {error}"
            self._flaw(path, node, what, "write a plain value")
            return None

    def _flaw(self, path: KeyPath, node: Node, what: str, fix: str) -> None:
        self._document.flaws.append(Flaw(path, node.start_mark.line + 1, what, fix))


def _encodable(text: str) -> str:
    # Half a surrogate pair raises ValueError: no file name can contain it.
    text.encode("utf-8")
    return text


def _excerpt(text: str) -> str:
    return text[:40] if text[:40].isprintable() else repr(text[:40])


_FIRST_LINE_ONLY = "correct this line first; nothing after it can be read"
_QUOTE = "if the value is text, put it in quotes: its first character has a special meaning in YAML"

_ADVICE = (
    ("found character '\\t'", False, "indent with spaces: YAML does not allow tabs here"),
    ("scanning a quoted scalar", True, "close the quote that opens here"),
    ("double-quoted", False, "write / for \\, or use single quotes: in double quotes \\ starts an escape"),
    ("simple key", True, "write a colon and a space after the key: key: value"),
    ("cannot start any token", False, _QUOTE),
    ("undefined alias", False, _QUOTE),
    (
        "mapping values are not allowed",
        False,
        "put text that contains a colon and a space in quotes, and indent "
        "a key like the other keys of its section",
    ),
    (
        "<block end>",
        False,
        "indent it like the other keys of its section, and put text in one pair of quotes",
    ),
)
"""Text in the parser's message, whether the flaw is on the line where the construct begins, and the fix."""


def _syntax_flaw(error: YAMLError, text: str) -> Flaw:
    line, problem, fix = 1, str(error), _FIRST_LINE_ONLY
    if isinstance(error, MarkedYAMLError):
        line, fix = _line_and_fix(error)
        problem = ", ".join(part for part in (error.context, error.problem) if part)
    elif (position := getattr(error, "position", None)) is not None:
        line = text.count("\n", 0, position) + 1
        reason = getattr(error, "reason", "")
        problem = f"character {ord(text[position]):#x} is not allowed in YAML: {reason}"
    return Flaw((), line, f"not valid YAML: {' '.join(problem.split())}", fix)


def _line_and_fix(error: MarkedYAMLError) -> tuple[int, str]:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    start_line = error.context_mark.line + 1 if error.context_mark is not None else line
    problem, context = error.problem or "", error.context or ""

    if "parsing a flow" in context:
        bracket = "}" if "mapping" in context else "]"
        if start_line != line or "<stream end>" in problem:
            return start_line, f"close the bracket that opens here with {bracket}"
        return line, f"put text that contains : or {bracket} in quotes, and separate items with commas"

    for phrase, at_start, fix in _ADVICE:
        if phrase in problem or phrase in context:
            return start_line if at_start else line, fix
    return line, _FIRST_LINE_ONLY
