"""What CommonMark and GFM make of a text."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.token import Token

COMMONMARK, GFM = MarkdownIt("commonmark"), MarkdownIt("gfm-like")
ACTIVE = {"link_open", "image", "html_inline", "html_block"}

# GFM looks for these in plain text after it has resolved escapes and entities, and so does the Dagster UI.
ADDRESS = re.compile(r"https?:|www\.|@", re.IGNORECASE)


def tokens_of(parser: MarkdownIt, text: str) -> list[Token]:
    tokens = parser.parse(text)
    return [*tokens, *(child for token in tokens for child in token.children or ())]


def require_inactive(text: str) -> None:
    """Fail if Markdown makes an image, link, HTML or an address that a viewer opens of `text`."""
    for parser in (COMMONMARK, GFM):
        tokens = tokens_of(parser, text)
        assert {token.type for token in tokens}.isdisjoint(ACTIVE), text
        plain = "\n".join(token.content for token in tokens if token.type == "text")
        assert not ADDRESS.search(plain), text
