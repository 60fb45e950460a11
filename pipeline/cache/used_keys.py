"""Keys of the cache entries that jobs use, so that `latentline gc` deletes only what no job used for a while.

    <cache_dir>/used/<sha256>.keys    list of sorted keys, 32 bytes each, named by the hash of its content
    <cache_dir>/used/since            written with the first list
    <cache_dir>/used/clock            replaced to learn the time of the file system or service
    <cache_dir>/used/lock             local cache: held while a job records its keys, and while gc deletes
    <cache_dir>/used/deleting-<id>    remote cache: exists while a gc deletes

A job records its keys before it checks the first entry. Once an hour while it runs, it marks its lists again
if they were last marked more than two hours ago. `gc` reads the lists before each of its deletions, and no
job relies on an entry between the two.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.background import in_background
from pipeline.cache.backends import access_fix, cache_folder
from pipeline.cache.folder import CacheFile, CacheFolder
from pipeline.errors import StoreError
from pipeline.log import Log
from pipeline.storage.addresses import Address
from pipeline.storage.os_errors import as_file_access_error, is_write_denied

if TYPE_CHECKING:
    import threading

# A Python set of the keys' hex digits would take five times the memory.
Keys: TypeAlias = npt.NDArray[np.bytes_]
"""Sorted distinct keys, 32 bytes each."""

FOLDER = "used"
"""Name of the folder with the lists."""

LIST_SUFFIX = ".keys"

_SINCE, _CLOCK, _LOCK = "since", "clock", "lock"

_ANNOUNCEMENT = "deleting-"

# A running job marks its lists after three hours at most, so the service may also fail for three hours.
RUNNING_S = 6 * 3600.0
"""Age up to which a list may belong to a running job."""

DEAD_S = 300.0
"""Time after which an announced deletion counts as ended."""

# Not at every job, so that a job with unchanged entries writes little.
_MARK_S = 2 * 3600.0
"""Age from which a list is marked again."""

_MARK_EVERY_S = 3600.0

_KEY_BYTES = 32
_KEYS_AT_ONCE = 65_536

_MAX_LIST_KEYS = 16_384
"""Number of keys from which a list is divided by the next digit of the keys, at 512 kB."""

_AT_ONCE = 16
"""Number of lists that are read or written at the same time."""

_MERGED_AT_ONCE = 1_000_000
"""Smallest number of keys for which the used keys are sorted again."""

_POLL_S = 1.0


def key_array(keys: Iterable[str]) -> Keys:
    """Return hex keys as `Keys`."""
    packed, remaining = bytearray(), iter(keys)
    # Slices, because one Python string for each of millions of keys takes several times the memory.
    while part := "".join(islice(remaining, _KEYS_AT_ONCE)):
        packed += bytes.fromhex(part)

    # `np.unique` puts texts into a hash table before it sorts them, which takes three times as long.
    ordered = np.sort(np.frombuffer(packed, f"S{_KEY_BYTES}"))
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def are_in(wanted: Keys, keys: Keys) -> npt.NDArray[np.bool_]:
    """Return which of the wanted keys, in any order, are among the sorted `keys`."""
    if not len(keys):
        return np.zeros(len(wanted), np.bool_)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return keys[at] == wanted


class KeyLists:
    """The keys that one job uses, as lists in its cache."""

    def __init__(
        self,
        cache_dir: Address,
        groups: Iterable[Iterable[str]],
        *,
        log: Log,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Divide hex keys into lists; nothing is written yet.

        Each group has its own lists, so that jobs with an equal group share them. `log` receives warnings,
        and a line if a deletion delays the job.
        """
        self._folder = cache_folder(cache_dir)
        self._log = log
        self._sleep = sleep
        parts = (part for group in groups for part in _divided(key_array(group)))
        self._lists = {f"{hashlib.sha256(part).hexdigest()}{LIST_SUFFIX}": part for part in parts}

    def mark(self) -> None:
        """Record the keys as used now. After that, no gc deletes their entries.

        A cache that may only be read gets no lists, and the job continues with a warning.

        Raises:
            StoreError: The cache cannot be written for another reason.
        """
        with self._access():
            was_written = self._write_old()
            # On a local disk, the lock has excluded a deletion.
            while not isinstance(self._folder.address, Path):
                self._wait_for_deletions()
                # A gc that listed expired lists may have deleted the ones that were written after its
                # listing.
                if not was_written or not self._write_old():
                    break

    @contextmanager
    def kept_marked(self, every_s: float = _MARK_EVERY_S) -> Generator[None]:
        """Mark the lists again from time to time during the body, which may take days."""

        def mark_until_ended(ended: threading.Event) -> None:
            while not ended.wait(every_s):
                try:
                    with self._access():
                        self._write_old()
                except StoreError as err:
                    # The last marks count for hours, so a later attempt is early enough.
                    self._log(f"warning: {err.what} ({err.where}); it is tried again in {every_s:.0f} s")

        # In a thread, because the body waits in a launcher that may be another program's client.
        with in_background(mark_until_ended, name="latentline-used"):
            yield

    @contextmanager
    def _access(self) -> Generator[None]:
        try:
            yield
        except OSError as err:
            cause = as_file_access_error(err)
            reason = cause.what if cause else str(err)
            what = f"the entries that the job uses cannot be recorded in the cache: {reason}"
            where = self._folder.where(FOLDER)
            if not is_write_denied(err):
                raise StoreError(what, where=where, fix=access_fix(self._folder.address, err)) from err
            self._lists = {}  # one warning is enough
            self._log(f"warning: {what} ({where}); do not run latentline gc --delete until the job has ended")

    def _write_old(self) -> bool:
        """Write the lists that are missing or that were marked long ago; return whether there were any."""
        if not self._lists:
            return False
        root = self._folder.address
        # Equal keys give equal lists, whatever the recipe or machine, so a list that exists is only replaced
        # by itself, which renews its modification time.
        with _locked(root) if isinstance(root, Path) else nullcontext():
            now_s, files = _listed(self._folder)
            marked_s = {file.name: file.modified_s for file in files}
            old = [name for name in self._lists if name not in marked_s]
            if now_s is not None:
                old += [name for name in self._lists if (marked_s.get(name) or now_s) < now_s - _MARK_S]
            if _SINCE not in marked_s:
                self._folder.replace(f"{FOLDER}/{_SINCE}", b"")
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="latentline-used") as pool:
                list(pool.map(lambda name: self._folder.replace(f"{FOLDER}/{name}", self._lists[name]), old))
        return bool(old)

    def _wait_for_deletions(self) -> None:
        # Deletions that are announced later read the lists that exist now, so the job does not wait for them.
        announced, waited_s = self._announced(), 0.0
        if announced:
            self._log("waiting for latentline gc, which is deleting entries of the cache")
        while announced and waited_s < DEAD_S:
            self._sleep(_POLL_S)
            waited_s += _POLL_S
            announced &= self._announced()

    def _announced(self) -> set[str]:
        if not any(file.name.startswith(_ANNOUNCEMENT) for file in self._folder.files_in(FOLDER)):
            return set()
        now_s, files = _listed(self._folder)
        oldest_s = -math.inf if now_s is None else now_s - DEAD_S
        return {
            file.name
            for file in files
            if file.name.startswith(_ANNOUNCEMENT) and (file.modified_s or math.inf) >= oldest_s
        }


