"""Orders at an address, for workers on machines that have only the cache in common with the stage.

    <cache_dir>/orders/<id>/
      jobs-00000.jsonl, ...                   parts of the local `jobs.jsonl`
      order.json                              the local order and settings of its workers; written last
      results-2-of-8-1a2b3c4d-00000.jsonl     results of shard 2 of 8, by attempt and part
      error-2-of-8-1a2b3c4d.json              error that ended an attempt
      waiting.txt                             time at which the stage last renewed the order
      pictures/                               pictures for the report

Object stores cannot append to a file. Every file is replaced as one piece, and the last part of an attempt's
results grows until it has `PART_BYTES`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.cache.backends import access_fix, cache_folder
from pipeline.cache.folder import CacheFile
from pipeline.encoding.jobs import JOBS_FILE, ORDER_FILE
from pipeline.errors import StoreError
from pipeline.recipe.deployment import load_deployment
from pipeline.storage.addresses import Address, Url, address
from pipeline.versions import PREPROCESSING_VERSION

ORDERS = "orders"
"""Name of the folder of a cache with its orders."""

PICTURES = "pictures"

_WAITING_FILE = "waiting.txt"

PART_BYTES = 256 * 1024
"""Size of a part of the results that does not grow any more."""

JOBS_PART_BYTES = 4 * 1024 * 1024
"""Approximate size of a part of the jobs, which bounds the memory for copying them."""

VERSIONS = {"order": 1, "preprocessing": PREPROCESSING_VERSION}
"""Versions of code that stage and workers must have in common."""

_SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of equal cost of an order; `index` counts from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def in_names(self) -> str:
        """The shard as part of a file's name."""
        return f"{self.index}-of-{self.count}"


def parse_shard(text: str) -> Shard:
    """Return the shard with the text `index/count`.

    Raises:
        ValueError: The text has another form, or the index is not below the count.
    """
    match = _SHARD.fullmatch(text)
    if match is None or not int(match[1]) < int(match[2]):
        raise ValueError(f"a shard must be i/N with 0 <= i < N, such as 0/8 to 7/8, got {text}")
    return Shard(int(match[1]), int(match[2]))


