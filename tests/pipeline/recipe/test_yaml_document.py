"""YAML becomes plain data with the line of every key, and flaws are collected with line and fix."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe.yaml_document import dotted, parse

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters="\ufeff")),
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(st.text("abc_", min_size=1), below, max_size=4)
    ),
    max_leaves=20,
)


def lines_of(text: str) -> dict[str, int]:
    return {dotted(path): line for path, line in parse(text).lines.items()}


def test_every_key_and_list_item_has_a_line_in_block_and_flow_style():
    text = """
datasets:
  - name: photos

    captions: {from: sidecar,
               suffix: .txt}
  - {name: more}
buckets: {resolution: 1024, step: 64}
"""
    assert lines_of(text) == {
        "": 2,
        "datasets": 2,
        "datasets[0]": 3,
        "datasets[0].name": 3,
        "datasets[0].captions": 5,
        "datasets[0].captions.from": 5,
        "datasets[0].captions.suffix": 6,
        "datasets[1]": 7,
        "datasets[1].name": 7,
        "buckets": 8,
        "buckets.resolution": 8,
        "buckets.step": 8,
    }


def test_a_missing_key_has_the_line_of_its_section():
    document = parse("a: 1\nmodel:\n  revision: x\n")
    assert document.line(("model", "base")) == 2
    assert document.line(("nothing", 0, "below")) == 1


@given(PLAIN)
def test_json_is_read_back_unchanged(value: Any):
    document = parse(json.dumps(value, ensure_ascii=False))
    assert document.flaws == []
    assert document.data == value
    assert type(document.data) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("~", None),
        ("1e-4", 1e-4),
        ("010", 10),
        ("2024-01-01", "2024-01-01"),
        ("'12'", "12"),
        ("0 3 * * *", "0 3 * * *"),
    ],
)
def test_plain_values_follow_yaml_1_2(text: str, value: Any):
    parsed = parse(f"key: {text}").data["key"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_an_anchor_and_its_aliases_are_flaws_of_their_keys():
    document = parse("base: &base {a: 1}\nown: 2\nagain: *base\nlist:\n  - *base\n")
    assert [(flaw.path, flaw.line) for flaw in document.flaws] == [
        (("base",), 1),
        (("again",), 3),
        (("list", 0), 1),
    ]
    assert {flaw.what for flaw in document.flaws} == {
        "anchors and aliases of YAML are not supported, got &base or *base"
    }
    assert document.data == {"base": None, "own": 2, "again": None, "list": [None]}


def test_a_merge_is_a_flaw():
    _, merge = parse("a: &x {b: 1}\nc: {<<: *x, d: 2}\n").flaws
    assert (merge.line, merge.what) == (2, "merging with << is not supported")


def test_aliases_of_aliases_are_not_repeated():
    levels = (f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]\n" for level in range(1, 50))
    document = parse("l0: &l0 [x]\n" + "".join(levels))
    assert len(document.flaws) == 50


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate key a, first used in line 1"),
        ("a: [1\nb: 2", 1, "not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'"),
        ("a:\n\tb: 1", 2, "not valid YAML: while scanning for the next token, found character '\\t'"),
        ("a: 1\nb: \x07", 2, "not valid YAML: character 0x7 is not allowed in YAML"),
        ("a: 'x", 1, "not valid YAML: while scanning a quoted scalar, found unexpected end of stream"),
        ("a: *nope", 1, "not valid YAML: found undefined alias 'nope'"),
        ("a: 1\n---\nb: 2\n", 3, "a second YAML document starts here"),
        ("a: &x [1, *x]", 1, "anchors and aliases of YAML are not supported, got &x or *x"),
        ("a: {<<: 3}", 1, "merging with << is not supported"),
        (
            "a: !!python/object:os.system x",
            1,
            "unknown YAML tag tag:yaml.org,2002:python/object:os.system",
        ),
        ("a: !!int foo", 1, "invalid value foo"),
        ("a: " + "9" * 5000, 1, "invalid value 9999999999999999999999999999999999999999: "),
        ('a: "\\ud800"', 1, "invalid value '\\ud800'"),
        ('"\\ud800": 1', 1, "a key must be valid text, got '\\ud800'"),
        ("? [1, 2]\n: 3", 1, "a key must be text, got a list or a mapping"),
        ("[" * 3000, 1, "lists or mappings are nested too deeply"),
        ("a:\n " + "[" * 150 + "]" * 150, 2, "lists or mappings are nested too deeply"),
        ("a: " + "{b: " * 450 + "}" * 450, 1, "lists or mappings are nested too deeply"),
        ("a: 0x" + "F" * 5000, 1, "invalid value 0xFFFFFFFF"),
        ("a: [" + "1, " * 11_000 + "]", 1, "the document must have at most 10,000 values"),
        ("a: " + "b" * 1_000_001, 1, "the document must have at most 1,000,000 characters, got 1,000,004"),
    ],
)
def test_a_flaw_is_reported_with_its_line(text: str, line: int, what: str):
    (flaw,) = parse(text).flaws
    assert flaw.line == line
    assert flaw.what.startswith(what)
    assert flaw.fix


@given(st.text(max_size=200))
def test_arbitrary_text_never_raises(text: str):
    document = parse(text)
    assert document.flaws or json.dumps(document.data)


@given(st.text("ab:{}[]-&*!<>|?'\"# \n\t0,%@`", max_size=60))
def test_text_of_yaml_characters_never_raises(text: str):
    document = parse(text)
    assert document.flaws or json.dumps(document.data)


WRONG = {
    "datasets:\n  - name: a\n   path: x\n": (3, "indent it like the other keys"),
    "t:\n  steps: 6\n    batch: 4\n": (3, "indent a key like the other keys"),
    "t:\n    steps: 6\n\n  batch: 4\n": (4, "indent it like the other keys"),
    "a: photo: of\n": (1, "put text that contains a colon and a space in quotes"),
    "a: {b: .txt, c: photo: of}\n": (1, "put text that contains : or } in quotes"),
    "a: {b: 1,\n  c: 2\nd: 3\n": (1, "close the bracket that opens here with }"),
    "a: 1\nb: [1, 2": (2, "close the bracket that opens here with ]"),
    "a: {b: 1, c: 2}}\n": (1, "indent it like the other keys"),
    'a: "C:\\Users\\me"\n': (1, "write / for \\"),
    "a: 1\nb: 'it\nc: 1\n": (2, "close the quote that opens here"),
    "a: 'it's'\n": (1, "put text in one pair of quotes"),
    "a: {trigger} photo: of\n": (1, "put text in one pair of quotes"),
    "a: 1\nb 2\nc: 3\n": (2, "write a colon and a space after the key"),
    "a:1\nb: 2\n": (2, "put text that contains a colon"),
    "a: *.txt\n": (1, "put it in quotes"),
    "a: @x\n": (1, "put it in quotes"),
    "a: | x\n": (1, "correct this line first"),
    "a:\n\tb: 1\n": (2, "indent with spaces"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_syntax_error_is_reported_with_the_line_to_correct_and_a_fix(text: str) -> None:
    line, fix = WRONG[text]
    (flaw,) = parse(text).flaws
    assert flaw.what.startswith("not valid YAML: ")
    assert flaw.line == line
    assert fix in flaw.fix