class UsedKeys:
    """Keys in all lists of a cache that were marked recently, as `latentline gc` reads them.

    Attributes:
        oldest_kept_s: Modification time from which a list or an entry is kept, by the clock of the cache.
        since_s: Time at which the first list was written; None if the cache has no lists.
        keys: Used keys as of the last `read`.
        expired: Sizes of the lists that were not marked for so long, and of announcements as old, by path.
    """

    def __init__(self, cache_dir: Address, keep_s: float, also: Iterable[str] = ()) -> None:
        """Read the clock of the cache, and nothing else.

        `keep_s` is the age in seconds up to which a list counts. The hex keys in `also` count without a list.

        Raises:
            StoreError: The cache cannot be read.
        """
        self._folder = cache_folder(cache_dir)
        self._read_lists: set[str] = set()
        self.keys: Keys = key_array(also)
        self.expired: dict[str, int] = {}
        self.since_s: float | None = None
        with self._access():
            self.oldest_kept_s = _time_s(self._folder) - keep_s

    @property
    def num_lists(self) -> int:
        """Number of lists that were marked recently, as of the last `read`."""
        return len(self._read_lists)

    def read(self) -> Keys:
        """Return the keys that are used now. Only lists that appeared since the last call are read.

        Raises:
            StoreError: A list cannot be read, so the used keys are unknown.
        """
        with self._access():
            files = self._folder.files_in(FOLDER)
        self.since_s = next((file.modified_s for file in files if file.name == _SINCE), None)
        young = {file.name for file in files if file.name.endswith(LIST_SUFFIX) and not self.is_old(file)}
        self.expired = {
            f"{FOLDER}/{file.name}": file.num_bytes
            for file in files
            if file.name.startswith(_ANNOUNCEMENT) or file.name.endswith(LIST_SUFFIX)
            if self.is_old(file)
        }

        new, parts = sorted(young - self._read_lists), list[Keys]()
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="latentline-used") as pool:
            for start in range(0, len(new), _AT_ONCE):
                parts += pool.map(self._read_list, new[start : start + _AT_ONCE])
                # Lists of several versions of a dataset share most keys, so they are merged in between.
                if sum(map(len, parts)) >= max(len(self.keys), _MERGED_AT_ONCE):
                    self._merge(parts)
        self._merge(parts)
        self._read_lists |= young
        return self.keys

    def is_old(self, file: CacheFile) -> bool:
        """Return whether a file was written before `oldest_kept_s`; one of unknown age was not."""
        return file.modified_s is not None and file.modified_s < self.oldest_kept_s

    @contextmanager
    def deleting(self) -> Generator[float]:
        """Read the lists, and let no job record keys until the end of the body.

        Yields:
            Time of this machine, in seconds since 1970, at which the body must stop deleting files.

        Raises:
            StoreError: A list cannot be read, or the deletion cannot be announced.
        """
        root = self._folder.address
        # The system releases the lock of a local cache if its holder is killed.
        if isinstance(root, Path):
            with ExitStack() as stack:
                with self._access():
                    stack.enter_context(_locked(root))
                self.read()
                yield math.inf
            return

        # Object stores have no locks. A job that has recorded its keys waits until this file is gone, or
        # older than `DEAD_S` because its gc was killed. This gc stops in time, after half of `DEAD_S`.
        announcement = f"{FOLDER}/{_ANNOUNCEMENT}{uuid.uuid4().hex}"
        # A machine may be suspended, so this is not a monotonic time.
        until_s = time.time() + DEAD_S / 2
        with self._access():
            self._folder.replace(announcement, b"")
        try:
            self.read()
            yield until_s
        finally:
            with suppress(OSError):
                self._folder.delete(announcement)

    def _merge(self, parts: list[Keys]) -> None:
        if parts:
            self.keys = np.unique(np.concatenate([self.keys, *parts]))
            parts.clear()

    def _read_list(self, name: str) -> Keys:
        path = f"{FOLDER}/{name}"
        try:
            with self._access():
                content = self._folder.read(path)
        except FileNotFoundError:
            return key_array([])  # another gc with a shorter --keep has deleted it
        digest = hashlib.sha256(content).hexdigest()
        if digest != name.removesuffix(LIST_SUFFIX) or len(content) % _KEY_BYTES:
            raise StoreError(
                "a list of used entries is damaged, so the entries that it names are unknown",
                where=self._folder.where(path),
                fix="delete the file, and run the jobs that use the cache again before latentline gc",
            )
        return np.frombuffer(content, f"S{_KEY_BYTES}")

    @contextmanager
    def _access(self) -> Generator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as err:
            raise StoreError(
                f"the lists of used entries cannot be read: {err.strerror or err}",
                where=self._folder.where(FOLDER),
                fix=access_fix(self._folder.address, err),
            ) from err


