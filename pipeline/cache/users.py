"""Users of a cache: each output folder registers the keys that it needs, so that `latentline gc` keeps them.

    <cache_dir>/outputs/<id>.json             path of the output folder, its machine and name of the recipe
    <cache_dir>/outputs/<id>-<kind>.keys      keys of this kind that its last job needs, 32 bytes each
    <output_dir>/cache_user.txt               random text, part of <id>: two machines may use the same path
    <machine_state_dir>/speed.json            encoding speed on this machine, for estimates

All machines that use an output folder at an address are one user, and its <id> is a hash of the address.

A job registers before it checks the first entry. So the keys of a running job are registered too, including
those of captions that belong to no sample. Reading an entry needs no registration.
"""

from __future__ import annotations

import hashlib
import json
import platform
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pipeline.cache.folder import CacheFolder, cache_folder
from pipeline.errors import StoreError
from pipeline.storage.addresses import Address, Url, address
from pipeline.storage.atomic import write_bytes
from pipeline.storage.os_errors import as_file_access_error
from pipeline.storage.remote_folder import ACCESS_FIX

FOLDER = "outputs"
"""Name of the folder with the registrations."""

_RANDOM_FILE = "cache_user.txt"
_KEY_BYTES = 32
_SPEED_FILE = "speed.json"


@dataclass(frozen=True)
class CacheUser:
    """An output folder that uses the cache.

    Attributes:
        output_dir: Path or address as registered; it may be deleted or not mounted.
        recipe: Name of the recipe.
        keys: Hex keys of all kinds that its last jobs need.
        machine: Host name of the machine that registered it; "" for an address, and in registrations of
            earlier versions.
    """

    output_dir: Address
    recipe: str
    keys: frozenset[str]
    machine: str = ""

    @property
    def is_here(self) -> bool:
        """Whether `output_dir` is an address or a path of this machine."""
        return self.machine in ("", platform.node())


def register_user(
    cache_dir: Address, output_dir: Address, *, recipe: str, kind: str, keys: Iterable[str]
) -> None:
    """Register the keys of `kind` that `output_dir` needs, in place of its earlier keys of that kind.

    An unchanged registration is not written.

    Args:
        cache_dir: Address of the cache; created if it does not exist.
        output_dir: Output folder of the recipe. All machines that use the same address are one user.
        recipe: Name of the recipe.
        kind: Kind of the entries.
        keys: Keys of 64 hex digits each.

    Raises:
        StoreError: The cache cannot be written.
    """
    folder = cache_folder(cache_dir)
    machine = "" if isinstance(output_dir, Url) else platform.node()
    names = {"output_dir": str(output_dir), "recipe": recipe, "machine": machine}
    identity = json.dumps(names, ensure_ascii=False) + "\n"
    sorted_keys = pl.Series(keys, dtype=pl.String).unique().sort()
    try:
        user_id = _user_id(output_dir, folder)
        _replace(folder, f"{FOLDER}/{user_id}.json", identity.encode("utf-8"))
        _replace(folder, f"{FOLDER}/{user_id}-{kind}.keys", bytes.fromhex("".join(sorted_keys)))
    except OSError as err:
        raise _write_error(cache_dir, folder, err) from err


def read_users(cache_dir: Address) -> Iterator[CacheUser]:
    """Yield every output folder that uses the cache, sorted by id.

    Raises:
        StoreError: A registration cannot be read, so the needed entries cannot be determined.
    """
    for _, user in _users(cache_dir, cache_folder(cache_dir)):
        yield user


def _users(cache_dir: Address, folder: CacheFolder) -> Iterator[tuple[str, CacheUser]]:
    """Yield the id and the registration of every user, sorted by id."""
    try:
        names = folder.names(FOLDER)
    except OSError as err:
        raise StoreError(
            f"the cache cannot be listed: {err}", where=folder.where(FOLDER), fix=access_fix(cache_dir, err)
        ) from err

    for name in names:
        if not name.endswith(".json"):
            continue
        user_id = name.removesuffix(".json")
        try:
            identity = json.loads(folder.read(f"{FOLDER}/{name}"))
            key_files = [each for each in names if each.startswith(f"{user_id}-") and each.endswith(".keys")]
            keys = [_keys(each, folder.read(f"{FOLDER}/{each}")) for each in key_files]
            user = CacheUser(
                address(identity["output_dir"]),
                identity["recipe"],
                frozenset().union(*keys),
                str(identity.get("machine", "")),
            )
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise StoreError(
                f"a registration in the cache cannot be read: {err}",
                where=folder.where(f"{FOLDER}/{name}"),
                fix="run the cache job of the recipe that wrote it again; if that recipe no longer exists, "
                f"delete the files {user_id}*",
            ) from err
        yield user_id, user