class SharedOrder:
    """The folder of one order, local or remote.

    Attributes:
        address: Address of the folder.
    """

    def __init__(self, order_address: Address) -> None:
        """Open the folder without reading from it.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        self.address = order_address
        self._folder = cache_folder(order_address)

    @property
    def order_id(self) -> str:
        """Name of the folder."""
        return self.address.name

    def settings(self) -> dict[str, Any]:
        """Return the content of `order.json`.

        Raises:
            StoreError: The order does not exist, cannot be read, or is of another version of Latentline.
        """
        try:
            settings: dict[str, Any] = json.loads(self.read(ORDER_FILE))
        except FileNotFoundError as err:
            raise StoreError(
                "the order does not exist",
                where=self._folder.where(ORDER_FILE),
                fix="pass the address in the job's log; if the job has succeeded, its order is deleted and "
                "nothing is left to encode, otherwise start the job again",
            ) from err
        if settings.get("versions") != VERSIONS:
            raise StoreError(
                "the order was written by another version of Latentline: it has the versions "
                f"{settings.get('versions')}, and this worker has {VERSIONS}",
                where=self._folder.where(ORDER_FILE),
                fix="install the same version of Latentline on all machines",
            )
        return settings

    def read(self, name: str) -> bytes:
        """Return the bytes of a file of the order.

        Raises:
            FileNotFoundError: The file does not exist.
            StoreError: The file cannot be read.
        """
        with self._access("read", name):
            return self._folder.read(name)

    def put(self, name: str, data: bytes) -> None:
        """Replace a file as one piece.

        Raises:
            StoreError: It cannot be written.
        """
        with self._access("written", name):
            self._folder.replace(name, data)

    def renew(self) -> None:
        """Replace `waiting.txt`, so that the order has a young file and `latentline gc` keeps it.

        Raises:
            StoreError: It cannot be written.
        """
        self.put(_WAITING_FILE, f"{datetime.now(UTC).isoformat()}\n".encode())

    def files(self) -> list[CacheFile]:
        """Return all files.

        Raises:
            StoreError: The folder cannot be listed.
        """
        with self._access("listed", ""):
            return list(self._folder.files())

    def fetch(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """Copy order and jobs into a local folder.

        Returns:
            Path of the local order file, and the settings.

        Raises:
            StoreError: A file does not exist or cannot be read.
        """
        settings = self.settings()
        with (folder / JOBS_FILE).open("wb") as file:
            for number in range(settings["num_parts"]):
                file.write(self.read(_jobs_part(number)))
        order_file = folder / ORDER_FILE
        order_file.write_text(json.dumps(settings["order"]), encoding="utf-8")
        return order_file, settings

    def remove(self) -> None:
        """Delete all files; one that cannot be deleted stays for `latentline gc`."""
        with suppress(StoreError, OSError):
            # Without order.json, no worker starts with an incomplete order.
            names = sorted((file.name for file in self.files()), key=lambda name: name != ORDER_FILE)
            for name in names:
                self._folder.delete(name)
            self._folder.tidy([PICTURES, ""])

    @contextmanager
    def _access(self, done: str, name: str) -> Generator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as err:
            raise StoreError(
                f"the encoding order cannot be {done}: {err.strerror or err}",
                where=self._folder.where(name),
                fix=access_fix(self.address, err),
            ) from err


def publish_order(order_file: Path, *, num_shards: int, cpu_threads: int) -> SharedOrder:
    """Copy a complete local order to a new folder below its cache.

    Args:
        order_file: File written by `pipeline.encoding.jobs.write_order`; its jobs are complete.
        num_shards: Number of workers.
        cpu_threads: The recipe's `accelerate.cpu_threads`.

    Raises:
        StoreError: The cache cannot be written.
    """
    fields: Mapping[str, Any] = json.loads(order_file.read_text(encoding="utf-8"))
    now = datetime.now(UTC)
    order_id = f"{now:%Y%m%d-%H%M%S}-{fields['kind']}-{uuid.uuid4().hex[:8]}"
    order = SharedOrder(_below(address(fields["store_root"]), ORDERS, order_id))

    num_parts = 0
    for part in _parts(order_file.parent / JOBS_FILE):
        order.put(_jobs_part(num_parts), part)
        num_parts += 1
    settings = {
        "versions": VERSIONS,
        "num_parts": num_parts,
        "num_shards": num_shards,
        "cpu_threads": cpu_threads,
        "seal_packs": load_deployment().seal_packs,
        "order": fields,
    }
    order.put(ORDER_FILE, json.dumps(settings).encode())
    return order


class ResultsUpload:
    """Copies the results of one attempt at a shard to the order, again and again while it runs."""

    def __init__(self, order: SharedOrder, shard: Shard, local_file: Path) -> None:
        """Copy the lines of `local_file`, which may not exist yet."""
        self._order = order
        self._local_file = local_file
        self.attempt = f"{shard.in_names}-{uuid.uuid4().hex[:8]}"
        self._part = 0
        self._part_start = 0
        self._put_bytes = 0

    def push(self) -> None:
        """Copy the complete lines that were written since the last call.

        Raises:
            StoreError: They cannot be written; the next call tries again.
        """
        while (lines := self._lines()) and len(lines) > self._put_bytes:
            self._order.put(f"results-{self.attempt}-{self._part:05}.jsonl", lines)
            self._put_bytes = len(lines)
            if len(lines) >= PART_BYTES:
                self._part, self._part_start, self._put_bytes = (
                    self._part + 1,
                    self._part_start + len(lines),
                    0,
                )

    def _lines(self) -> bytes:
        """Return the complete lines of the current part."""
        if not self._local_file.exists():
            return b""
        with self._local_file.open("rb") as file:
            file.seek(self._part_start)
            # A little more than a part, so that a line that crosses its end is complete.
            new = file.read(2 * PART_BYTES)
        return new[: new.rfind(b"\n") + 1]

    def put_error(self, text: str) -> None:
        """Write the error that ended the attempt, as JSON.

        Raises:
            StoreError: It cannot be written.
        """
        self._order.put(f"error-{self.attempt}.json", text.encode())


def _parts(jobs_file: Path) -> Iterator[bytes]:
    with jobs_file.open("rb") as file:
        while lines := file.readlines(JOBS_PART_BYTES):
            yield b"".join(lines)


def _jobs_part(number: int) -> str:
    return f"jobs-{number:05}.jsonl"


def _below(root: Address, *names: str) -> Address:
    """Return an address below `root`."""
    if isinstance(root, Url):
        return Url("/".join([root.rstrip("/"), *names]))
    return root.joinpath(*names)
