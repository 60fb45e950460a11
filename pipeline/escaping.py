"""Text from outside, such as file names, captions and addresses, made safe for each place that shows it.

A terminal must not obey control characters, a page must not run markup or load pictures from a name, and
letters must not appear in another order.
"""

from __future__ import annotations

import html
import json
import math
import re
import unicodedata
from typing import Any, cast

_JOINERS = frozenset("\u200c\u200d")
"""Invisible characters that Persian and Indic texts and composed emoji need."""

_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#\s@\"']*(?:@[^/?#\s@\"']*)*)@")
_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#\s@\"':\[]*:(?!:)(?:(?!://)[^\s\"'<>])*)@")
"""User and password. The password may contain /, ? and #, as half of all AWS keys do."""

_PORT = re.compile(r"[^:]*:\d+/")
"""Start of a server, its port and a path, which may contain an @."""

_FILE = re.compile(
    r"[^\s/\"'<>]*\.(?:png|jpe?g|webp|avif|hei[cf]|gif|bmp|tiff?|txt|caption|json|jsonl|csv|parquet|zip)\b"
)
"""End of the name of a file in a dataset; a server has none of these suffixes."""

_QUERY = re.compile(r"(https?://[^\s?#\"'<>]*)([?#])(?!\*\*\*)[^\s\"'<>]+", re.IGNORECASE)
_PARAMETERS = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?#\"'<>]*)([?#])(?!\*\*\*)(?=[^\s\"'<>]*=)[^\s\"'<>]+"
)
"""Query or fragment with name=value. Without one, ? and # belong to names of files, except on the web."""

_OPENING, _CLOSING = "(\"'", ")\"',.;:!?"

_WORD_OR_CODE = re.compile(rf"(?<!\S)(?P<code>[{_OPENING}]*`[^`|]+`[{_CLOSING}]*)(?!\S)|\S+")

# Backslashes and entities would not be enough: GFM finds addresses after it has resolved them. A dot before a
# letter makes a link of `example.com`, and $ and : begin formulas and emoji, in some programs.
_ACTIVE = re.compile(r"[\\`*_{}\[\]<>#!~&@^$:]|//|www|\.[^\W\d]|^[-=+]{2,}$", re.IGNORECASE)
"""What Markdown or an extension may interpret in a word."""

_LIST_MARKER = re.compile(r"[-+]|[0-9]{1,9}[.)]")
"""Words that begin an item of a list at the start of a line."""

_TOKEN_PROTOCOLS = frozenset(["http", "https"])
"""Protocols for which a user name without a password may be a token."""

_OTHER_MEANINGS = frozenset(["abfs", "abfss", "az", "wasb", "wasbs", "github", "gitlab", "git", "hf"])
"""Protocols that write a container or a revision next to an @."""

_NO_SERVER = frozenset(["file", "local", "memory", "zip", "tar", "libarchive"])
"""Protocols whose addresses have no user, but may have a colon in a name."""

_BUCKETS = frozenset(["s3", "s3a", "gs", "gcs", "oci", "oss", "obs", "cos", "tos"])
"""Protocols whose addresses have no port."""


def printable(text: str) -> str:
    """Return `text` on one line, with control characters and lone surrogates as backslash escapes."""
    return _escaped(" ".join(text.split()))


def printable_name(text: str) -> str:
    """Return a file name or path on one line, with line breaks and other control characters as escapes."""
    return _escaped(text)


def printable_lines(text: str) -> str:
    """Return `text` with its line breaks and tabs, and other control characters as backslash escapes."""
    if text.isprintable():
        return text
    return "".join(letter if letter in "\n\t" else _escaped(letter) for letter in text)


