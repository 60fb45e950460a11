"""Text from outside cannot act where it is shown, and addresses in it lose their secrets."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DatasetError
from pipeline.escaping import (
    has_credentials,
    html_text,
    json_text,
    markdown_block,
    markdown_lines,
    markdown_text,
    printable,
    printable_lines,
    without_secrets,
)
from tests.markdown import COMMONMARK, require_inactive

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


def test_a_number_that_is_not_finite_is_null_in_json() -> None:
    numbers = {"losses": [0.5, float("nan")], "norm": (float("inf"), -float("inf"))}
    assert json.loads(json_text(numbers)) == {"losses": [0.5, None], "norm": [None, None]}


PIECES = [
    *"\\\\\\`````~~![]()<>|*_#&;:'\"@/.^$ {}=+-\t\n",
    *(
        "![",
        "](",
        "]:",
        "[",
        "<!--",
        "<a href=",
        "<script>",
        "</",
        "&#91;",
        "&lt;",
        "&colon;",
        "\\|",
        "|---|",
    ),
    *("www.", "WWW.", "https://", "http:\\", "//", "mailto:", "xmpp:", "ftp://", "javascript:", "data:,"),
    *(
        "example.com",
        "a@b.org",
        "localhost",
        "x",
        "rose",
        "photo.png",
        "/graphql?query=",
        "1.",
        "\u00e9",
        "\u732b",
    ),
    *("\u00a0", "\u3000", "\u200d", "\r\n", "``", "```", "    ", "---", "\n\n", "- ", "> ", "[^1]", ":x:"),
]


def names(number: int) -> Iterator[str]:
    """Yield names and captions that contain the syntax of Markdown, the same ones every time."""
    draw = random.Random(0)
    for _ in range(number):
        yield "".join(draw.choices(PIECES, k=draw.randint(1, 12)))


def require_inactive_names(number: int) -> None:
    # Several names in one document, because one may end what another begins.
    generated = list(names(number))
    for first in range(0, number, 10):
        some = generated[first : first + 10]
        require_inactive("\n\n".join(f"Found {markdown_text(name)} twice" for name in some))
        require_inactive(markdown_lines("unreadable: " + ", ".join(some)))
        cells = "".join(f"| {markdown_text(name)} | 1 |\n" for name in some)
        require_inactive(f"| name | number |\n|---|---|\n{cells}")
        require_inactive("\n\n".join(markdown_block(name) for name in some))


def test_markdown_makes_no_link_picture_html_or_address_of_generated_names() -> None:
    require_inactive_names(1_000)


@pytest.mark.slow
def test_markdown_makes_no_link_picture_html_or_address_of_ten_thousand_names() -> None:
    require_inactive_names(10_000)


@pytest.mark.parametrize(
    "name",
    [
        r"![x\](/graphql?query=mutation{deleteRun}).png",
        r"\<img src=x onerror=alert(1)>.png",
        r"a\|![x](//host/p).png",
        "[a]: https://example.com\n\n[a]",
        "| a | b |\n|---|---|\n| `x | ![p](q)` |",
        "www.example.com",
        "see www&#46;example.com or http&#58;//example.com",
        r"www\.example.com, https\://example.com, a\@example.com",
        "`a``b` ![x](y)",
        "``` ![x](y) `",
        MARKUP,
    ],
)
def test_names_with_markup_are_inactive(name: str) -> None:
    for escape in (markdown_text, markdown_lines):
        require_inactive(f"Found {escape(name)} twice")


@given(text=st.just(MARKUP) | st.text("![]()<>:/ab`\n\\|#- &;") | st.text())
def test_markdown_of_any_text_is_inactive(text: str) -> None:
    require_inactive(f"Found {markdown_text(text)} twice\n\n{markdown_lines(text)}")


def test_markdown_shows_names_verbatim() -> None:
    """Except for spaces, and the backticks of code."""
    for name in names(1_000):
        inline = [token for token in COMMONMARK.parse(markdown_text(name)) if token.type == "inline"]
        shown = "".join(child.content for token in inline for child in token.children or ())
        assert re.sub(r"[\s`]", "", shown) == re.sub(r"[\s`]", "", printable(name))


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        (
            "3 images are too small, 0.5% of all (see flowers/)",
            "3 images are too small, 0.5% of all (see flowers/)",
        ),
        ("cannot decode flowers/rose.jpg: cut off", "cannot decode `flowers/rose.jpg`: cut off"),
        (
            "run `latentline gc --yes`, or set `checks.allow`.",
            "run `latentline gc --yes`, or set `checks.allow`.",
        ),
        ("accept it with checks.allow: [oddities]", "accept it with `checks.allow`: `[oddities]`"),
        ("a|b\\", "a\\|`b\\`"),
        ("1. one", "`1.` one"),
    ],
)
def test_only_words_with_syntax_become_code(text: str, markdown: str) -> None:
    assert markdown_text(text) == markdown


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
        ("s3://AKIA:abc/d+e@bucket/x", "s3://***@bucket/x"),
        ("s3://AKIA:/abc/@bucket/x", "s3://***@bucket/x"),
        ("smb://me:pa?ss#word@nas/photos and b@c.de", "smb://***@nas/photos and b@c.de"),
        ("zip://p::sftp://me:a2/34#x@host/a.zip", "zip://p::sftp://***@host/a.zip"),
        ("s3://AKIA:12/34@bucket/x", "s3://***@bucket/x"),
        ("ftp://me:1?2@host, https://u:a/b@h/x", "ftp://***@host, https://***@h/x"),
        ("s3://u:a@b/c@bucket/x", "s3://***@bucket/x"),
        ("https://host:8080/a@b.jpg", "https://host:8080/a@b.jpg"),
        ("https://[::1]:80/a@b.jpg", "https://[::1]:80/a@b.jpg"),
        ("zip://a::s3://bucket/b@2x.zip", "zip://a::s3://bucket/b@2x.zip"),
        ("zip://a:b/c@2x.png::s3://bucket/a.zip", "zip://a:b/c@2x.png::s3://bucket/a.zip"),
        ("http://h:80/a,s3://u:p/w@b/x", "http://h:80/a,s3://***@b/x"),
        ("az://c/x?sv=1&sig=a%2B", "az://c/x?***"),
        ("sftp://host/x#token=abc", "sftp://host/x#***"),
        ("https://h/x#secret", "https://h/x#***"),
        ("gs://b/x?GoogleAccessId=a&Signature=b in it", "gs://b/x?*** in it"),
        ("did you mean https://h/x?", "did you mean https://h/x?"),
        ("s3://bucket/photo#1.png", "s3://bucket/photo#1.png"),
    ],
)
def test_passwords_and_query_strings_are_hidden(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown
    assert has_credentials(text) == ("***@" in shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:123/456@host", "sftp://***@host"),
        ("ftp://me:22/x@nas/photos", "ftp://***@nas/photos"),
        ("no zip://p::smb://me:1/2#3@nas/a.zip", "no zip://p::smb://***@nas/a.zip"),
        ("webdav://me:1/a@nas.example.com/p", "webdav://***@nas.example.com/p"),
        ("sftp://nas:22/photos/a@2x.png", "sftp://nas:22/photos/a@2x.png"),
        ("sftp://nas:2222/photos", "sftp://nas:2222/photos"),
        ("hdfs://node:8020/a/b@c.parquet: damaged", "hdfs://node:8020/a/b@c.parquet: damaged"),
    ],
)
def test_a_password_that_looks_like_a_port_is_hidden_and_the_address_is_accepted(
    text: str, shown: str
) -> None:
    assert without_secrets(text) == shown
    assert not has_credentials(text)
