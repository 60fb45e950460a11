"""Text from outside, such as file names, captions and addresses, made safe for each place that shows it.

Three things must not happen where a text is shown: a terminal obeys a control character, a page runs markup
or loads a picture that a name contains, and a reader sees a name whose letters are reordered. Passwords and
query strings of addresses are hidden as well, because reports and logs are shared.
"""

from __future__ import annotations

from pipeline.escaping.addresses import has_credentials, without_secrets
from pipeline.escaping.markup import (
    html_text,
    inactive_markdown,
    markdown_block,
    markdown_code,
    markdown_text,
)
from pipeline.escaping.printable import json_text, printable, printable_lines, printable_name

__all__ = [
    "has_credentials",
    "html_text",
    "inactive_markdown",
    "json_text",
    "markdown_block",
    "markdown_code",
    "markdown_text",
    "printable",
    "printable_lines",
    "printable_name",
    "without_secrets",
]
