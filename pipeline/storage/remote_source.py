"""Datasets behind an fsspec address: in an object store, an archive or on a web server."""

from __future__ import annotations

import io
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.errors import DatasetError
from pipeline.escaping import without_secrets
from pipeline.storage.addresses import Address, Url
from pipeline.storage.file_systems import (
    archive_version,
    join_path,
    missing_package,
    open_url,
    request_lock,
    require_listed_protocols,
    stat_from_info,
    text_number,
)
from pipeline.storage.http_client import answers_up_to
from pipeline.storage.regular_files import (
    MAX_FILE_BYTES,
    RefusedFileError,
    require_size,
)
from pipeline.storage.remote_folder import ACCESS_FIX, UnreachableError
from pipeline.storage.retry import is_transient, retry
from pipeline.storage.source import (
    DATASET_KEY,
    MAX_BUFFERED_BYTES,
    MAX_TEXT_BYTES,
    NO_FILE,
    LocalSource,
    Opened,
    Source,
    Stat,
    stat_array,
)

REMOTE_THREADS = 16
"""Number of concurrent requests to a remote source; each mostly waits for the server."""

# Apache's listing has about 250 bytes for each file.
MAX_LISTING_BYTES = 50_000_000
"""Maximum size of a web page that lists a folder."""

Answer = TypeVar("Answer")


class ListedPath(NamedTuple):
    """One item of a remote folder.

    Attributes:
        path: Path below the source.
        stat: Stat of a file; None for a folder or a special item.
        is_special: True for an item that is neither a file nor a folder, or has an unusable name.
    """

    path: str
    stat: Stat | None
    is_special: bool = False


