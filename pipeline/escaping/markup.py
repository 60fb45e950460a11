"""Text for HTML and Markdown, which show it verbatim."""

from __future__ import annotations

import html
import re

from pipeline.escaping.printable import printable, printable_lines


def html_text(text: str) -> str:
    """Return plain text as HTML, for element contents and quoted attributes."""
    return html.escape(printable_lines(text), quote=True)


def markdown_text(text: str) -> str:
    """Return `text` on one line such that Markdown shows it verbatim; for file names and captions."""
    plain = html.escape(printable(text), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", plain)


def inactive_markdown(text: str) -> str:
    """Return `text` such that Markdown makes no links, pictures or HTML of it.

    Other characters stay, because the same text is printed on terminals.
    """
    return re.sub(r"\](?=[(:])|<(?=[A-Za-z/!?])", r"\\\g<0>", printable_lines(text))


def markdown_code(text: str) -> str:
    """Return `text` on one line as inline code, which Markdown shows verbatim."""
    shown = printable(text)
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {shown} {fence}" if longest else f"`{shown}`"


def markdown_block(text: str) -> str:
    """Return `text` as a code block that no backticks in it can close."""
    shown = printable_lines(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", shown)), default=0))
    return f"{fence}text\n{shown}\n{fence}"
