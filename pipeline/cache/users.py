"""Users of a cache: each output folder registers the keys that it needs, so that `latentline gc` keeps them.

    <cache_dir>/outputs/<id>.json             path of the output folder, its machine and name of the recipe
    <cache_dir>/outputs/<id>-<kind>.keys      keys of this kind that its last job needs, 32 bytes each
    <cache_dir>/outputs/<id>-run-<run>.keys   keys of all kinds that an unfinished training run reads
    <output_dir>/cache_user.txt               random text, part of <id>: two machines may use the same path
    <machine_state_dir>/speed.json            encoding speed on this machine, for estimates

All machines that use an output folder at an address are one user, and its <id> is a hash of the address.

A job registers before it checks the first entry. So the keys of a running job are registered too, including
those of captions that belong to no sample. A training registers what it reads under the name of its run:
other machines cannot read the folder of the run, and the next cache job replaces the keys of the last one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from pipeline.cache.backends import cache_folder
from pipeline.cache.folder import CacheFolder, FileStat
from pipeline.errors import StoreError
from pipeline.storage.addresses import Address, Url, address
from pipeline.storage.atomic import write_bytes
from pipeline.storage.os_errors import as_file_access_error
from pipeline.storage.remote_folder import ACCESS_FIX

FOLDER = "outputs"
"""Name of the folder with the registrations."""

_RANDOM_FILE = "cache_user.txt"
_KEY_BYTES = 32
_KEYS_SUFFIX = ".keys"
_RUN = "run-"
_KEYS_AT_ONCE = 65_536
_SPEED_FILE = "speed.json"

_MAX_LISTINGS = 3
"""Number of times that registrations are listed at most, if some are deleted while they are read."""


@dataclass(frozen=True)
class CacheUser:
    """An output folder that uses the cache.

    Attributes:
        output_dir: Path or address as registered; it may be deleted or not mounted.
        recipe: Name of the recipe.
        job_keys: Hex keys that its last jobs need, by kind.
        machine: Host name of the machine that registered it; "" for an address, and in registrations of
            earlier versions.
        run_keys: Hex keys that each registered training run reads.
        id: Id of the output folder.
    """

    output_dir: Address
    recipe: str
    job_keys: Mapping[str, frozenset[str]]
    machine: str = ""
    run_keys: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    id: str = field(default="", compare=False)

    @property
    def keys(self) -> frozenset[str]:
        """Hex keys of all kinds that its last jobs need."""
        return frozenset().union(*self.job_keys.values())

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
    try:
        user_id = _register_identity(folder, output_dir, recipe)
        _replace(folder, _keys_file(user_id, kind), _packed(keys))
    except OSError as err:
        raise _write_error(cache_dir, folder, err) from err


def register_run(
    cache_dir: Address, output_dir: Address, *, recipe: str, run: str, keys: Iterable[str]
) -> None:
    """Register the keys that a training run reads, until `unregister_run`.

    Args:
        cache_dir: Address of the cache.
        output_dir: Output folder of the recipe.
        recipe: Name of the recipe.
        run: Run id.
        keys: Keys of 64 hex digits each.

    Raises:
        StoreError: The cache cannot be written.
    """
    folder = cache_folder(cache_dir)
    try:
        user_id = _register_identity(folder, output_dir, recipe)
        folder.replace(_keys_file(user_id, f"{_RUN}{run}"), _packed(keys))
    except OSError as err:
        cause = as_file_access_error(err)
        raise StoreError(
            "the entries that the training reads cannot be registered in the cache, so that another machine "
            f"could delete them with latentline gc: {cause.what if cause else err}",
            where=folder.where(FOLDER),
            fix=access_fix(cache_dir, err),
        ) from err


def unregister_run(cache_dir: Address, output_dir: Address, run: str) -> bool:
    """Delete the registration of a training run; return False if it has none.

    Raises:
        StoreError: The cache cannot be listed, or the registration cannot be deleted.
    """
    return unregister_kinds(cache_dir, output_dir, [f"{_RUN}{run}"])


def unregister_kinds(cache_dir: Address, output_dir: Address, kinds: Iterable[str]) -> bool:
    """Delete the registered keys of some kinds; return False if there are none.

    Raises:
        StoreError: The cache cannot be listed, or a registration cannot be deleted.
    """
    folder, user_id, name = cache_folder(cache_dir), known_user_id(output_dir), FOLDER
    if user_id is None:
        return False
    try:
        # A cache that may only be read refuses to delete even what does not exist.
        registered = {f"{FOLDER}/{each}" for each in folder.names(FOLDER)}
        found = sorted(registered & {_keys_file(user_id, kind) for kind in kinds})
        for name in found:
            with suppress(FileNotFoundError):
                folder.delete(name)
    except OSError as err:
        raise StoreError(
            f"a registration in the cache cannot be deleted: {err.strerror or err}",
            where=folder.where(name),
            fix=access_fix(cache_dir, err),
        ) from err
    return bool(found)


def _register_identity(folder: CacheFolder, output_dir: Address, recipe: str) -> str:
    """Register an output folder, and return its id."""
    machine = "" if isinstance(output_dir, Url) else platform.node()
    names = {"output_dir": str(output_dir), "recipe": recipe, "machine": machine}
    identity = json.dumps(names, ensure_ascii=False) + "\n"
    user_id = _user_id(output_dir, folder)
    _replace(folder, f"{FOLDER}/{user_id}.json", identity.encode("utf-8"))
    return user_id


def _keys_file(user_id: str, kind: str) -> str:
    return f"{FOLDER}/{user_id}-{kind}{_KEYS_SUFFIX}"


def _packed(keys: Iterable[str]) -> bytes:
    """Return the distinct keys in order, 32 bytes each."""
    sorted_keys = pl.Series(keys, dtype=pl.String).unique().sort()
    packed = bytearray()
    # Slices, because one Python string for each of millions of keys takes several times the memory.
    for start in range(0, len(sorted_keys), _KEYS_AT_ONCE):
        packed += bytes.fromhex("".join(sorted_keys[start : start + _KEYS_AT_ONCE]))
    return bytes(packed)


def read_users(cache_dir: Address) -> Iterator[CacheUser]:
    """Yield every output folder that uses the cache, sorted by id.

    Raises:
        StoreError: A registration cannot be read, so the needed entries cannot be determined.
    """
    yield from Registrations(cache_dir).read()


class Registrations:
    """Registrations in a cache, for a process that reads them repeatedly."""

    def __init__(self, cache_dir: Address) -> None:
        """Use the registrations of a cache; nothing is read yet."""
        self._cache_dir = cache_dir
        self._folder = cache_folder(cache_dir)
        self._keys: dict[str, tuple[FileStat, frozenset[str]]] = {}

    def read(self) -> list[CacheUser]:
        """Return every output folder that uses the cache, sorted by id.

        A file of keys is read again only if its stat has changed.

        Raises:
            StoreError: A registration cannot be read, so the needed entries cannot be determined.
        """
        users: list[CacheUser] = []
        for _ in range(_MAX_LISTINGS):
            stats, names = self._list()
            self._keys = {name: known for name, known in self._keys.items() if name in stats}
            identities = [name for name in names if name.endswith(".json")]
            deleted: list[str] = []
            users = [self._user(name.removesuffix(".json"), names, stats, deleted) for name in identities]
            # What is deleted under one name may be registered under another since the listing.
            if not deleted:
                break
        return users

    def _list(self) -> tuple[dict[str, FileStat], list[str]]:
        try:
            # The stats are read first: a file that changes after that is read again by the next call.
            return self._folder.stats(FOLDER), self._folder.names(FOLDER)
        except OSError as err:
            raise StoreError(
                f"the cache cannot be listed: {err}",
                where=self._folder.where(FOLDER),
                fix=access_fix(self._cache_dir, err),
            ) from err

    def _user(
        self, user_id: str, names: Iterable[str], stats: Mapping[str, FileStat], deleted: list[str]
    ) -> CacheUser:
        """Return an output folder, and append the names of keys that were deleted since the listing.

        Files are replaced atomically, so keys that are missing were unregistered: the end of a job does that.

        Raises:
            StoreError: A registration cannot be read.
        """
        name, run_keys, job_keys = f"{user_id}.json", dict[str, frozenset[str]](), dict[str, frozenset[str]]()
        try:
            identity = json.loads(self._folder.read(f"{FOLDER}/{name}"))
            output_dir, recipe = address(identity["output_dir"]), identity["recipe"]
            machine = str(identity.get("machine", ""))
            for name in names:
                if not (name.startswith(f"{user_id}-") and name.endswith(_KEYS_SUFFIX)):
                    continue
                kind = name.removeprefix(f"{user_id}-").removesuffix(_KEYS_SUFFIX)
                try:
                    keys = self._read_keys(name, stats.get(name))
                except FileNotFoundError:
                    deleted.append(name)
                    continue
                if kind.startswith(_RUN):
                    run_keys[kind.removeprefix(_RUN)] = keys
                else:
                    job_keys[kind] = keys
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise StoreError(
                f"a registration in the cache cannot be read: {err}",
                where=self._folder.where(f"{FOLDER}/{name}"),
                fix="run the cache job of the recipe that wrote it again, or its training if the name of the "
                f"file contains {_RUN}; if that recipe no longer exists, delete the files {user_id}*",
            ) from err
        return CacheUser(output_dir, recipe, job_keys, machine, run_keys, user_id)

    def _read_keys(self, name: str, stat: FileStat | None) -> frozenset[str]:
        known = self._keys.get(name)
        if known is not None and known[0] == stat:
            return known[1]
        keys = _keys(name, self._folder.read(f"{FOLDER}/{name}"))
        if stat is not None:
            self._keys[name] = stat, keys
        return keys


def unregister_user(cache_dir: Address, output_dir: Address) -> bool:
    """Delete the registrations of an address, or of a folder of this machine; return False if it has none.

    Entries that no other user needs become orphans.

    Raises:
        StoreError: A registration cannot be read.
    """
    folder = cache_folder(cache_dir)
    ids = [user.id for user in read_users(cache_dir) if user.output_dir == output_dir and user.is_here]
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


def known_user_id(output_dir: Address) -> str | None:
    """Return the id of an output folder; None for a local folder that was never registered or is missing.

    Raises:
        OSError: The folder cannot be read.
    """
    path = _path_bytes(output_dir)
    if isinstance(output_dir, Url):
        return _short_hash(path)
    try:
        return _short_hash(path + b"\n" + (output_dir / _RANDOM_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _path_bytes(output_dir: Address) -> bytes:
    return str(output_dir).encode("utf-8", "surrogateescape")


def _user_id(output_dir: Address, folder: CacheFolder) -> str:
    """Return the id of an output folder: a hash of its address, or of its path and of `cache_user.txt`.

    If a local folder has no such file, it is written. A registration of an earlier version, with a hash of
    the path alone as its id, gets the new id.
    """
    if (known_id := known_user_id(output_dir)) is not None:
        return known_id

    assert isinstance(output_dir, Path), "addresses have an id"
    path, file = _path_bytes(output_dir), output_dir / _RANDOM_FILE
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
