"""An output folder at an address, and the local folder in which a machine works on its files.

A step or command fetches the files that it names before its work, and uploads the files that it wrote after
it. No other state is kept, and no file is deleted at the address unless the caller names it. Files are
transferred completely or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.errors import StoreError
from pipeline.escaping import without_secrets
from pipeline.log import Log, discard
from pipeline.recipe.isolation import require_isolation
from pipeline.storage.addresses import Address, Url
from pipeline.storage.atomic import sync_file, temp_path_for, write_bytes, write_text
from pipeline.storage.file_systems import stat_from_info
from pipeline.storage.os_errors import is_disk_full
from pipeline.storage.remote_folder import ACCESS_FIX, FileChangedError, RemoteFolder

if TYPE_CHECKING:
    from pipeline.recipe.schema import Recipe

_THREADS = 8

_LAST = ("lora.json", "COMPLETE", "provenance.json", "finished.json")
"""Names of files that show that their neighbours are complete; they are uploaded last, in this order."""

_OWNER_FILE = ".owner"

_UNLISTED: Mapping[str, Any] = {}

Guard = Callable[[], object]

Answer = TypeVar("Answer")


def allow() -> None:
    """Allow every change of the address."""


def outputs_of(recipe: Recipe, log: Log = discard) -> OutputFolder:
    """Return the recipe's output folder, which checks path isolation before its first use."""
    return OutputFolder(
        recipe.output_address,
        recipe.output_dir,
        log=log,
        before_use=partial(_require_isolation, recipe),  # pyright: ignore[reportArgumentType] - a frozen model is hashable
    )


