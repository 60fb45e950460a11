"""The language of `filters.where`: SQL expressions over a manifest's columns, and nothing else of SQL.

The SQL of Polars has queries and table functions, which read files and addresses as soon as an expression is
parsed. So each word and sign is compared with lists before Polars receives the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pipeline.recipe.settings import reject

WORDS = {
    "operators": "and any as between case cast distinct else end false ilike in interval is like not null or "
    "regexp rlike then true try_cast when xor",
    "types": "bigint bool boolean char date datetime decimal double float float4 float8 int int2 int4 int8 "
    "integer numeric precision real smallint string text time timestamp tinyint varchar",
}
"""Words of expressions by what they are."""

FUNCTIONS = {
    "numbers": "abs cbrt ceil ceiling div exp floor greatest least ln log log10 log1p log2 mod pow power "
    "round sign sqrt trunc truncate",
    "texts": "bit_length char_length character_length concat concat_ws ends_with initcap left length lower "
    "ltrim normalize octet_length regexp_like regexp_replace replace reverse right rtrim split_part "
    "starts_with strftime strpos substr substring trim upper",
    "dates": "date date_part year month day",
    "lists": "array_contains array_length array_to_string string_to_array",
    "choices": "coalesce if ifnull nullif",
    "all rows": "avg count max median min quantile_cont stddev sum variance",
}
"""Functions by what they work on. None reads a file or an address, or produces rows."""

_FUNCTIONS = frozenset(" ".join(FUNCTIONS.values()).split())
_WORDS = frozenset(" ".join(WORDS.values()).split())

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    |(?P<text>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")+"|`(?:[^`]|``)+`)
    |(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.]))
    |(?P<word>[^\W\d]\w*(?!['"`]))
    |(?P<sign>-(?!-)|/(?!\*)|[-+*%=<>!~^|&(),.:\[\]])""",
    re.VERBOSE,
)
"""One word, literal or sign. Comments, and texts with a prefix such as E'\\'', are none: they could hide the
end of a text."""

_OPENING = re.compile(r"[ \t\r\n]*\(")

_FIX = (
    "compare columns with values, such as aesthetic > 5 AND lower(language) = 'en'; "
    "docs/recipe_guide.md lists the functions"
)


def check_where(value: str) -> str:
    """Return `value` if it has only words, signs and functions of expressions."""
    for kind, token, is_called in _tokens(value):
        if is_called and kind in {"word", "quoted"} and token.lower() not in _FUNCTIONS | _WORDS:
            reject(f"filters.where must not use {token}(...), which is not a function over columns", _FIX)
    return value


def _tokens(expression: str) -> list[tuple[str, str, bool]]:
    """Return kind and text of each token, and whether a parenthesis opens behind it."""
    matches: list[re.Match[str]] = []
    end = 0
    while end < len(expression):
        match = _TOKEN.match(expression, end)
        if match is None:
            part = expression[end:].split(maxsplit=1)[0][:40]
            what = f"filters.where must be an SQL expression without comments and queries, got {part!r} in it"
            reject(what, _FIX)
        matches.append(match)
        end = match.end()
    return [
        (str(each.lastgroup), each[0], _OPENING.match(expression, each.end()) is not None) for each in matches
    ]


def expression_over(where: str, names: Collection[str]) -> tuple[str, set[str]]:
    """Return a checked expression for Polars, and which of `names` (columns and fields) it may use.

    Raises:
        ValueError: A word is neither SQL of expressions nor one of `names`.
    """
    parts: list[str] = []
    used: set[str] = set()
    for kind, token, is_called in _tokens(where):
        name = token[1:-1].replace(token[0] * 2, token[0]) if kind == "quoted" else token
        if kind in {"word", "quoted"} and name in names:
            used.add(name)
        is_known = token.lower() in _WORDS or (is_called and token.lower() in _FUNCTIONS)
        if kind != "word" or is_known:
            parts.append(token)
        elif token in names:
            # In quotes, so that a column named select is a column.
            parts.append(f'"{token}"')
        else:
            raise ValueError(f"there is no column {token!r}")
    return "".join(parts), used
