"""YAML is read into plain data with the line of every key, and its flaws are found, not raised."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe.locate import dotted, parse

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


def test_every_key_and_list_item_has_its_line_in_blocks_and_in_braces():
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


def test_a_key_that_is_not_there_has_the_line_of_its_section():
    document = parse("a: 1\nmodel:\n  revision: x\n")
    assert document.line(("model", "base")) == 2
    assert document.line(("nothing", 0, "below")) == 1


@given(PLAIN)
def test_what_json_writes_is_read_back_as_it_was(value: Any):
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
def test_plain_values_are_those_of_yaml_1_2(text: str, value: Any):
    found = parse(f"key: {text}").data["key"]
    assert found == value
    assert type(found) is type(value)


def test_anchors_and_merges_are_read_and_own_keys_win():
    document = parse("base: &base {a: 1, b: 2}\nown: {<<: *base, b: 3}\nagain: *base\n")
    assert document.data == {"base": {"a": 1, "b": 2}, "own": {"a": 1, "b": 3}, "again": {"a": 1, "b": 2}}
    assert document.flaws == []


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a is given twice, first in line 1"),
        ("a: [1\nb: 2", 1, "not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'"),
        ("a:\n\tb: 1", 2, "not valid YAML: while scanning for the next token, found character '\\t'"),
        ("a: 1\nb: \x07", 2, "not valid YAML: character 0x7 cannot stand in YAML"),
        ("a: 'x", 1, "not valid YAML: while scanning a quoted scalar, found unexpected end of stream"),
        ("a: *nope", 1, "not valid YAML: found undefined alias 'nope'"),
        ("a: 1\n---\nb: 2\n", 3, "a second YAML document starts here"),
        ("a: &x [1, *x]", 1, "an alias leads back into itself"),
        ("a: &x\n  <<: *x", 1, "<< leads back into itself"),
        ("a: {<<: 3}", 1, "<< merges something that is no mapping"),
        (
            "a: !!python/object:os.system x",
            1,
            "the tag tag:yaml.org,2002:python/object:os.system is not known",
        ),
        ("a: !!int foo", 1, "foo is no value"),
        ("a: " + "9" * 5000, 1, "9999999999999999999999999999999999999999 is no value"),
        ('a: "\\ud800"', 1, "'\\ud800' is no value"),
        ('"\\ud800": 1', 1, "'\\ud800' is no key"),
        ("? [1, 2]\n: 3", 1, "a key is a list or a mapping"),
        ("[" * 3000, 1, "lists or mappings are nested too deeply"),
    ],
)
def test_a_flaw_of_the_yaml_is_named_with_its_line(text: str, line: int, what: str):
    (flaw,) = parse(text).flaws
    assert flaw.line == line
    assert flaw.what.startswith(what)
    assert flaw.fix


@given(st.text(max_size=200))
def test_no_text_raises(text: str):
    document = parse(text)
    assert document.flaws or json.dumps(document.data)


@given(st.text("ab:{}[]-&*!<>|?'\"# \n\t0,%@`", max_size=60))
def test_no_text_of_yaml_characters_raises(text: str):
    document = parse(text)
    assert document.flaws or json.dumps(document.data)