class OutputFolder:
    """Fetches and uploads files by name; for a local output folder, every method does nothing.

    A name that ends in a slash stands for all files below that folder. Hidden files are never transferred.
    """

    def __init__(
        self, address: Address, folder: Path, *, log: Log = discard, before_use: Guard = allow
    ) -> None:
        """Open nothing.

        A local output folder has its path as `address` and as `folder`. `log` receives a line if a request is
        repeated. `before_use` is called once before anything is read or written at the address.
        """
        self.address = address
        self.folder = folder
        self._log = log
        self._before_use = before_use

    @property
    def is_remote(self) -> bool:
        """Whether the files are at an address."""
        return isinstance(self.address, Url)

    @cached_property
    def remote(self) -> RemoteFolder:
        """Files at the address.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        self._before_use()
        return self.connect()

    @property
    def owner(self) -> str:
        """Random id of the local folder, written when it is first used."""
        file = self.folder / _OWNER_FILE
        if not file.is_file():
            temp = temp_path_for(file)
            write_text(temp, uuid.uuid4().hex)
            # Of two processes, the first one decides.
            with suppress(FileExistsError):
                os.link(temp, file)
            temp.unlink()
        return file.read_text(encoding="utf-8")

    def connect(self) -> RemoteFolder:
        """Return a connection of its own, for requests that must not wait for a large upload."""
        return RemoteFolder(Url(str(self.address)), key="output_dir", log=self._log)

    def infos(self, top: str = "") -> dict[str, dict[str, Any]]:
        """Return the file system's information about the files below a folder at the address, by sorted name.

        Raises:
            StoreError: The service does not answer.
        """
        if not self.is_remote:
            return {}
        listed = self._request(lambda: self.remote.list_files(top.rstrip("/")), top, "listed")
        return {name: info for name, info in sorted(listed.items()) if _is_transferred(name)}

    def names(self, top: str = "") -> list[str]:
        """Return the names of `infos`."""
        return list(self.infos(top))

    def read(self, name: str) -> bytes:
        """Return the bytes of a file at the address; empty if it does not exist.

        Raises:
            StoreError: The service does not answer.
        """
        try:
            return self._request(lambda: self.remote.read(name), name, "read")
        except FileNotFoundError:
            return b""

    def fetch(self, *names: str) -> list[str]:
        """Make local files equal to the files at the address, and return the names that exist there.

        A file that does not exist at the address is deleted locally.

        Raises:
            StoreError: The service does not answer, or a file cannot be read.
            OSError: A local file cannot be written or deleted.
        """
        if not self.is_remote:
            return []
        wanted: dict[str, Mapping[str, Any]] = {}
        for name in names:
            if name.endswith("/"):
                wanted |= dict.fromkeys(self.local_names(name), _UNLISTED)
                wanted |= self.infos(name)
            else:
                wanted[name] = _UNLISTED
        return self.fetch_listed(wanted)

    def fetch_keeping(self, top: str, kept: str) -> None:
        """Fetch a folder with the work of persons; local files that this changes or deletes move to `kept`.

        Such a file was written here and not uploaded, or another machine has changed or removed it since.

        Raises:
            StoreError: The service does not answer, or a file cannot be read.
            OSError: A local file cannot be written or deleted.
        """
        if not self.is_remote:
            return
        before = {name: (self.folder / name).read_bytes() for name in self.local_names(top)}
        self.fetch(top)
        for name, data in before.items():
            file = self.folder / name
            if not file.is_file() or file.read_bytes() != data:
                copy = self.folder / kept / f"{name}.{hashlib.sha256(data).hexdigest()[:8]}"
                write_bytes(copy, data)
                self._log(
                    f"{name} is not at {self.where()} as it was here; the text of this machine is in {copy}"
                )

    def fetch_listed(self, infos: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Fetch files as `fetch` does, with the times in their `infos`."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch") as pool:
            exist = pool.map(
                lambda name: self._is_equal(name, infos[name]) or self._fetch_file(name, infos[name]), infos
            )
            return [name for name, exists in zip(infos, exist, strict=True) if exists]

    def upload(self, *names: str, guard: Guard = allow) -> None:
        """Replace files at the address by the local ones; a name without a local file is ignored.

        `guard` is called before each change of the address. An exception ends the upload.

        Raises:
            StoreError: The service does not answer, or a file cannot be written.
            OSError: A local file cannot be read.
        """
        if not self.is_remote:
            return
        files = sorted(self._local_files(names), key=lambda name: (_rank(name), name))
        # Deleted before their neighbours are replaced, so that they never are next to another version.
        self.remove(*(name for name in files if _rank(name)), guard=guard)
        for _, group in groupby(files, _rank):
            # Each group is complete at the address before the next one begins.
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="upload") as pool:
                for upload in [pool.submit(self._upload_file, name, guard) for name in group]:
                    upload.result()

    def replace_folder(self, top: str, *, guard: Guard = allow) -> None:
        """Make a folder at the address equal to the local one, which is complete; raises as `upload`."""
        if not self.is_remote:
            return
        local, remote = self.local_names(top), self.infos(top)
        changed = [name for name in local if name not in remote or not self._is_equal(name, remote[name])]
        self.upload(*changed, guard=guard)
        self.remove(*(set(remote) - set(local)), guard=guard)

    def remove(self, *names: str, guard: Guard = allow) -> None:
        """Delete files at the address, in reverse order of their upload; missing ones are ignored.

        `guard` is called before each deletion. An exception ends the work.

        Raises:
            StoreError: The service does not answer, or a file cannot be deleted.
        """
        if not self.is_remote:
            return

        # First the files that show that their neighbours are complete.
        for name in sorted(names, key=lambda name: (-_rank(name), name)):
            guard()
            with suppress(FileNotFoundError):
                self._request(partial(self.remote.remove, name), name, "written")

    def local_names(self, top: str) -> list[str]:
        """Return the sorted names of the local files below a folder that can be uploaded."""
        names = (path.relative_to(self.folder).as_posix() for path in _files_below(self.folder / top))
        return sorted(name for name in names if _is_transferred(name))

    def where(self, name: str = "") -> str:
        """Return the location of a file at the address, for messages."""
        return f"{without_secrets(str(self.address)).rstrip('/')}/{name}"

    def error(self, what: str, name: str = "", *, fix: str = "then start the command again") -> StoreError:
        """Return the error for a request about `name` that failed for good."""
        return StoreError(what, where=self.where(name), fix=f"{ACCESS_FIX}; {fix}")

    def _is_equal(self, name: str, info: Mapping[str, Any]) -> bool:
        # On S3, the version of a file that was uploaded by one request is its MD5, with some exceptions.
        path = self.folder / name
        if "ETag" not in info or not path.is_file():
            return False
        with path.open("rb") as file:
            md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        return str(info.get("ETag")).strip('"') == md5

    def _local_files(self, names: Iterable[str]) -> set[str]:
        files = set[str]()
        for name in names:
            if name.endswith("/"):
                files |= set(self.local_names(name))
            elif (self.folder / name).is_file():
                files.add(name)
        return files

    def _fetch_file(self, name: str, info: Mapping[str, Any]) -> bool:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = temp_path_for(path)
        try:
            self._request(partial(self.remote.download, name, temp), name, "read")
            # Several commands choose the newest run or checkpoint by its time.
            if time_ns := stat_from_info(info)[1]:
                os.utime(temp, ns=(time_ns, time_ns))
            sync_file(temp)
            temp.replace(path)
        except FileNotFoundError:
            path.unlink(missing_ok=True)
            return False
        finally:
            temp.unlink(missing_ok=True)
        return True

    def _upload_file(self, name: str, guard: Guard) -> None:
        guard()
        path = self.folder / name
        try:
            self._request(partial(self._create_or_replace, path, name, guard), name, "written")
        except FileNotFoundError as err:
            if path.is_file():  # otherwise it was deleted meanwhile, such as the state of an old checkpoint
                raise self.error(f"the output folder cannot be written: {err}", name) from err

    def _create_or_replace(self, path: Path, name: str, guard: Guard) -> None:
        # A guarded upload may take so long that another machine writes the file before it ends. A new file is
        # therefore created only if it does not exist at the end of its upload.
        try:
            self.remote.upload(path, name, create=guard is not allow)
        except FileChangedError:
            guard()
            self.remote.upload(path, name)

    def _request(self, request: Callable[[], Answer], name: str, done: str) -> Answer:
        try:
            return request()
        except FileNotFoundError:
            raise
        except OSError as err:
            # A download also writes to the local disk, and a full disk needs another fix than a service.
            is_local = is_disk_full(err) or err.errno == errno.EROFS
            if done == "read" and is_local and err.errno is not None:
                raise OSError(err.errno, os.strerror(err.errno), str(self.folder / name)) from err
            raise self.error(f"the output folder cannot be {done}: {err}", name) from err


def _rank(name: str) -> int:
    """Return 0 for ordinary files, and the position in `_LAST`, from 1, for others."""
    return next((rank for rank, last in enumerate(_LAST, 1) if PurePosixPath(name).name == last), 0)


def _is_transferred(name: str) -> bool:
    """Return whether a name stays inside the folder and has no hidden part, such as temporary files."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and not any(part.startswith(".") for part in parts)


def _files_below(folder: Path) -> Iterable[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


# The check walks the datasets for links, and one process may open the output folder several times.
@lru_cache(maxsize=8)
def _require_isolation(recipe: Recipe) -> None:
    require_isolation(recipe)
