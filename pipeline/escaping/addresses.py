"""Passwords, tokens and query strings in the addresses that a text contains."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#\s@\"']*(?:@[^/?#\s@\"']*)*)@")
_QUERY = re.compile(r"(https?://[^\s?\"'<>]*)\?(?!\*\*\*)[^\s\"'<>]*", re.IGNORECASE)

_TOKEN_PROTOCOLS = frozenset(["http", "https"])
"""Protocols for which a user name without a password may be a token."""

_OTHER_MEANINGS = frozenset(["abfs", "abfss", "az", "wasb", "wasbs", "github", "gitlab", "git", "hf"])
"""Protocols that write a container or a revision next to an @."""


def without_secrets(text: str) -> str:
    """Return `text` with `***` for the passwords and query strings of the addresses in it."""
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1?***", _USERINFO.sub(_hide_userinfo, text))


def has_credentials(text: str) -> bool:
    """Return True if an address in `text` contains a password, or a token in place of a user."""
    return any(_is_secret(*match.groups()) for match in _USERINFO.finditer(text))


def _hide_userinfo(match: re.Match[str]) -> str:
    return f"{match[1]}://***@" if _is_secret(match[1], match[2]) else match[0]


def _is_secret(protocol: str, userinfo: str) -> bool:
    # For sftp and others, a user name without a password is the usual way to log in.
    protocol = protocol.lower()
    return protocol not in _OTHER_MEANINGS and (":" in userinfo or protocol in _TOKEN_PROTOCOLS)
