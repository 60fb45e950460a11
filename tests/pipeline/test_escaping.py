"""Text from outside cannot act where it is shown, and addresses in it lose their secrets."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pipeline.errors import DatasetError
from pipeline.escaping import (
    has_credentials,
    html_text,
    inactive_markdown,
    json_text,
    markdown_block,
    markdown_code,
    markdown_text,
    printable,
    printable_lines,
    without_secrets,
)

TERMINAL = "a\x1b]0;title\x07\x9b31m\u202egpj.exe\u2066\u2028\ud800.png"
MARKUP = "x ![p](http://tracker.example/p.png) [a](javascript:1) <img src=x onerror=1> ``` [b]: http://b\n- c"


def test_control_characters_and_bidi_controls_are_shown_as_escapes() -> None:
    shown = printable(TERMINAL)
    assert shown == "a\\x1b]0;title\\x07\\x9b31m\\u202egpj.exe\\u2066 \\ud800.png"
    assert printable_lines("a\r\n\tb\x1b") == "a\\r\n\tb\\x1b"
    assert printable("caf\udce9.png") == "caf\\xe9.png"
    assert printable("\u0645\u06cc\u200c\u062e \u732b \U0001f469\u200d\U0001f52c") == (
        "\u0645\u06cc\u200c\u062e \u732b \U0001f469\u200d\U0001f52c"
    )


@given(st.text())
def test_no_shown_text_has_a_character_that_a_terminal_obeys(text: str) -> None:
    for shown in (printable(text), printable_lines(text), str(DatasetError(text, where=text, fix=text))):
        controls = {letter for letter in shown if ord(letter) < 32 or 127 <= ord(letter) < 160}
        assert controls <= set("\n\t")
        assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028")


@given(st.recursive(st.text() | st.none() | st.integers(), st.lists))
def test_escaped_json_is_still_the_same_json(value: object) -> None:
    assert json.loads(json_text(value)) == value


@pytest.mark.parametrize(
    "escape",
    [markdown_text, markdown_code, inactive_markdown, lambda text: f"\n\n{markdown_block(text)}\n\n"],
    ids=["text", "code", "inactive", "block"],
)
@given(text=st.just(MARKUP) | st.text("![]()<>:/ab`\n\\|#- &;"))
def test_markdown_makes_no_link_picture_or_html_of_escaped_text(
    escape: Callable[[str], str], text: str
) -> None:
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(f"Found {escape(text)} twice")
    nested = [*tokens, *(child for token in tokens for child in token.children or ())]
    assert {token.type for token in nested}.isdisjoint({"link_open", "image", "html_inline", "html_block"})


def test_html_shows_names_verbatim() -> None:
    assert html_text('<b a="1">\u202e&') == "&lt;b a=&quot;1&quot;&gt;\\u202e&amp;"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pass@host/photos", "http://***@host/photos"),
        ("see https://token@host/a and b@c.de", "see https://***@host/a and b@c.de"),
        ("zip://p::https://u:p@h/a.zip?sig=1&x=2", "zip://p::https://***@h/a.zip?***"),
        ("404, url='https://h/a?X-Amz-Signature=1'", "404, url='https://h/a?***'"),
        ("https://h/a.zip?***/rose.jpg", "https://h/a.zip?***/rose.jpg"),
        ("https://h/a@b.jpg", "https://h/a@b.jpg"),
        ("sftp://user@host/photos", "sftp://user@host/photos"),
        (
            "abfs://container@account.dfs.core.windows.net/p",
            "abfs://container@account.dfs.core.windows.net/p",
        ),
        ("github://owner:repository@main/p", "github://owner:repository@main/p"),
        ("s3://bucket/what?.jpg", "s3://bucket/what?.jpg"),
    ],
)
def test_passwords_and_query_strings_are_hidden(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown
    assert has_credentials(text) == ("***@" in shown)
