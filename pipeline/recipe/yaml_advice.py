"""What to do about a line that is no YAML: the parser says what it expected, and hardly what to write."""

from __future__ import annotations

from ruamel.yaml.error import MarkedYAMLError

_QUOTE = "if it is meant as text, put it in quotes: here the character before it has a meaning of its own"

_ADVICE = (
    ("found character '\\t'", False, "indent with spaces: YAML takes no tabs there"),
    ("scanning a quoted scalar", True, "close the quote that is opened there"),
    ("double-quoted", False, "write / for \\, or single quotes: in double ones a backslash begins an escape"),
    ("simple key", True, "write a colon and a space after the key: key: value"),
    ("cannot start any token", False, _QUOTE),
    ("undefined alias", False, _QUOTE),
)
"""What the parser says, whether the line is the one where it began, and the fix; the first that fits."""


def line_and_fix(error: MarkedYAMLError, text: str) -> tuple[int, str]:
    """The line to look at, from 1, and what to write there."""
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    problem, context = error.problem or "", error.context or ""
    opened = error.context_mark.line + 1 if error.context_mark is not None else line
    if "parsing a flow" in context:
        return _of_bracket(problem, "}" if "mapping" in context else "]", opened=opened, line=line)
    if "mapping values are not allowed" in problem or "<block end>" in problem:
        return line, _of_block(problem, text.splitlines(), line)
    for said, of_opened, fix in _ADVICE:
        if said in problem or said in context:
            return opened if of_opened else line, fix
    return line, "correct this line first: what follows it cannot be read before"


def _of_bracket(problem: str, bracket: str, *, opened: int, line: int) -> tuple[int, str]:
    """For what stands in brackets that begin in the line `opened`."""
    if opened != line or "<stream end>" in problem:
        return opened, f"close the bracket that is opened there, with {bracket}"
    return line, f"put a text that holds : or {bracket} in quotes, and commas between what stands in brackets"


def _of_block(problem: str, lines: list[str], line: int) -> str:
    """For a line that does not go on what the lines above began."""
    here = lines[line - 1] if line <= len(lines) else ""
    if "'}'" in problem or "']'" in problem:
        return "take out the bracket that closes nothing"
    if "<scalar>" in problem:
        return "put the whole text in one pair of quotes"
    if here.partition("#")[0].count(": ") > 1:
        return "put a text that holds a colon and a space in quotes"
    above = next((each for each in reversed(lines[: line - 1]) if each.partition("#")[0].strip()), "")
    if _column(here) == _column(above):
        return f"write a space after the colon in the line above it: {above.strip()}"
    said = f"it begins in column {_column(here)}, the line above in column {_column(above)}"
    return f"indent it as the keys that it belongs to: {said}"


def _column(line: str) -> int:
    """Where the first key of a line begins, from 1; after the dash of a list's item."""
    return len(line) - len(line.lstrip(" -")) + 1