def json_text(value: Any) -> str:
    """Return a JSON-serializable value as indented JSON that is safe to print.

    A number that is not finite is null.
    """
    text = json.dumps(finite_json(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)

    # JSON escapes the ASCII control characters only. Characters that reverse the direction of text remain.
    return "".join(
        letter if letter == "\n" or not _is_invisible(letter) else json.dumps(letter)[1:-1] for letter in text
    )


def finite_json(value: Any) -> Any:
    """Return a JSON value with null in place of each number that is not finite."""
    # JSON has no other numbers, and programs in other languages read no NaN.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite_json(item) for name, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in cast("list[Any]", value)]
    return value


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(_escape(letter) if _is_invisible(letter) else letter for letter in text)


def _is_invisible(letter: str) -> bool:
    return not letter.isprintable() and letter not in _JOINERS and unicodedata.category(letter) != "Zs"


def _escape(letter: str) -> str:
    # Python decodes the bytes of a file name that is not UTF-8 as these surrogates.
    if "\udc80" <= letter <= "\udcff":
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")


def html_text(text: str) -> str:
    """Return plain text as HTML, for element contents and quoted attributes."""
    return html.escape(printable_lines(text), quote=True)


def markdown_text(text: str) -> str:
    """Return `text` on one line such that Markdown shows it verbatim; for file names, captions and messages.

    Words with characters that Markdown or one of its extensions may interpret become inline code. Code that
    `text` contains stays code.
    """
    return _WORD_OR_CODE.sub(_inactive_word, printable(text))


def markdown_lines(text: str) -> str:
    """Return each line of `text` as `markdown_text` does."""
    return "\n".join(map(markdown_text, text.split("\n")))


def _inactive_word(match: re.Match[str]) -> str:
    word = match[0]
    if match["code"]:
        return word
    if match.start() == 0 and _LIST_MARKER.fullmatch(word):
        return _markdown_code(word)

    # The punctuation of a sentence is outside the code.
    start = len(word) - len(word.lstrip(_OPENING))
    end = max(start, len(word.rstrip(_CLOSING)))
    parts = (_markdown_code(part) if _ACTIVE.search(part) else part for part in word[start:end].split("|"))

    # Bars end the cell of a table, also in code.
    return word[:start] + "\\|".join(parts) + word[end:]


def _markdown_code(text: str) -> str:
    # A run of backticks in the text ends the code, unless the fence is longer.
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"`{text}`"


def markdown_block(text: str) -> str:
    """Return `text` as a code block that no backticks in it can close."""
    shown = printable_lines(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", shown)), default=0))
    return f"{fence}text\n{shown}\n{fence}"


def without_secrets(text: str) -> str:
    """Return `text` with `***` for the passwords and query strings of the addresses in it."""
    if "://" not in text:
        return text

    # Signed links have their secrets in the query.
    for userinfo in (_PASSWORD, _USERINFO):
        text = userinfo.sub(_hide_userinfo, text)
    for parameters in (_QUERY, _PARAMETERS):
        text = parameters.sub(r"\1\2***", text)
    return text


def has_credentials(text: str) -> bool:
    """Return True if an address in `text` contains a password, or a token in place of a user."""
    matches = (match for pattern in (_PASSWORD, _USERINFO) for match in pattern.finditer(text))
    return any(_is_secret(*match.groups()) for match in matches)


def _hide_userinfo(match: re.Match[str]) -> str:
    is_secret = _is_secret(match[1], match[2]) or _may_be_secret(match)
    return f"{match[1]}://***@" if is_secret else match[0]


def _may_be_secret(match: re.Match[str]) -> bool:
    # `sftp://me:22/x@host` is a port and a folder for fsspec, and what somebody writes whose password has a
    # slash. In messages, it is hidden unless the name of a file follows.
    protocol = match[1].lower()
    if protocol in _TOKEN_PROTOCOLS | _OTHER_MEANINGS | _NO_SERVER or not _PORT.match(match[2]):
        return False
    return not _FILE.match(match.string, match.end())


def _is_secret(protocol: str, userinfo: str) -> bool:
    # For sftp and others, a user name without a password is the usual way to log in.
    protocol = protocol.lower()
    if protocol in _OTHER_MEANINGS or (protocol in _NO_SERVER and "/" in userinfo):
        return False
    if protocol not in _BUCKETS and _PORT.match(userinfo):
        return False
    return ":" in userinfo or protocol in _TOKEN_PROTOCOLS
