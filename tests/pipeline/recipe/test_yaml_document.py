"""YAML becomes plain data with the line of every key, and flaws are collected with line and fix."""

import json
import tracemalloc
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


def test_anchors_and_merges_are_resolved_and_explicit_keys_win():
    document = parse("base: &base {a: 1, b: 2}\nown: {<<: *base, b: 3}\nagain: *base\n")
    assert document.data == {"base": {"a": 1, "b": 2}, "own": {"a": 1, "b": 3}, "again": {"a": 1, "b": 2}}
    assert document.flaws == []


CHAIN_OF_MERGES = "".join(f"n{index + 1}: &n{index + 1} {{<<: *n{index}}}\n" for index in range(150))


def test_a_merged_mapping_may_merge_others():
    text = "- &a {x: 1, y: 1, z: 1}\n- &b {<<: *a, y: 2}\n- {<<: *b, z: 3}\n- {<<: [*b, *a], x: *a}\n"
    document = parse(text)
    first = {"x": 1, "y": 1, "z": 1}
    assert document.data == [
        first,
        {"x": 1, "y": 2, "z": 1},
        {"x": 1, "y": 2, "z": 3},
        {"x": first, "y": 2, "z": 1},
    ]
    assert document.flaws == []


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
        ("a: &x [1, *x]", 1, "an alias refers to a mapping or list that contains it"),
        ("a: &x\n  <<: *x", 1, "<< merges a mapping into itself"),
        ("a: &x\n  b: &y\n    <<: *x", 1, "<< merges a mapping into itself"),
        ("a: {<<: 3}", 1, "<< must merge a mapping"),
        ("n0: &n0 {}\n" + CHAIN_OF_MERGES, 1, "lists or mappings are nested too deeply"),
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


ALIASES_OF_ALIASES = "l0: &l0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]\n" for level in range(1, 9)
)
EMPTY_MERGES = "n0: &n0 {}\n" + "".join(
    f"n{index + 1}: &n{index + 1} {{<<: [{', '.join([f'*n{index}'] * 9)}]}}\n" for index in range(50)
)
MERGES_OF_MERGES = "m: &m {" + ", ".join(f"k{index}: 1" for index in range(200)) + "}\n"
MERGES_OF_MERGES += "".join(f"n{index}: {{<<: [*m, *m, *m]}}\n" for index in range(200))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", [ALIASES_OF_ALIASES, EMPTY_MERGES, MERGES_OF_MERGES], ids=["lists", "empty", "merges"]
)
def test_a_few_aliases_cannot_fill_the_memory(text: str):
    tracemalloc.start()
    try:
        document = parse(text)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    (flaw,) = document.flaws
    assert flaw.what.startswith("the document must have at most 10,000 values, counting each alias")
    assert "remove aliases" in flaw.fix
    assert document.data is None
    assert peak_bytes < 50e6


@given(st.text(max_size=200))
def test_arbitrary_text_never_raises(text: str):
    document = parse(text)
    assert document.flaws or json.dumps(document.data)


@given(st.text("ab:{}[]-&*!<>|?'\"# \n\t0,%@`", max_size=60))
def test_text_of_yaml_characters_never_raises(text: str):
    document = parse(text)
    assert document.flaws or json.dumps(document.data)


WRONG = {
    "datasets:\n  - name: a\n   path: x\n": (3, "it begins in column 4, the previous line in column 5"),
    "t:\n  steps: 6\n    batch: 4\n": (3, "it begins in column 5, the previous line in column 3"),
    "t:\n    steps: 6\n\n  batch: 4\n": (4, "it begins in column 3, the previous line in column 5"),
    "a: photo: of\n": (1, "put text that contains a colon and a space in quotes"),
    "a: {b: .txt, c: photo: of}\n": (1, "put text that contains : or } in quotes"),
    "a: {b: 1,\n  c: 2\nd: 3\n": (1, "close the bracket that opens here with }"),
    "a: 1\nb: [1, 2": (2, "close the bracket that opens here with ]"),
    "a: {b: 1, c: 2}}\n": (1, "remove the closing bracket, or add its opening bracket"),
    'a: "C:\\Users\\me"\n': (1, "write / for \\"),
    "a: 1\nb: 'it\nc: 1\n": (2, "close the quote that opens here"),
    "a: 'it's'\n": (1, "put all of the text in one pair of quotes"),
    "a: {trigger} photo: of\n": (1, "put all of the text in one pair of quotes"),
    "a: 1\nb 2\nc: 3\n": (2, "write a colon and a space after the key"),
    "a:1\nb: 2\n": (2, "write a space after the colon in the previous line: a:1"),
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
