"""Content-addressed store at an address that fsspec opens: an object store, another host's disk, memory.

Object stores make an object visible only when it is complete; on any other file system, a file is renamed
when it is complete. If the service can put an object on the condition that none exists (S3, Google Cloud
Storage), the first of several writers wins, as on a local disk. Otherwise a later writer may replace the
entry of an earlier one; both are valid.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import DATA_START, Array, EntrySpec, Kind, WrongEntryError
from pipeline.cache.entry_state import NO_STAT, EntryStat
from pipeline.cache.folder import RemoteCacheFolder, remote_file_stat
from pipeline.cache.pack_copies import PackCopies
from pipeline.cache.pack_format import PACKS
from pipeline.cache.pack_index import digests_of
from pipeline.cache.packed_entries import PackedEntries
from pipeline.cache.store import DISPLACED_SUFFIX, Store
from pipeline.escaping import without_secrets
from pipeline.recipe import project_root
from pipeline.recipe.deployment import load_deployment, scratch_folder
from pipeline.storage.addresses import Address, Url
from pipeline.storage.atomic import temp_name
from pipeline.storage.remote_folder import ACCESS_FIX, RemoteFolder

_MAX_SINGLE_REQUESTS = 32
"""Number of entries that are always stat one by one."""

_LISTED_TOGETHER = 2_500
"""Estimated number of entries that one listing returns at most."""

_LISTING_THREADS = 4
"""Number of concurrent listings: with `_LISTED_TOGETHER`, it bounds the memory to about 45 MB. More threads
save no time, because they wait for the interpreter."""

_ENTRIES_PER_REQUEST = 16
"""Number of listed entries that take as much processor time as a request for one entry.

