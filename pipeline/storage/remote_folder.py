"""Remote folders: files at an address, with atomic writes and repeated requests."""

from __future__ import annotations

import inspect
import mimetypes
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pipeline.errors import StoreError
from pipeline.escaping import without_secrets
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import temp_name
from pipeline.storage.file_systems import join_path, missing_package, open_url, protocols_of, request_lock
from pipeline.storage.retry import is_failed_precondition, is_unsupported, retry

Answer = TypeVar("Answer")

ACCESS_FIX = (
    "check that the address is correct, that the service responds and that this user has access; set "
    "credentials in the service's own variables and files, and other options in fsspec's "
    "(FSSPEC_<PROTOCOL>_<OPTION>)"
)
"""Fix for an error raised by a remote service."""

OBJECT_STORES = frozenset(
    ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "obs", "cos", "tos", "memory"]
)
"""Protocols without folders, on which objects appear atomically when they are written."""

_ANSWERING_PROTOCOLS = frozenset(["s3", "s3a"])
"""Protocols with a `pipe_file` that passes conditions on, and returns the answer with the new version."""

CONDITIONAL_WRITES = _ANSWERING_PROTOCOLS | {"memory"}
"""Protocols with both writes that a lease needs: create a file only if it does not exist, and replace it only
if it still has the version that was read.

    s3, s3a            both; tried with Ceph's gateway and moto
    memory             both; within one process, for tests
    gs, abfs, others   at most the first one: their fsspec packages pass no version on
    sftp, smb, ...     none
"""

# The store of fsspec's memory file system belongs to the process, as this lock does.
_MEMORY_LOCK = threading.Lock()

MAX_SINGLE_PUT_BYTES = 2**26
"""Maximum size of a file that is uploaded by one request."""


class UnreachableError(OSError):
    """A remote file that could not be read, although it may exist."""


class FileChangedError(OSError):
    """A file was not replaced, because it no longer has the expected version."""


class NoConditionalWritesError(OSError):
    """The service refuses every write with a condition, or ignores the condition."""