class RemoteSource(Source):
    """A folder on a file system opened by fsspec: an object store, an archive or a web server."""

    threads = REMOTE_THREADS
    compared_columns = (0, 1, 3)

    def __init__(
        self,
        url: Url,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        repeat_requests: bool = True,
        key: str = DATASET_KEY,
    ) -> None:
        """Open the file system.

        With `repeat_requests`, requests wait for a service that is away for a short time.

        Raises:
            DatasetError: A package is missing, or the address cannot be opened.
        """
        super().__init__(url, max_file_bytes=max_file_bytes, key=key)
        try:
            require_listed_protocols(url)
            # Before the archive is opened: if it is replaced in between, its members have changed for the
            # next scan.
            archive = archive_version(url)
            self._files, base = open_url(url)
        except Exception as err:
            raise unreadable_error(url, err, key) from err
        self._base = base.rstrip("/")
        self._default_version = text_number(url if archive is None else f"{url}\0{archive[0]}")
        self._min_changed_ns = 0 if archive is None else archive[1]
        self._lock = request_lock(self._files)
        self._repeat_requests = repeat_requests
        self._has_answered = False

    def __repr__(self) -> str:
        return f"RemoteSource({without_secrets(str(self.address))!r})"

    def open(self, path: str, num_bytes: int = 0) -> Opened:
        """See `Source.open`."""
        require_size(num_bytes, self.max_file_bytes)
        if num_bytes <= MAX_BUFFERED_BYTES:
            return io.BytesIO(self.read(path, num_bytes))
        try:
            return self._request(lambda: self._files.open(self._full(path), "rb"))
        except Exception as err:
            raise _as_os_error(err) from err

    def read(self, path: str, num_bytes: int = 0) -> bytes:
        """See `Source.read`; `num_bytes` is the listed size, if known."""
        if self._files.async_impl:
            # The listed size may be wrong, but a file that is listed as small is not read by parts.
            return self._read(path, MAX_BUFFERED_BYTES if num_bytes else self.max_file_bytes)

        def read_member() -> bytes:
            # An archive lists its members' sizes, and a member can be larger. Reading one byte more than
            # listed shows the difference without unpacking all of it.
            full = self._full(path)
            listed = num_bytes or self._files.info(full).get("size") or self.max_file_bytes
            require_size(listed, self.max_file_bytes)
            with self._files.open(full, "rb") as file:
                return bytes(file.read(listed + 1))

        try:
            return self._request(read_member)
        except RefusedFileError:
            raise
        except Exception as err:
            raise _as_os_error(err) from err

    def open_text(self, path: str, num_bytes: int = 0) -> Opened:
        """See `Source.open_text`."""
        if self._files.async_impl and num_bytes <= MAX_BUFFERED_BYTES:
            return io.BytesIO(self._read(path, MAX_TEXT_BYTES))
        return self.open(path, num_bytes)

    def stat_open(self, file: Opened, listed: Stat) -> Stat:
        """See `Source.stat_open`."""
        # Only the size is current, because a service reports times and versions with listings.
        position = file.tell()
        size = file.seek(0, os.SEEK_END)
        file.seek(position)
        return (size, *listed[1:])

    def read_start(self, path: str, num_bytes: int) -> bytes:
        """Return the first `num_bytes` bytes of a file."""
        return self._read(path, MAX_BUFFERED_BYTES, start=0, end=num_bytes)[:num_bytes]

    def read_parts(self, path: str, num_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of a large file in order; `num_bytes` is its listed size.

        Each part is a request, which is repeated alone.

        Raises:
            RefusedFileError: See `Source.open`.
            OSError: The file cannot be read, or has another size.
        """
        require_size(num_bytes, self.max_file_bytes)
        if num_bytes <= MAX_BUFFERED_BYTES:
            parts = iter([self.read(path, num_bytes)])
        else:
            size = MAX_BUFFERED_BYTES
            starts = range(0, num_bytes, size)
            parts = (self._read(path, size, start=at, end=min(at + size, num_bytes)) for at in starts)
        num_read = 0
        for part in parts:
            num_read += len(part)
            yield part
        if num_read != num_bytes:
            raise OSError(f"it has {num_read:,} bytes, but {num_bytes:,} were listed")

    def stats(self, paths: Sequence[str]) -> npt.NDArray[np.int64]:
        """See `Source.stats`."""
        # One listing for each folder takes fewer requests than one stat for each file.
        folders = sorted({posixpath.dirname(path) for path in paths})
        stat_of: dict[str, Stat | None] = {}
        with ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="stats") as pool:
            for items in pool.map(self._list_or_empty, folders):
                stat_of.update((item.path, item.stat) for item in items)
        return stat_array([stat_of.get(path) or NO_FILE for path in paths])

    def sibling_names(self, path: str) -> list[str]:
        """See `Source.sibling_names`."""
        try:
            return [posixpath.basename(item.path) for item in self.list_folder(posixpath.dirname(path))]
        except DatasetError:
            return []

    def list_folder(self, folder: str) -> list[ListedPath]:
        """Return the items of a folder, "" for the source itself, without using a cached listing.

        Raises:
            DatasetError: The folder does not exist, is a file, or cannot be listed. Its cause is fsspec's
                error.
        """

        def list_items() -> list[ListedPath]:
            self._files.invalidate_cache()
            with answers_up_to(MAX_LISTING_BYTES):
                infos: list[dict[str, Any]] = self._files.ls(self._full(folder), detail=True)

            # fsspec lists a file as a folder that contains only itself.
            listed = [(info["name"].strip("/"), info["type"]) for info in infos]
            if listed == [(self._full(folder).strip("/"), "file")]:
                raise NotADirectoryError("it is a file")
            return list(self._items(folder, infos))

        try:
            return self._request(list_items)
        except Exception as err:
            raise unreadable_error(self.where(folder) if folder else self.address, err, self.key) from err

    def _read(self, path: str, max_bytes: int, **limits: int) -> bytes:
        try:
            with answers_up_to(max_bytes):
                return self._request(lambda: bytes(self._files.cat_file(self._full(path), **limits)))
        except Exception as err:
            raise _as_os_error(err) from err

    def _request(self, send: Callable[[], Answer]) -> Answer:
        """Return the answer to a request; if the service is away and has answered before, wait for it."""

        def send_alone() -> Answer:
            with self._lock:
                return send()

        # Before the first answer, the address may be wrong, so a request fails immediately. After a minute of
        # waiting, so do all following requests.
        try:
            answer = retry(send_alone) if self._repeat_requests and self._has_answered else send_alone()
        except Exception as err:
            self._has_answered = not is_transient(err)
            raise
        self._has_answered = True
        return answer

    def _list_or_empty(self, folder: str) -> list[ListedPath]:
        try:
            return self.list_folder(folder)
        except DatasetError as err:
            if isinstance(err.__cause__, (FileNotFoundError, NotADirectoryError)):
                return []
            raise

    def _items(self, folder: str, infos: Sequence[Mapping[str, Any]]) -> Iterator[ListedPath]:
        top = self._full(folder).strip("/")
        without_size: list[str] = []
        for info in infos:
            # Listings may contain a marker of the folder itself, and web pages contain more links.
            full_name = str(info["name"]).strip("/")
            name = full_name[len(top) :].lstrip("/") if full_name.startswith(top) else ""
            if not name or "/" in name or name.startswith("?"):
                continue

            path = f"{folder}/{name}" if folder else name
            if info["type"] != "file":
                yield ListedPath(path, None, is_special=info["type"] != "directory")
            elif "\0" in name:  # allowed in keys of object stores, but not in paths
                yield ListedPath(path, None, is_special=True)
            elif info.get("size") is None:
                without_size.append(path)
            else:
                yield ListedPath(path, self._stat(info))

        with ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="stats") as pool:
            full_infos = pool.map(self._info, without_size)
            for path, info in zip(without_size, full_infos, strict=True):
                yield ListedPath(path, self._stat(info))

    def _info(self, path: str) -> Mapping[str, Any]:
        """Return fsspec's information about a file; an empty file if there is none."""
        try:
            return self._files.info(self._full(path))
        except FileNotFoundError as err:
            # fsspec raises it for all failures. Reading a file that is missing, or that is redirected to
            # another server, fails with the reason, which rejects one sample instead of the dataset.
            if is_transient(err):
                raise
            return {"size": 0}

    def _stat(self, info: Mapping[str, Any]) -> Stat:
        num_bytes, time_ns, changed_ns, version = stat_from_info(info)
        if version:
            return num_bytes, time_ns, changed_ns, version

        # A file at another address, or in another version of an archive, must not look unchanged.
        return num_bytes, time_ns, max(changed_ns, self._min_changed_ns), self._default_version

    def _full(self, path: str) -> str:
        return join_path(self._base, path)


def source_at(
    address: Address,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    follow_links: bool = False,
    key: str = DATASET_KEY,
) -> LocalSource | RemoteSource:
    """Return the source of the files below a path or URL; a local path need not exist.

    With `follow_links`, the caption files of a local source may be links to files outside it. `key` is the
    recipe key of the address, for messages.

    Raises:
        DatasetError: The URL cannot be opened.
    """
    if isinstance(address, Url):
        return RemoteSource(address, max_file_bytes=max_file_bytes, key=key)
    return LocalSource(address, max_file_bytes=max_file_bytes, follow_links=follow_links, key=key)


def unreadable_error(address: Address | str, err: Exception, key: str = DATASET_KEY) -> DatasetError:
    """Return fsspec's error about an address as an error with a fix; `key` is its key in the recipe."""
    text = " ".join(str(err).split()) or type(err).__name__
    is_dataset = key == DATASET_KEY
    subject = "the dataset address" if is_dataset else f"the address in {key}"
    if isinstance(err, ImportError) and isinstance(address, Url):
        what = f"{subject} needs a package that is not installed: {text}"
        return DatasetError(what, where=str(address), fix=f"pip install {missing_package(address)}")
    if isinstance(err, (FileNotFoundError, NotADirectoryError)):
        what = f"{subject} does not exist: {text}"
        fix = f"correct the server or bucket, folder or archive in {key}"
        return DatasetError(what, where=str(address), fix=fix)
    what = f"{'the dataset' if is_dataset else subject} cannot be read: {type(err).__name__}: {text}"
    return DatasetError(what, where=str(address), fix=ACCESS_FIX)


def _as_os_error(err: Exception) -> OSError:
    """Return an error of the operating system unchanged, and any other as an `UnreachableError`."""
    if isinstance(err, FileNotFoundError) or (isinstance(err, OSError) and err.errno is not None):
        return err
    return UnreachableError(without_secrets(f"{type(err).__name__}: {' '.join(str(err).split())[:500]}"))