Measured with s3fs and Ceph's gateway on one machine: a listed entry takes 0.30 ms in this process and 0.04 ms
in the service, a request 4.1 and 2.7 ms, and a request for a missing entry 5.8 and 5.7 ms."""

_MIN_SAMPLED = 16
"""Number of listed entries from which the number of all entries is estimated, with an error of about 25%."""

_MAX_PREFIX_DIGITS = 4
"""Largest number of digits of a key by which entries are listed."""

_FOLDER_DIGITS = 2
"""Number of digits of a key that name its folder."""


def store_at(address: Address) -> Store:
    """Return the store at a recipe's `cache_dir`.

    Raises:
        StoreError: A package is missing, or the address cannot be opened.
    """
    return FsspecStore(address) if isinstance(address, Url) else Store(address)


class FsspecStore(Store):
    """Entries below an fsspec address.

    An entry's stat is its size and, in place of an inode, a number for its version. Without a version it is
    the size and the modification time. An entry with neither is read by each run.
    """

    threads = 16
    readers = 8
    fix = ACCESS_FIX

    def __init__(self, url: Url) -> None:
        """Open the file system without reading from it.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        self.folder = RemoteFolder(url)
        super().__init__(Path())
        self.address = url

    @cached_property
    def packed(self) -> PackedEntries:
        """See `Store.packed`."""
        assert isinstance(self.address, Url)
        return PackedEntries(RemoteCacheFolder(self.address, self.folder))

    @cached_property
    def copies(self) -> PackCopies:
        """Local copies of packs, which are read instead of the remote ones."""
        max_bytes = round(load_deployment().pack_copies_gb * 1e9)
        return PackCopies(scratch_folder(project_root()) / PACKS, max_bytes, self._download)

    @cached_property
    def _copied_folder(self) -> RemoteFolder:
        """Connection for copies: SFTP and SMB send one request at a time, and a copy may take minutes."""
        assert isinstance(self.address, Url)
        return RemoteFolder(self.address)

    def _download(self, name: str, path: Path) -> None:
        self._copied_folder.download(name, path)

    def read(self, spec: EntrySpec) -> dict[str, Array]:
        """See `Store.read`; an entry in a pack precedes its single file, for which two requests would fail.

        Packs are used when the first single entry is missing.
        """
        try:
            arrays = self.packed.read_known(spec, lambda: self.copies)
        except OSError as err:
            raise self._packs_error(spec.kind, err) from err
        return super().read(spec) if arrays is None else arrays

    def stats(self, kind: Kind, keys: Iterable[str]) -> npt.NDArray[np.int64]:
        """See `Store.stats`.

        Few entries are stat one by one, and so are entries that are a small part of a large cache. Otherwise
        all entries whose keys have the same first digits are listed together. The number of entries in the
        cache is estimated from those with similar keys. Memory does not grow with the entries of others.

        Raises:
            StoreError: The service does not answer.
        """
        names = [self.path(EntrySpec(kind, key, {})).as_posix() for key in keys]
        listings = self._listings(kind, names)
        found: dict[str, EntryStat] = {}
        if listings:
            wanted = set(names)
            with ThreadPoolExecutor(_LISTING_THREADS) as pool:
                for listed in pool.map(lambda each: self._listed(each[0], each[1], wanted), listings):
                    found |= listed
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                stats = zip(names, pool.map(self._stat_or_missing, names), strict=True)
                found = {name: stat for name, stat in stats if stat is not None}
        rows = [astuple(found[name]) if name in found else NO_STAT for name in names]
        unfound = bytearray(digests_of(PurePosixPath(name).stem for name in names if name not in found))
        return self._with_packed(kind, np.array(rows, np.int64).reshape(-1, 4), unfound)

    def _listings(self, kind: Kind, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return folder and prefix of the listings that take least time; none if single requests do."""
        if len(names) <= _MAX_SINGLE_REQUESTS:
            return []

        num_entries = self._estimate(names[0])
        lengths = range(_MAX_PREFIX_DIGITS + 1) if self.folder.lists_prefixes else (0, _FOLDER_DIGITS)
        fits = (digits for digits in lengths if num_entries / 16**digits <= _LISTED_TOGETHER)
        num_digits = next(fits, lengths[-1])

        prefixes = sorted({PurePosixPath(name).name[:num_digits] for name in names})
        num_listed = num_entries * len(prefixes) / 16**num_digits
        if num_listed > len(names) * _ENTRIES_PER_REQUEST:
            return []
        if num_digits < _FOLDER_DIGITS:
            return [(kind, prefix) for prefix in prefixes]
        return [(f"{kind}/{prefix[:_FOLDER_DIGITS]}", prefix) for prefix in prefixes]

    def _estimate(self, name: str) -> int:
        """Estimate the number of entries of a kind from those whose keys begin as the key of one entry."""
        folder, _, file = name.rpartition("/")
        num_digits = num_listed = 0
        # A prefix of four digits selects 150 of 10 million entries, and hardly any of a small cache.
        longest = _MAX_PREFIX_DIGITS if self.folder.lists_prefixes else _FOLDER_DIGITS
        for num_digits in range(longest, _FOLDER_DIGITS - 1, -1):
            num_listed = len(self._list(folder, file[:num_digits]))
            if num_listed >= _MIN_SAMPLED:
                break
        return num_listed * 16**num_digits

    def _listed(self, folder: str, prefix: str, wanted: Container[str]) -> dict[str, EntryStat]:
        """Return the stats of the wanted entries in a folder whose paths below it begin with `prefix`."""
        listed = self._list(folder, prefix)
        return {name: _entry_stat(info) for name, info in listed.items() if name in wanted}

    def _list(self, folder: str, prefix: str = "") -> dict[str, dict[str, Any]]:
        try:
            return self.folder.list_files(folder, prefix=prefix)
        except OSError as err:
            raise self._access_error(Path(folder), err, "listed") from err

    def _stat_or_missing(self, name: str) -> EntryStat | None:
        try:
            return self._stat(Path(name))
        except (FileNotFoundError, WrongEntryError):
            return None
        except OSError as err:
            raise self._access_error(Path(name), err, "read") from err

    def _shown(self, path: Path) -> str:
        return f"{without_secrets(str(self.address)).rstrip('/')}/{path.as_posix()}"

    def _stat(self, path: Path) -> EntryStat:
        info = self.folder.info(path.as_posix())
        if info["type"] != "file":
            raise WrongEntryError("its path must be a regular file, got a folder")
        return _entry_stat(info)

    def _read_with_stat(self, path: Path) -> tuple[bytes, EntryStat]:
        stat = self._stat(path)
        return self._read(path), stat

    def _read(self, path: Path) -> bytes:
        return self.folder.read(path.as_posix())

    def _read_start(self, path: Path) -> bytes:
        return self.folder.read(path.as_posix(), DATA_START)

    def _delete(self, path: Path) -> None:
        self.folder.remove(path.as_posix())

    def _place(self, spec: EntrySpec, path: Path, raw: bytes) -> bool:
        name = path.as_posix()
        if self.folder.put_if_absent(name, raw):
            return True

        if self.folder.is_folder(name):
            aside = PurePosixPath(name).with_name(f"{path.stem}{temp_name()}{DISPLACED_SUFFIX}")
            self.folder.move_folder(name, str(aside))
        elif self.check(spec).valid:
            return False
        self.folder.put(name, raw)
        return True


def _entry_stat(info: Mapping[str, Any]) -> EntryStat:
    return EntryStat(*remote_file_stat(info))