class RemoteFolder:
    """Files below a remote address that can be read, listed, replaced and removed.

    Names are relative to the address, with slashes. Every failed request raises an `OSError`, also if the
    service's library has its own exception. While the service is unavailable, a request is sent again for up
    to `RETRY_S` seconds.

    Attributes:
        url: Address of the folder.
        base: Path of the folder within its file system.
        files: The `fsspec.AbstractFileSystem`.
        lists_prefixes: Whether the service can list the files that have a prefix, without all others.
    """

    def __init__(
        self, url: Url, *, key: str = "cache_dir", log: Callable[[str], object] | None = None
    ) -> None:
        """Open the file system without reading anything.

        `key` is the recipe key that sets the address, for messages. `log` receives a line when a request is
        sent again for the first time.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        self.url = url
        self._log = log
        kind = key.removesuffix("_dir")
        try:
            self.files, base = open_url(url)
        except ImportError as err:
            what = f"the {kind} address needs a package that is not installed: {err}"
            raise StoreError(what, where=str(url), fix=f"pip install {missing_package(url)}") from err
        except Exception as err:
            what = f"the {kind} address cannot be opened: {type(err).__name__}: {err}"
            raise StoreError(what, where=str(url), fix=f"correct {key}; {ACCESS_FIX}") from err
        self.base = base.rstrip("/")

        self._writes_atomically = bool(protocols_of(self.files) & OBJECT_STORES)
        self._answers_versions = bool(protocols_of(self.files) & _ANSWERING_PROTOCOLS)
        self._is_memory = "memory" in protocols_of(self.files)

        self._can_create_exclusively = "mode" in inspect.signature(self.files.pipe_file).parameters
        # Without it, s3fs requests the size first, to read large files in several parts.
        is_concurrent = "max_concurrency" in inspect.signature(self.files.cat_file).parameters
        self._at_once = {"max_concurrency": 1} if is_concurrent else {}
        self.lists_prefixes = "prefix" in inspect.signature(self.files.find).parameters
        self._lock = request_lock(self.files)

        # A cached listing would hide files written by other machines.
        listings: Any = getattr(self.files, "dircache", None)
        if hasattr(listings, "use_listings_cache"):
            listings.use_listings_cache = False

    def info(self, name: str) -> dict[str, Any]:
        """Return the file system's information about a file or folder.

        Raises:
            FileNotFoundError: It does not exist.
        """
        return self._request(lambda: dict(self.files.info(self._full(name))))

    def read(self, name: str, num_bytes: int | None = None, *, start: int = 0) -> bytes:
        """Return the bytes of a file, or `num_bytes` of them from `start`.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        limits = self._at_once if num_bytes is None else {"start": start, "end": start + num_bytes}
        return self._request(lambda: bytes(self.files.cat_file(self._full(name), **limits)))

    def put(self, name: str, data: bytes, *, expected: str = "") -> str:
        """Replace a file; a reader sees either the old bytes or the new ones.

        With `expected`, only this version of the file is replaced.

        Returns:
            The new version, which `version` and listings return too; empty if the answer does not contain it.

        Raises:
            FileChangedError: The file has another version, or does not exist.
            NoConditionalWritesError: `expected` was given, and the service does not support it.
            OSError: The file cannot be written, and is unchanged.
        """
        if not expected:
            return _answered_version(self._replace(name, lambda full: self.files.pipe_file(full, data)))
        if self._is_memory:
            return self._put_in_memory(name, data, expected)
        if not self._answers_versions:
            raise NoConditionalWritesError(f"{self.url.protocol} cannot replace a given version of a file")

        condition = {"IfMatch": expected.strip('"')}  # Ceph compares without quotes; AWS accepts both
        try:
            answer = self._replace(name, lambda full: self.files.pipe_file(full, data, **condition))
        except OSError as err:
            if isinstance(err, FileNotFoundError) or is_failed_precondition(err):
                raise FileChangedError(f"{name} has been replaced") from err
            if is_unsupported(err):
                raise NoConditionalWritesError(f"the service refuses conditional writes: {err}") from err
            raise
        return _answered_version(answer)

    def _put_in_memory(self, name: str, data: bytes, expected: str) -> str:
        with _MEMORY_LOCK:
            try:
                is_unchanged = self.version(name) == expected
            except FileNotFoundError:
                is_unchanged = False
            if not is_unchanged:
                raise FileChangedError(f"{name} has been replaced")
            self.files.pipe_file(self._full(name), data)
            return self.version(name)

    def version(self, name: str) -> str:
        """Return the version of a file; empty if the service has none.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        info = self.info(name)
        return str(info["created"]) if self._is_memory else _answered_version(info)

    def upload(self, path: Path, name: str, *, create: bool = False) -> str:
        """Replace a file by a local one like `put`, without reading a large one into memory.

        With `create`, an existing file is not replaced if the service has conditional writes. Ceph ignores
        that for a large file.

        Returns:
            The new version as `put`; empty for a large file.

        Raises:
            FileChangedError: `create` was given, and the file exists when the upload ends.
            OSError: The local file cannot be read, or the remote one cannot be written and is unchanged.
        """
        if not self._answers_versions:
            self._replace(name, lambda full: self.files.put_file(str(path), full))
            return ""

        options: dict[str, str] = {"mode": "create"} if create else {}
        try:
            # A large file is written in parts, and fsspec does not return the answer to the last part.
            if path.stat().st_size > MAX_SINGLE_PUT_BYTES:
                self._replace(name, lambda full: self.files.put_file(str(path), full, **options))
                return ""
            data = path.read_bytes()

            # s3fs's `put_file` sets the type of large files, so small files get one too.
            if content_type := mimetypes.guess_type(path.name)[0]:
                options["ContentType"] = content_type
            answer = self._replace(name, lambda full: self.files.pipe_file(full, data, **options))
        except OSError as err:
            if create and is_failed_precondition(err):
                raise FileChangedError(f"{name} exists") from err
            raise
        return _answered_version(answer)

    def download(self, name: str, path: Path) -> None:
        """Write a file's bytes to a local path, which is not replaced atomically.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        self._request(lambda: self.files.get_file(self._full(name), str(path)))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a file atomically, and return True; False if it exists.

        If the connection breaks and the request is repeated, False may refer to the file of this call.

        Raises:
            NoConditionalWritesError: The service does not support it.
        """
        if not (self._writes_atomically and self._can_create_exclusively):
            raise NoConditionalWritesError(f"{self.url.protocol} cannot create a file only if it is missing")
        try:
            self._request(lambda: self.files.pipe_file(self._full(name), data, mode="create"))
        except FileExistsError:
            return False
        except OSError as err:
            # s3fs gives the refusal of AWS and Ceph the number EINVAL, which it also has for other errors.
            if is_failed_precondition(err):
                return False
            if is_unsupported(err):
                raise NoConditionalWritesError(f"the service refuses conditional writes: {err}") from err
            raise
        return True

    def list_files(self, folder: str = "", *, prefix: str = "") -> dict[str, dict[str, Any]]:
        """Return the information about every file at any depth below a folder, by name.

        A missing folder has no files. `prefix` is the beginning of the paths below the folder. Only with
        `lists_prefixes` is it faster than listing the folder.
        """

        def find() -> dict[str, dict[str, Any]]:
            self.files.invalidate_cache()
            if not self.lists_prefixes:
                return _walk_files(self.files, self._full(folder))
            limits = {"prefix": prefix} if prefix else {}
            found: dict[str, dict[str, Any]] = self.files.find(self._full(folder), detail=True, **limits)
            return found

        try:
            infos = self._request(find)
        except FileNotFoundError:
            return {}

        by_name = {self._relative(path): info for path, info in infos.items()}
        start = join_path(folder, prefix)
        return {
            name: info for name, info in by_name.items() if info["type"] == "file" and name.startswith(start)
        }

    def list_level(self, folder: str = "") -> list[tuple[str, dict[str, Any]]]:
        """Return names and information of the files and folders directly in a folder; none if it is missing.

        They are in the order of the names of all files: a folder sorts as if its name ended in a slash.
        """

        def list_folder() -> list[dict[str, Any]]:
            self.files.invalidate_cache()
            infos: list[dict[str, Any]] = self.files.ls(self._full(folder), detail=True)
            return infos

        try:
            infos = self._request(list_folder)
        except FileNotFoundError:
            return []
        named = [(self._relative(info["name"]), info) for info in infos]
        # A folder may have an object with its own name and a slash, which is part of its listing.
        named = [(name, info) for name, info in named if name != folder]
        return sorted(named, key=lambda each: each[0] + "/" * (each[1]["type"] == "directory"))

    def remove(self, name: str) -> None:
        """Delete a file; raises FileNotFoundError if it does not exist."""
        self._request(lambda: self.files.rm_file(self._full(name)))

    def is_folder(self, name: str) -> bool:
        """Return True if `name` is an existing folder."""
        return self._request(lambda: bool(self.files.isdir(self._full(name))))

    def move_folder(self, name: str, to: str) -> None:
        """Rename a folder; not atomic in an object store, where each file is copied and then deleted."""
        self._request(lambda: self.files.mv(self._full(name), self._full(to), recursive=True))

    def _full(self, name: str) -> str:
        return join_path(self.base, name)

    def _relative(self, path: str) -> str:
        # Some file systems list paths with a leading slash, and others without.
        top = f"{self.base.strip('/')}/".lstrip("/")
        return path.strip("/").removeprefix(top)

    def _replace(self, name: str, write: Callable[[str], object]) -> object:
        """Replace a file with what `write` puts at the path that it gets, and return the service's answer."""
        if self._writes_atomically:
            return self._request(lambda: write(self._full(name)))

        # On other file systems, a reader could see a part of the file, so it is renamed when complete.
        return self._request(lambda: self._write_and_rename(name, write))

    def _write_and_rename(self, name: str, write: Callable[[str], object]) -> None:
        full = self._full(name)
        temp = self._full(str(PurePosixPath(name).with_name(temp_name())))
        self.files.makedirs(full.rpartition("/")[0], exist_ok=True)
        try:
            write(temp)
            self.files.mv(temp, full)
        finally:
            with suppress(FileNotFoundError):
                self.files.rm_file(temp)

    def _request(self, send: Callable[[], Answer]) -> Answer:
        def send_alone() -> Answer:
            with self._lock:  # not while waiting for the next attempt
                return send()

        try:
            return retry(send_alone, log=self._log)
        except OSError:
            raise
        except Exception as err:
            text = f"{type(err).__name__}: {' '.join(str(err).split())[:500]}"
            raise OSError(without_secrets(text)) from err


def _answered_version(answer: object) -> str:
    """Return the version in an answer of an S3 service; empty without one."""
    fields: Mapping[str, object] = answer if isinstance(answer, Mapping) else {}
    return str(fields.get("ETag") or "")


def _walk_files(files: Any, folder: str) -> dict[str, dict[str, Any]]:
    """Return the information about every file below a folder of an `fsspec.AbstractFileSystem`, by path."""
    # `find` of most file systems omits folders that cannot be listed, and its option `on_error` works on the
    # first level only.
    found: dict[str, dict[str, Any]] = {}
    pending = [folder]
    while pending:
        path = pending.pop()
        try:
            infos: list[dict[str, Any]] = files.ls(path, detail=True)
        except FileNotFoundError:
            if path == folder:
                raise
            continue  # deleted since its parent was listed
        for info in infos:
            if info["type"] != "directory":
                found[info["name"]] = info
            elif info["name"].strip("/") != path.strip("/"):
                pending.append(info["name"])
    return found
