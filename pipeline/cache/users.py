"""Who needs which entries of a store: each output folder registers itself in `cache_dir`.

    <cache_dir>/outputs/<id>.json             which output folder, which recipe
    <cache_dir>/outputs/<id>-<kind>.keys      the keys that its last job of this kind asked for
    <cache_dir>/speed.json                    how long encoding took on this machine, for estimates;
                                              of a cache elsewhere in output_dir

A job registers before it looks at the first entry, so that the keys of a running job are known as well as
those of a finished one, captions without a table row among them. Nothing here is needed to read an entry:
`latentline gc` alone asks who needs what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pipeline.cache.folder import CacheFolder, cache_folder
from pipeline.errors import StoreError
from pipeline.storage.addresses import Address, Url
from pipeline.storage.atomic import write_bytes
from pipeline.storage.columns import distinct, slices
from pipeline.storage.os_errors import as_file_access_error
from pipeline.storage.remote_folder import ACCESS_FIX

FOLDER = "outputs"
_KEY_BYTES = 32
_SPEED_FILE = "speed.json"


@dataclass(frozen=True)
class CacheUser:
    """One output folder that uses the store.

    Attributes:
        output_dir: As it was registered; it may be gone, or not mounted.
        recipe: The recipe's name.
        keys: Hex keys that its last jobs asked for, of all kinds.
    """

    output_dir: Path
    recipe: str
    keys: frozenset[str]


def register_user(
    cache_dir: Address, output_dir: Path, *, recipe: str, kind: str, keys: Iterable[str]
) -> None:
    """Say that `output_dir` needs the entries of `kind` with these keys, and no others of that kind.

    Nothing is written where the same is said already.

    Args:
        cache_dir: The store's root; made if it is not there.
        output_dir: Of the recipe that asks.
        recipe: Its name.
        kind: Of the entries.
        keys: 64 hex digits each.

    Raises:
        StoreError: The cache cannot be written.
    """
    folder, name = cache_folder(cache_dir), _id(output_dir)
    said = json.dumps({"output_dir": str(output_dir), "recipe": recipe}, ensure_ascii=False) + "\n"
    ordered = distinct(pl.Series(keys, dtype=pl.String))
    raw = b"".join(bytes.fromhex("".join(part)) for part in slices(ordered))
    try:
        _replace(folder, f"{FOLDER}/{name}.json", said.encode("utf-8"))
        _replace(folder, f"{FOLDER}/{name}-{kind}.keys", raw)
    except OSError as err:
        refusal = as_file_access_error(err)
        what = f"the cache cannot be written: {refusal.what if refusal else err}"
        fix = "see that cache_dir lies on a working disk"
        if isinstance(cache_dir, Url):
            fix = ACCESS_FIX
        elif refusal:
            fix = refusal.fix
        raise StoreError(what, where=folder.where(FOLDER), fix=fix) from err


def read_users(cache_dir: Address) -> Iterator[CacheUser]:
    """Every output folder that uses the store, by name.

    Raises:
        StoreError: A registration cannot be read, so that nobody knows which entries it needs.
    """
    folder = cache_folder(cache_dir)
    try:
        names = folder.names(FOLDER)
    except OSError as err:
        raise StoreError(
            f"the cache cannot be listed: {err}", where=folder.where(FOLDER), fix=ACCESS_FIX
        ) from err
    for name in names:
        if not name.endswith(".json"):
            continue
        stem = name.removesuffix(".json")
        try:
            said = json.loads(folder.read(f"{FOLDER}/{name}"))
            own = [each for each in names if each.startswith(f"{stem}-") and each.endswith(".keys")]
            keys = [_keys(each, folder.read(f"{FOLDER}/{each}")) for each in own]
            yield CacheUser(Path(said["output_dir"]), said["recipe"], frozenset().union(*keys))
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise StoreError(
                f"a registration in the cache cannot be read: {err}",
                where=folder.where(f"{FOLDER}/{name}"),
                fix="run the cache job of the recipe that wrote it again, or delete the file and those with "
                f"its name if that recipe is gone: {stem}*",
            ) from err


def unregister_user(cache_dir: Address, output_dir: Path) -> bool:
    """Strike out an output folder, so that entries only it needs become orphans; False if it is unknown."""
    folder, stem = cache_folder(cache_dir), _id(output_dir)
    found = [name for name in folder.names(FOLDER) if name.startswith(stem)]
    for name in found:
        with suppress(FileNotFoundError):
            folder.delete(f"{FOLDER}/{name}")
    return bool(found)


def record_speed(memory: Path, kind: str, seconds_per_cost: float) -> None:
    """Remember how long encoding took on this machine, for `speed`; losing it costs nothing."""
    with suppress(OSError):
        write_bytes(memory / _SPEED_FILE, json.dumps({**_speeds(memory), kind: seconds_per_cost}).encode())


def recorded_speed(memory: Path, kind: str) -> float | None:
    """Seconds for one unit of a job's cost when entries of this kind were last encoded; None if never."""
    return _speeds(memory).get(kind)


def _speeds(memory: Path) -> dict[str, float]:
    try:
        return dict(json.loads((memory / _SPEED_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _id(output_dir: Path) -> str:
    return hashlib.sha256(str(output_dir).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _replace(folder: CacheFolder, name: str, data: bytes) -> None:
    with suppress(FileNotFoundError):
        if folder.read(name) == data:
            return
    folder.replace(name, data)


def _keys(name: str, raw: bytes) -> frozenset[str]:
    if len(raw) % _KEY_BYTES:
        raise ValueError(f"{name} has {len(raw)} bytes, no multiple of {_KEY_BYTES}")
    return frozenset(raw[at : at + _KEY_BYTES].hex() for at in range(0, len(raw), _KEY_BYTES))
