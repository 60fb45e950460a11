"""Validators of single recipe values, and the types of keys that hold a path or an address."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, cast

from pydantic import BeforeValidator, PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

from pipeline.escaping import has_credentials
from pipeline.recipe.check_specs import GATES, NEVER_OPEN, PATH_ISOLATION, WARNINGS
from pipeline.recipe.settings import MAX_COUNT, one_of, reject
from pipeline.storage.addresses import PROTOCOLS, Address, Url, expanded, is_url
from pipeline.storage.remote_folder import CONDITIONAL_WRITES

MANIFEST_SUFFIXES = (".parquet", ".jsonl", ".csv")
"""Suffixes of manifest files."""

_VERSIONLESS_CACHES = frozenset(["filecache", "blockcache", "cached"])
"""Caching protocols of fsspec that hide a remote file's size and version."""


def check_path(value: object) -> object:
    """Return `value` unless it is a string that does not name a local path."""
    if isinstance(value, str) and is_url(value):
        reject(f'this path must be a local folder, got the address "{value}"', "use a local folder")
    return check_address(value)


def check_num_resident_blocks(value: object) -> object:
    """Return `value` if it is "none", "auto" or a number of blocks or layers."""
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
    if value not in ("none", "auto") and not is_number:
        shown = json.dumps(value, default=str)
        reject(
            f"offload must be none, auto or a number, at least 0, got {shown}",
            "write none or auto, or 0 or more",
        )
    return value


def check_address(value: object) -> object:
    """Return `value` unless it is a string that is neither a local path nor an address fsspec can open."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        reject("the path must not be empty", "name a folder; relative paths start at the project root")
    if "\0" in value:
        reject("the path must not contain a NUL character", "remove the character")
    home = value.rpartition("::")[2].partition("/")[0]
    if home.startswith("~") and expanded(home) == Path(home):
        reject(
            f"the path must start with the home folder of a user of this machine, got {value!r}",
            f"correct the user name, or write ./{value} for a folder with this name",
        )
    # In a text, spaces and quotes end an address. Here they can be part of a password.
    if has_credentials(re.sub(r"[\s\"'<>]", "_", value)):
        reject(
            "the address must not contain a user or password, because recipes, reports and LoRAs are shared",
            "remove the part before @; set credentials in the service's own variables and files, and other "
            "options in fsspec's (FSSPEC_<PROTOCOL>_<OPTION>)",
        )
    if is_url(value):
        _check_protocols(Url(value))
    return value


def check_output(value: object) -> object:
    """Return `value` unless it is an address without conditional writes, which a lease needs."""
    if not isinstance(value, str) or not is_url(value):
        return value
    protocol = Url(value).protocol.lower()
    if protocol not in CONDITIONAL_WRITES | {"file", "local"}:
        reject(
            f"output_dir must be a folder, or an address on S3, got {value}: other services lack the "
            "conditional writes that keep two machines from training one run",
            f"use a folder or an s3:// address; datasets and cache_dir may be at {protocol}://",
        )
    return value


def _check_protocols(url: Url) -> None:
    from fsspec.registry import available_protocols  # slow to import, and only needed for remote addresses

    known = PROTOCOLS.intersection(available_protocols())
    *inner, last = url.links

    # The last link of a chain may be a local path, as in zip://photos::data/photos.zip.
    links = [*inner, last] if "://" in last else inner
    for protocol in [link.partition("://")[0] for link in links]:
        if protocol in _VERSIONLESS_CACHES:
            reject(
                f"the address must not use {protocol}, which hides changes of remote files, got {url}",
                f"remove {protocol}::, or use simplecache::, which caches for one process only",
            )
        if protocol in PROTOCOLS - known:
            what = f'the address must use a protocol that fsspec supports, got "{protocol}" in {url}'
            reject(what, f"install fsspec's package for {protocol}")
        if protocol not in PROTOCOLS:
            close = difflib.get_close_matches(protocol, known, n=1, cutoff=0.5)
            fix = f"did you mean {close[0]}?" if close else "use s3, gs, abfs, https, sftp, zip or a folder"
            what = f'the address must use a protocol in docs/remote_storage.md, got "{protocol}" in {url}'
            reject(what, fix)


def check_not_manifest(value: object) -> object:
    """Return `value` unless it is a string that names a manifest."""
    if isinstance(value, str) and PurePath(value).suffix.lower() in MANIFEST_SUFFIXES:
        reject(f'this path must be a folder, got the manifest "{value}"', "name a folder")
    return value


def check_suffix(value: str) -> str:
    """Return `value` if it is a dot followed by characters other than path separators."""
    if "/" in value or "\\" in value or value.strip(". \t\n") == "":
        reject(f"the suffix must be a dot and letters, got {value!r}", "use a suffix such as .txt")
    if not value.startswith("."):
        reject(f'the suffix must start with a dot, got "{value}"', f"use .{value}")
    return value


def check_suffixes(value: object) -> object:
    """Return one suffix, or a list of suffixes as a tuple, unless a suffix is invalid or listed twice."""
    if isinstance(value, str):
        return check_suffix(value)
    fix = "use a suffix such as .txt, or a list such as [.txt, .caption]"
    if not isinstance(value, list | tuple) or not value:
        reject(f"the suffix must be text or a list of texts, got {json.dumps(value, default=str)}", fix)

    suffixes = cast("Sequence[object]", value)
    for suffix in suffixes:
        if not isinstance(suffix, str):
            reject(f"each suffix must be text, got {json.dumps(suffix, default=str)}", fix)
        check_suffix(suffix)
    repeated = [suffix for index, suffix in enumerate(suffixes) if suffix in suffixes[:index]]
    if repeated:
        reject(f"each suffix must be listed once, got {repeated[0]} twice", f"remove one {repeated[0]}")
    return tuple(suffixes)


def check_exclude(value: str) -> str:
    """Return `value` if it can match a path below a folder."""
    parts = value.strip("/").split("/")
    if "\\" in value:
        with_slashes = value.replace("\\", "/")
        reject(f"a pattern must separate folders with /, got {value!r}", f"use {with_slashes}")
    if any(part.strip() in ("", ".", "..") for part in parts):
        what = f"a pattern must be a name, or a path below the dataset's folder, got {value!r}"
        reject(what, 'use a pattern such as masks, "*-mask.png" or old/drafts')
    return value


def check_fallback(value: str | None) -> str | None:
    """Return `value` unless it is a text without a visible character."""
    if value is not None and not value.strip():
        reject(
            "captions.fallback must be a caption, filename or null, got a text without words",
            "write a caption, or fallback: filename; text.caption_dropout trains on the empty caption",
        )
    return value


def check_encoding(value: str) -> str:
    """Return `value` if it names a text encoding of Python."""
    # `codecs.lookup` would also find codecs that are not text encodings, such as base64.
    try:
        "a".encode(value)
    except (LookupError, ValueError):
        reject(
            f"the encoding must be a text encoding of Python, got {value!r}",
            "use utf-8, utf-16, cp1252 or latin-1",
        )
    return value


# Dagster's own rule for the owners of assets, which it applies when the definitions load.
_OWNER = re.compile(r"team:.+|[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7}")


def check_owner(value: str) -> str:
    """Return `value` if it is an email address, or a team's name after `team:`."""
    if not _OWNER.fullmatch(value):
        reject(
            f"an owner must be an email address or a team, got {value!r}",
            "write an address such as ada@example.com, or a team such as team:art",
        )
    return value


