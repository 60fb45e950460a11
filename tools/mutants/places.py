"""The mutants of a source file: where a mutation is possible, and a random sample of them."""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from tools.mutants.operators import Span, operators

_MESSAGE_CALLS = {"log", "info", "warning", "phase", "progress", "echo"}
"""Names of functions that show a message."""

_NO_EFFECT_DECORATORS = {"abstractmethod", "cache", "lru_cache", "overload", "runtime_checkable"}
"""Decorators whose absence changes speed or static types only."""

_NO_EFFECT_ARGUMENTS = {"frozen", "slots", "encoding", "strict"}
"""Keyword arguments whose absence changes nothing in correct code on Linux."""


@dataclass(frozen=True)
class Mutant:
    """One changed place of a source file.

    Attributes:
        module: Path of the file relative to the project root.
        operator: Name of the mutation operator.
        occurrence: Index of the place among all places of this operator in the file.
        span: ((line, column), (line, column)) of the changed code; lines count from 1.
    """

    module: str
    operator: str
    occurrence: int
    span: Span

    def mutated(self, source: str) -> str:
        """Return the file's text with this change."""
        changed = mutate_code(source, operators()[self.operator], self.occurrence)
        assert changed is not None, f"{self} does not exist"
        return changed


def lines_of_change(before: str, after: str) -> tuple[str, str]:
    """Return the changed lines before and after, without indentation and joined by one space."""
    old, new = before.splitlines(), after.splitlines()
    # The difference of complete files takes a hundred times as long.
    first = next(
        (n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    while len(old) > first and len(new) > first and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    delta = [line for line in difflib.ndiff(old[first:], new[first:]) if line[:2] in ("- ", "+ ")]
    removed = " ".join(line[2:].strip() for line in delta if line.startswith("-"))
    added = " ".join(line[2:].strip() for line in delta if line.startswith("+"))
    return removed, added


def function_at(source: str, line: int) -> str:
    """Return the name of the innermost function or class that contains a line, or "<module>"."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    starts = [(min([node.lineno, *(each.lineno for each in node.decorator_list)]), node) for node in nodes]
    around = [(start, node.name) for start, node in starts if start <= line <= (node.end_lineno or start)]
    return max(around, default=(0, "<module>"))[1]


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Return all mutants of a source file, without those of types, messages and speed."""
    lines = source.splitlines()
    excluded = list(_excluded_spans(source))
    nodes = list(ast_nodes(get_ast(source)))
    found = list[Mutant]()
    for name, operator in operators().items():
        places = ((node, span) for node in nodes for span in operator.mutation_positions(node))
        for occurrence, (node, span) in enumerate(places):
            is_excluded = any(first <= span[0] and span[1] <= last for first, last in excluded)
            # Cosmic Ray cannot replace a dotted name in a tuple of exceptions.
            is_dotted = name == "ExceptionReplacer" and not _text(span, lines).isidentifier()
            if not (is_excluded or is_dotted or _is_unpacking(node)):
                found.append(Mutant(module, name, occurrence, span))
    return found


def sample(mutants: Iterable[Mutant], size: int, seed: int) -> list[Mutant]:
    """Return mutants drawn at random, at most one per place.

    A place is drawn first and then one of its mutations, because the number of operators that apply to a
    place says nothing about how often it is wrong.
    """
    by_place: dict[tuple[str, Span], list[Mutant]] = {}
    for mutant in mutants:
        by_place.setdefault((mutant.module, mutant.span), []).append(mutant)
    generator = random.Random(seed)
    places = generator.sample(sorted(by_place), min(size, len(by_place)))
    return [generator.choice(by_place[place]) for place in places]


def _excluded_spans(source: str) -> Iterator[Span]:
    """Yield the spans of types, messages, paths joined with a text, and what has no effect."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield _span(node.annotation, lines)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            decorators = [each for each in node.decorator_list if _called_name(each) in _NO_EFFECT_DECORATORS]
            yield from (((each.lineno, 0), (each.lineno + 1, 0)) for each in decorators)
            if isinstance(node, ast.FunctionDef) and node.returns:
                yield _span(node.returns, lines)
        elif isinstance(node, ast.keyword | ast.expr | ast.stmt) and _has_no_effect(node):
            yield _span(node, lines)
        elif isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.NamedExpr):
            yield _span(node.test, lines)  # "not name := value" is a syntax error


def _is_unpacking(node: Any) -> bool:
    """Return whether a node of Cosmic Ray's tree is a star of a signature or of a dictionary's unpacking."""
    parent = getattr(node, "parent", None)
    return (
        node in ("*", "**")
        and parent is not None
        and parent.type in ("parameters", "param", "dictorsetmaker")
    )


def _has_no_effect(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg in _NO_EFFECT_ARGUMENTS
    is_for_type_checkers = isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
    return is_for_type_checkers or _is_message(node) or _is_path(node)


def _is_message(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = _called_name(node)
    return name in _MESSAGE_CALLS or name.endswith("Error")


def _is_path(node: ast.AST) -> bool:
    """Return whether `node` joins a path and a text; any other operator raises a TypeError there."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and (isinstance(node.right, ast.JoinedStr) or isinstance(getattr(node.right, "value", None), str))
    )


def _called_name(node: ast.expr) -> str:
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(span: Span, lines: list[str]) -> str:
    (line, start), (_, end) = span
    return lines[line - 1][start:end]


def _span(node: ast.expr | ast.stmt | ast.keyword, lines: list[str]) -> Span:
    """Return a node's position with columns in characters; `ast` counts bytes."""
    last_line, last_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    ends = ((node.lineno, node.col_offset), (last_line, last_column))
    first, last = ((line, len(lines[line - 1].encode()[:column].decode())) for line, column in ends)
    return first, last
