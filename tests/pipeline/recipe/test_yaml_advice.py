"""What is said of each way to get YAML wrong: the line to look at, and what to write there."""

from __future__ import annotations

import pytest

from pipeline.recipe.locate import parse

WRONG = {
    "datasets:\n  - name: a\n   path: x\n": (3, "it begins in column 4, the line above in column 5"),
    "t:\n  steps: 6\n    batch: 4\n": (3, "it begins in column 5, the line above in column 3"),
    "t:\n    steps: 6\n\n  batch: 4\n": (4, "it begins in column 3, the line above in column 5"),
    "a: photo: of\n": (1, "a text that holds a colon and a space in quotes"),
    "a: {b: .txt, c: photo: of}\n": (1, "put a text that holds : or } in quotes"),
    "a: {b: 1,\n  c: 2\nd: 3\n": (1, "close the bracket that is opened there, with }"),
    "a: 1\nb: [1, 2": (2, "close the bracket that is opened there, with ]"),
    "a: {b: 1, c: 2}}\n": (1, "take out the bracket that closes nothing"),
    'a: "C:\\Users\\me"\n': (1, "write / for \\"),
    "a: 1\nb: 'it\nc: 1\n": (2, "close the quote that is opened there"),
    "a: 'it's'\n": (1, "put the whole text in one pair of quotes"),
    "a: {trigger} photo: of\n": (1, "put the whole text in one pair of quotes"),
    "a: 1\nb 2\nc: 3\n": (2, "write a colon and a space after the key"),
    "a:1\nb: 2\n": (2, "write a space after the colon in the line above it: a:1"),
    "a: *.txt\n": (1, "put it in quotes"),
    "a: @x\n": (1, "put it in quotes"),
    "a: | x\n": (1, "correct this line first"),
    "a:\n\tb: 1\n": (2, "indent with spaces"),
}


@pytest.mark.parametrize("text", WRONG)
def test_each_mistake_is_placed_and_answered(text: str) -> None:
    line, fix = WRONG[text]
    (flaw,) = parse(text).flaws
    assert flaw.what.startswith("not valid YAML: ")
    assert flaw.line == line
    assert fix in flaw.fix