def check_base(value: str) -> str:
    """Return `value` if it names a model: a path or a Hub id that is more than slashes."""
    if not value.strip("/"):
        reject(
            f"model.base must name a model, got {value!r}",
            "write a Hub id such as owner/name, or a folder in diffusers' layout",
        )
    return value


def check_timezone(value: str) -> str:
    """Return `value` if it names a time zone of this machine's database."""
    from zoneinfo import ZoneInfo  # only for recipes with the key

    try:
        ZoneInfo(value)
    except (KeyError, ValueError, OSError):  # unknown, not relative, or a folder of the database
        reject(
            f"recache.timezone must be a time zone, got {value!r}",
            "write a name such as Europe/Berlin or UTC",
        )
    return value


def check_gate(value: str) -> str:
    """Return `value` if it names a gate that a recipe may allow."""
    if value == PATH_ISOLATION.name:
        reject(
            f"{value} cannot be allowed: it protects the dataset from being overwritten",
            "remove it, and use separate folders for datasets, cache_dir and output_dir",
        )
    if value in NEVER_OPEN:
        reject(
            f"{value} cannot be allowed: training would fail on a missing or corrupt cache entry",
            "remove it, and run the cache job, which encodes missing and corrupt entries again",
        )
    if value not in GATES:
        close = difflib.get_close_matches(value, GATES, n=1)
        fix = f"did you mean {close[0]}?" if close else f"use {one_of(GATES)}"
        reject(f"checks.allow must list names of gates, got {value!r}", fix)
    return value


def check_warning(value: str) -> str:
    """Return `value` if it names a warning, which a recipe may turn into a gate."""
    if value not in WARNINGS:
        close = difflib.get_close_matches(value, WARNINGS, n=1)
        fix = f"did you mean {close[0]}?" if close else f"use {one_of(WARNINGS)}"
        fix = "remove it: it is a gate already" if value in {*GATES, *NEVER_OPEN} else fix
        reject(f"checks.gates must list names of warnings, got {value!r}", fix)
    return value


def _address(value: object, as_path: ValidatorFunctionWrapHandler) -> Address:
    return Url(value) if isinstance(value, str) and is_url(value) else as_path(value)


# The schema describes a path, so that a value of the wrong type is reported once. A union of Path and Url
# would report it once per member.
_PATH_OR_URL = [WrapValidator(_address), BeforeValidator(check_address), PlainSerializer(str)]
if TYPE_CHECKING:
    RecipeAddress = Address
    FolderAddress = Address
    OutputFolder = Path
else:
    RecipeAddress = Annotated[Path, *_PATH_OR_URL]
    FolderAddress = Annotated[Path, *_PATH_OR_URL, BeforeValidator(check_not_manifest)]
    # A recipe file may name an address. Loading replaces it with the path of the working copy.
    _wrap, *_checks = _PATH_OR_URL
    _output = (BeforeValidator(check_output), *_checks, BeforeValidator(check_not_manifest))
    OutputFolder = Annotated[Path, _wrap, *_output]
FolderPath = Annotated[Path, BeforeValidator(check_path), BeforeValidator(check_not_manifest)]
