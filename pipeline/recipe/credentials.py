"""Credentials that someone wrote into a YAML file by accident: common names and formats of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from pipeline.escaping import has_credentials
from pipeline.recipe.yaml_document import KeyPath

_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:password|passwd|passphrase|secret|token|credentials?|(?:api|access|private|secret)[_-]?key)$",
    re.IGNORECASE,
)
"""Names of keys and environment variables that hold a secret, such as HF_TOKEN and aws_secret_access_key."""

_ASSIGNMENT = re.compile(r"([A-Za-z][A-Za-z0-9_.-]*)=([^\s,;\"'$][^\s,;]*)")
"""`NAME=value` in a text such as an option; a value that begins with $ is a reference."""

_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)
"""Tokens of Hugging Face, AWS and GitHub, and private keys."""


def credentials_in(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each value that appears to be a password, token or key, and what it is."""
    if isinstance(value, dict):
        mapping = cast("dict[str, Any]", value)
        # Kubernetes writes an environment variable as {name: NAME, value: text}.
        name, text = mapping.get("name"), mapping.get("value")
        if isinstance(name, str) and _is_secret(name, text):
            yield (*path, "value"), f"a value for {name}"
        for key, each in mapping.items():
            if _is_secret(key, each):
                yield (*path, key), "a value"
            else:
                yield from credentials_in(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(cast("list[Any]", value)):
            yield from credentials_in(each, (*path, index))
    elif isinstance(value, str) and (what := _in_text(value)) is not None:
        yield path, what


def _is_secret(name: str, value: Any) -> bool:
    # A reference such as $(NAME) is how a secret should be given.
    literal = isinstance(value, str | int | float) and not isinstance(value, bool)

    # Kubernetes writes names in camelCase, such as secretKey.
    with_underscores = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return literal and not str(value).startswith("$") and _SECRET_NAME.search(with_underscores) is not None


def _in_text(text: str) -> str | None:
    if has_credentials(text):
        return "an address with a user or password"
    if _TOKEN.search(text):
        return "a token or key"
    names = (name for name, value in _ASSIGNMENT.findall(text) if _is_secret(name, value))
    name = next(names, None)
    return None if name is None else f"a value for {name}"
