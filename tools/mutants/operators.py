"""Mutation operators: those of Cosmic Ray that resemble a slip of the hand, and two of this project."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword

Span = tuple[tuple[int, int], tuple[int, int]]

_COMPARISONS = """
Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_Gt LtE_GtE Gt_Lt GtE_LtE
"""
_ARITHMETIC = """
Add_Sub Sub_Add Mul_Div Mul_FloorDiv Mul_Add Div_Mul Div_FloorDiv FloorDiv_Mul FloorDiv_Div Mod_FloorDiv
Pow_Mul LShift_RShift RShift_LShift BitOr_BitAnd BitAnd_BitOr BitXor_BitAnd
"""
FROM_COSMIC_RAY = [
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"),
    *("RemoveDecorator", "ZeroIterationForLoop", "ReplaceUnaryOperator_Delete_Not"),
    *(
        "ReplaceUnaryOperator_Delete_USub",
        "ReplaceUnaryOperator_Delete_Invert",
        "ReplaceUnaryOperator_USub_UAdd",
    ),
    *(f"ReplaceComparisonOperator_{pair}" for pair in _COMPARISONS.split()),
    *(f"ReplaceBinaryOperator_{pair}" for pair in _ARITHMETIC.split()),
]
"""Names of operators. Others, such as `+` becoming `<<`, mostly raise a TypeError that any test notices."""


# Cosmic Ray's base class has no annotations, so that each of its abstract methods seems to return None.
# pyright: reportIncompatibleMethodOverride=false


class RemoveCall(Operator):
    """Replace a statement that only calls a function by `pass`, such as a missing `os.fsync(...)`."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        """See `Operator.mutation_positions`."""
        if node.type == "simple_stmt" and _is_call(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """See `Operator.mutate`."""
        call = node.children[0]
        node.children[0] = Keyword("pass", call.start_pos, call.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """See `Operator.examples`."""
        return (Example("sync(a, b)\nx = 1", "pass\nx = 1"),)


class RemoveItem(Operator):
    """Remove a keyword argument of a call or an entry of a dictionary, such as an ingredient of a key."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        """See `Operator.mutation_positions`."""
        for item in _items(node):
            yield item[0].start_pos, item[-1].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """See `Operator.mutate`."""
        item = _items(node)[index]
        position = node.children.index(item[0])
        following = node.children[position + len(item) :]
        # The comma after the item goes with it, or the one before the last item.
        after = following[:1] if following and following[0] == "," else []
        before = position - 1 if not after and position and node.children[position - 1] == "," else position
        node.children = [*node.children[:before], *following[len(after) :]]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """See `Operator.examples`."""
        return (
            Example("f(a, b=1)", "f(a)"),
            Example("f(b=1)", "f()"),
            Example("f(a=1, b=2)", "f( b=2)"),
            Example("x = {'a': 1, 'b': 2}", "x = {'a': 1}", occurrence=1),
        )


def _is_call(node: Any) -> bool:
    if node.type not in ("power", "atom_expr"):
        return False
    trailer = node.children[-1]
    return trailer.type == "trailer" and trailer.children[0] == "("


def _items(node: Any) -> list[list[Any]]:
    """Return the nodes of each removable item of a call's arguments or a dictionary."""
    if node.type == "arglist" or (node.type == "trailer" and node.children[0] == "("):
        arguments = [child for child in node.children if child.type == "argument"]
        return [[each] for each in arguments if len(each.children) == 3 and each.children[1] == "="]
    if node.type == "dictorsetmaker":
        colons = [position for position, child in enumerate(node.children) if child == ":"]
        is_comprehension = node.children[-1].type in ("comp_for", "sync_comp_for")
        return [] if is_comprehension else [node.children[each - 1 : each + 2] for each in colons]
    return []


def operators() -> dict[str, Any]:
    """Return the operators by name."""
    own = {kind.__name__: kind() for kind in (RemoveCall, RemoveItem)}
    return {name: get_operator(f"core/{name}")() for name in FROM_COSMIC_RAY} | own