def unregister_user(cache_dir: Address, output_dir: Address) -> bool:
    """Delete the registrations of an address, or of a folder of this machine; return False if it has none.

    Entries that no other user needs become orphans.

    Raises:
        StoreError: A registration cannot be read.
    """
    folder = cache_folder(cache_dir)
    ids = [
        user_id
        for user_id, user in _users(cache_dir, folder)
        if user.output_dir == output_dir and user.is_here
    ]
    for name in folder.names(FOLDER) if ids else ():
        if name.startswith(tuple(ids)):
            with suppress(FileNotFoundError):
                folder.delete(f"{FOLDER}/{name}")
    return bool(ids)


def record_speed(machine_state_dir: Path, kind: str, seconds_per_cost: float) -> None:
    """Record how long one unit of cost took to encode; a failure to write is ignored."""
    speeds = {**_speeds(machine_state_dir), kind: seconds_per_cost}
    with suppress(OSError):
        write_bytes(machine_state_dir / _SPEED_FILE, json.dumps(speeds).encode())


def recorded_speed(machine_state_dir: Path, kind: str) -> float | None:
    """Return the seconds that one unit of cost took last time; None if nothing was recorded."""
    return _speeds(machine_state_dir).get(kind)


def _speeds(machine_state_dir: Path) -> dict[str, float]:
    try:
        return dict(json.loads((machine_state_dir / _SPEED_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _user_id(output_dir: Address, folder: CacheFolder) -> str:
    """Return the id of an output folder: a hash of its address, or of its path and of `cache_user.txt`.

    If a local folder has no such file, it is written. A registration of an earlier version, with a hash of
    the path alone as its id, gets the new id.
    """
    path = str(output_dir).encode("utf-8", "surrogateescape")
    if isinstance(output_dir, Url):
        return _short_hash(path)
    file = output_dir / _RANDOM_FILE
    with suppress(FileNotFoundError):
        return _short_hash(path + b"\n" + file.read_bytes())

    random = uuid.uuid4().hex.encode()
    old_id, new_id = _short_hash(path), _short_hash(path + b"\n" + random)
    old_names = [name for name in folder.names(FOLDER) if name.startswith(old_id)]
    for name in old_names:
        folder.replace(f"{FOLDER}/{name.replace(old_id, new_id)}", folder.read(f"{FOLDER}/{name}"))
    write_bytes(file, random)
    for name in old_names:
        folder.delete(f"{FOLDER}/{name}")
    return new_id


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _replace(folder: CacheFolder, name: str, data: bytes) -> None:
    with suppress(FileNotFoundError):
        if folder.read(name) == data:
            return
    folder.replace(name, data)


def access_fix(cache_dir: Address, err: OSError) -> str:
    """Return the fix for an error of reading, writing or deleting a file of the cache."""
    if isinstance(cache_dir, Url):
        return ACCESS_FIX
    cause = as_file_access_error(err)
    return cause.fix if cause else "make sure that cache_dir is on a working disk"


def _write_error(cache_dir: Address, folder: CacheFolder, err: OSError) -> StoreError:
    cause = as_file_access_error(err)
    return StoreError(
        f"the cache cannot be written: {cause.what if cause else err}",
        where=folder.where(FOLDER),
        fix=access_fix(cache_dir, err),
    )


def _keys(name: str, raw: bytes) -> frozenset[str]:
    if len(raw) % _KEY_BYTES:
        raise ValueError(f"the size of {name} must be a multiple of {_KEY_BYTES}, got {len(raw)}")
    return frozenset(raw[at : at + _KEY_BYTES].hex() for at in range(0, len(raw), _KEY_BYTES))
