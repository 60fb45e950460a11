"""A folder on a file system that fsspec knows, written to: whole files, read, listed and removed.

Every refusal is an `OSError`, whatever the service's own library raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any

from pipeline.errors import StoreError
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import temp_name
from pipeline.storage.remote_files import missing_package, one_at_a_time, open_url

OBJECT_STORES = frozenset(
    ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "obs", "cos", "tos", "memory"]
)
"""Protocols of stores in which an object appears whole when it is put, and which have no folders."""

ACCESS_FIX = (
    "see that the address is right, its service answers and this user may read and write there; credentials "
    "come from its own variables and files, other options from fsspec's (FSSPEC_<PROTOCOL>_<OPTION>)"
)
"""What to do where a service refuses."""


class RemoteFolder:
    """What lies below an address; names are relative to it, with slashes.

    Attributes:
        url: The address.
        base: The place of the address within its file system.
    """

    def __init__(self, url: Url) -> None:
        """Open the file system; nothing is read yet.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        self.url = url
        try:
            self.files, base = open_url(url)
        except ImportError as err:
            what = f"the cache's address needs a package that is not installed: {err}"
            raise StoreError(what, where=str(url), fix=f"pip install {missing_package(url)}") from err
        except Exception as err:
            what = f"the cache's address cannot be opened: {type(err).__name__}: {err}"
            raise StoreError(what, where=str(url), fix=f"correct cache_dir; {ACCESS_FIX}") from err
        self.base = base.rstrip("/")
        protocol = self.files.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._appears_whole = bool(names & OBJECT_STORES)
        put: Any = getattr(self.files, "_pipe_file", self.files.pipe_file)
        self._puts_if_absent = "mode" in inspect.signature(put).parameters
        self._turn = one_at_a_time(self.files)
        listings: Any = getattr(self.files, "dircache", None)
        if hasattr(listings, "use_listings_cache"):
            listings.use_listings_cache = False  # what is there now counts

    def info(self, name: str) -> dict[str, Any]:
        """What the file system says of a file or folder.

        Raises:
            FileNotFoundError: There is nothing.
            OSError: It does not say.
        """
        with self._asked():
            return dict(self.files.info(self._full(name)))

    def read(self, name: str, num_bytes: int | None = None) -> bytes:
        """A file's bytes, or the first `num_bytes` of them.

        Raises:
            FileNotFoundError: There is none.
            OSError: It cannot be read.
        """
        with self._asked():
            part = {} if num_bytes is None else {"start": 0, "end": num_bytes}
            return bytes(self.files.cat_file(self._full(name), **part))

    def put(self, name: str, data: bytes) -> None:
        """Put a file in its place, whole: nobody sees a part of it.

        Raises:
            OSError: It cannot be written; what was there is still there.
        """
        full = self._full(name)
        with self._asked():
            if self._appears_whole:
                self.files.pipe_file(full, data)
                return
            temp = self._full(str(PurePosixPath(name).with_name(temp_name())))
            self.files.makedirs(full.rpartition("/")[0], exist_ok=True)
            try:
                self.files.pipe_file(temp, data)
                self.files.mv(temp, full)
            finally:
                with suppress(FileNotFoundError):
                    self.files.rm_file(temp)

    def put_if_absent(self, name: str, data: bytes) -> bool | None:
        """As `put`, if there is no such file; None where the file system cannot do that in one."""
        if not (self._appears_whole and self._puts_if_absent):
            return None
        try:
            with self._asked():
                self.files.pipe_file(self._full(name), data, mode="create")
        except FileExistsError:
            return False
        except OSError:  # some services of S3's kind do not know the condition
            return None
        return True

    def list_files(self, below: str = "") -> dict[str, dict[str, Any]]:
        """Every file below a folder, by name, with what the file system says of it.

        Raises:
            OSError: It cannot be listed; a folder that is not there is empty.
        """
        with self._asked():
            self.files.invalidate_cache()
            try:
                listed: dict[str, dict[str, Any]] = self.files.find(self._full(below), detail=True)
            except FileNotFoundError:
                return {}
        top = f"{self.base.strip('/')}/".lstrip("/")
        names = {path.strip("/").removeprefix(top): info for path, info in listed.items()}
        return {name: info for name, info in names.items() if info["type"] == "file"}

    def remove(self, name: str) -> None:
        """Delete a file.

        Raises:
            FileNotFoundError: There is none.
            OSError: It cannot be deleted.
        """
        with self._asked():
            self.files.rm_file(self._full(name))

    def is_folder(self, name: str) -> bool:
        """Whether a folder is there."""
        with self._asked():
            return bool(self.files.isdir(self._full(name)))

    def move_folder(self, name: str, to: str) -> None:
        """Give a folder another name."""
        with self._asked():
            self.files.mv(self._full(name), self._full(to), recursive=True)

    def _full(self, name: str) -> str:
        if not name:
            return self.base
        return f"{self.base}/{name}" if self.base else name

    @contextmanager
    def _asked(self) -> Generator[None]:
        with self._turn:
            try:
                yield
            except OSError:
                raise
            except Exception as err:
                raise OSError(f"{type(err).__name__}: {' '.join(str(err).split())[:500]}") from err