def _divided(keys: Keys) -> Iterator[bytes]:
    """Yield lists of keys with the same first digits, as many digits as the number of keys requires."""
    num_digits = 0
    while len(keys) > _MAX_LIST_KEYS * 16**num_digits:
        num_digits += 1

    # Big-endian, so that the numbers are in the order of the keys.
    first_bytes = np.frombuffer(keys.tobytes(), ">u4")[:: _KEY_BYTES // 4]
    starts = np.searchsorted(first_bytes, np.arange(16**num_digits) << (32 - 4 * num_digits))
    for part in np.split(keys, starts[1:]):
        if len(part):
            yield part.tobytes()


def _time_s(folder: CacheFolder) -> float:
    # A folder without lists may not be a cache, and is not changed.
    if not folder.files_in(FOLDER):
        return time.time()
    try:
        return _listed(folder)[0] or time.time()
    except OSError as err:
        if not is_write_denied(err):
            raise
        return time.time()  # what may not be written is not deleted either


def _listed(folder: CacheFolder) -> tuple[float | None, list[CacheFile]]:
    """Return the time of the file system or service, None if it has no times, and all files in the folder."""
    # The file system or service gives this file its time, so the clocks of machines need not agree.
    folder.replace(f"{FOLDER}/{_CLOCK}", b"")
    files = folder.files_in(FOLDER)
    return next((file.modified_s for file in files if file.name == _CLOCK), None), files


def is_used_file(name: str) -> bool:
    """Return whether this module writes a file of this name in `FOLDER`."""
    is_named = name.endswith(LIST_SUFFIX) or name.startswith(_ANNOUNCEMENT)
    return is_named or name in (_SINCE, _CLOCK, _LOCK)


@contextmanager
def _locked(root: Path) -> Generator[None]:
    path = root / FOLDER / _LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(PermissionError):
            os.fchmod(descriptor, 0o666)  # all users of a shared cache hold the same lock
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
