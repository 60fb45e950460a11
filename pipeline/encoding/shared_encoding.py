"""Encodings at an address, for workers on machines that have only the cache in common with the stage.

<cache_dir>/encodings/<id>/
  jobs-00000.jsonl, ...                   parts of the local `jobs.jsonl`
  encoding.json                           the local encoding, hashes of the parts, and settings of its
                                          workers; written last
  results-2-of-8-1a2b3c4d-00000.jsonl     results of shard 2 of 8, by attempt and part
  error-2-of-8-1a2b3c4d.json              error that ended an attempt
  waiting.txt                             time at which the stage last renewed the encoding
  pictures/                               pictures for the report

The id ends with the hash of encoding.json. Launchers pass it to the workers in the address, so whoever may
write only the cache cannot choose what the workers read and load.
"""

from __future__ import annotations

import hashlib
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
from pipeline.encoding.jobs import ENCODING_FILE, JOBS_FILE
from pipeline.errors import StoreError
from pipeline.storage.addresses import Address, Url, address
from pipeline.versions import PREPROCESSING_VERSION

ENCODINGS = "encodings"
"""Name of the folder of a cache with its encodings."""

PICTURES = "pictures"

_WAITING_FILE = "waiting.txt"

PART_BYTES = 256 * 1024
"""Size of a part of the results that does not grow any more."""

JOBS_PART_BYTES = 4 * 1024 * 1024
"""Approximate size of a part of the jobs, which bounds the memory for copying them."""

VERSIONS = {"encoding": 2, "preprocessing": PREPROCESSING_VERSION}
"""Versions of code that stage and workers must have in common."""

_HASH_DIGITS = 32
"""Number of hexadecimal digits of a SHA-256 in an id."""

_SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of equal cost of an encoding; `index` counts from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def in_names(self) -> str:
        """The shard as part of a file's name."""
        return f"{self.index}-of-{self.count}"


def parse_shard(text: str) -> Shard:
    """Return the shard with the text `index/count`; raises ValueError for any other text."""
    match = _SHARD.fullmatch(text)
    if match is None or not int(match[1]) < int(match[2]):
        raise ValueError(f"a shard must be i/N with 0 <= i < N, such as 0/8 to 7/8, got {text}")
    return Shard(int(match[1]), int(match[2]))


class SharedEncoding:
    """The folder of one encoding, local or remote."""

    def __init__(self, encoding_address: Address) -> None:
        """Open the folder without reading from it.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        self.address = encoding_address
        self._folder = cache_folder(encoding_address)

    @property
    def encoding_id(self) -> str:
        """Name of the folder."""
        return self.address.name

    def settings(self) -> dict[str, Any]:
        """Return the content of `encoding.json`.

        Raises:
            StoreError: The encoding does not exist, cannot be read, has changed since the stage wrote it, or
                is of another version of Latentline.
        """
        try:
            text = self.read(ENCODING_FILE)
        except FileNotFoundError as err:
            raise StoreError(
                "the encoding does not exist",
                where=self._folder.where(ENCODING_FILE),
                fix="pass the address in the job's log; if the job has succeeded, its encoding is deleted "
                "and nothing is left to encode, otherwise start the job again",
            ) from err
        with self.as_data(ENCODING_FILE):
            settings: dict[str, Any] = dict(json.loads(text))
        if settings.get("versions") != VERSIONS:
            raise StoreError(
                "the encoding was written by another version of Latentline: it has the versions "
                f"{settings.get('versions')}, and this worker has {VERSIONS}",
                where=self._folder.where(ENCODING_FILE),
                fix="install the same version of Latentline on all machines",
            )
        self._require(self.encoding_id.endswith(f"-{_digest(text)[:_HASH_DIGITS]}"), ENCODING_FILE)
        return settings

    def _require(self, is_unchanged: bool, name: str) -> None:
        if not is_unchanged:
            raise StoreError(
                "a file of the encoding has changed since the job wrote it, or its folder was renamed",
                where=self._folder.where(name),
                fix="start the job again, which writes a new encoding, or pass the address in the job's log; "
                "check who may write the cache",
            )

    def read(self, name: str) -> bytes:
        """Return the bytes of a file of the encoding.

        Raises:
            FileNotFoundError: The file does not exist.
            StoreError: The file cannot be read.
        """
        with self._access("read", name):
            return self._folder.read(name)

    def put(self, name: str, data: bytes) -> None:
        """Replace a file as one piece; raises StoreError if it cannot be written."""
        with self._access("written", name):
            self._folder.replace(name, data)

    def renew(self) -> None:
        """Replace `waiting.txt`: `latentline gc` keeps an encoding with a young file."""
        self.put(_WAITING_FILE, f"{datetime.now(UTC).isoformat()}\n".encode())

    def files(self) -> list[CacheFile]:
        """Return all files; raises StoreError if the folder cannot be listed."""
        with self._access("listed", ""):
            return list(self._folder.files())

    def fetch(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """Copy encoding and jobs into a local folder; return the local encoding file, and the settings.

        Raises:
            StoreError: A file does not exist or cannot be read.
        """
        settings = self.settings()
        encoding_file = folder / ENCODING_FILE
        with self.as_data(ENCODING_FILE):
            # Entries go to the cache of the encoding, whatever address the file contains.
            fields = {**settings["encoding"], "store_root": str(self.address.parent.parent)}
            encoding_file.write_text(json.dumps(fields), encoding="utf-8")
            hashes = [str(sha256) for sha256 in settings["jobs_sha256"]]
        with (folder / JOBS_FILE).open("wb") as file:
            for number, sha256 in enumerate(hashes):
                part = self.read(_jobs_part(number))
                self._require(_digest(part) == sha256, _jobs_part(number))
                file.write(part)
        return encoding_file, settings

    def remove(self) -> None:
        """Delete all files; one that cannot be deleted stays for `latentline gc`."""
        with suppress(StoreError, OSError):
            # Without encoding.json, no worker starts with an incomplete encoding.
            names = sorted((file.name for file in self.files()), key=lambda name: name != ENCODING_FILE)
            for name in names:
                self._folder.delete(name)
            self._folder.tidy([PICTURES, ""])

    @contextmanager
    def as_data(self, name: str) -> Generator[None]:
        """Convert every error from parsing a file, which anybody who may write the cache can have written.

        Raises:
            StoreError: The content is not what Latentline writes.
        """
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
            what = f"a file of the encoding is damaged: {type(err).__name__}: {str(err)[:200]}"
            fix = "start the job again, which writes a new encoding; check who may write the cache"
            raise StoreError(what, where=self._folder.where(name), fix=fix) from err

    @contextmanager
    def _access(self, done: str, name: str) -> Generator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as err:
            raise StoreError(
                f"the encoding cannot be {done}: {err.strerror or err}",
                where=self._folder.where(name),
                fix=access_fix(self.address, err),
            ) from err


def publish_encoding(encoding_file: Path, *, num_shards: int, cpu_threads: int) -> SharedEncoding:
    """Copy a complete local encoding, with its jobs, to a new folder below its cache.

    Raises:
        StoreError: The cache cannot be written.
    """
    fields: Mapping[str, Any] = json.loads(encoding_file.read_text(encoding="utf-8"))
    jobs_file = encoding_file.parent / JOBS_FILE
    settings = {
        "versions": VERSIONS,
        "jobs_sha256": [_digest(part) for part in _parts(jobs_file)],
        "num_shards": num_shards,
        "cpu_threads": cpu_threads,
        "encoding": fields,
        # Equal encodings of two jobs have different folders.
        "id": uuid.uuid4().hex,
    }
    content = json.dumps(settings).encode()
    encoding_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{fields['kind']}-{_digest(content)[:_HASH_DIGITS]}"
    encoding = SharedEncoding(_below(address(fields["store_root"]), ENCODINGS, encoding_id))

    for number, part in enumerate(_parts(jobs_file)):
        encoding.put(_jobs_part(number), part)
    # Last, because a worker starts when it finds this file.
    encoding.put(ENCODING_FILE, content)
    return encoding


class ResultsUpload:
    """Copies the results of one attempt at a shard to the encoding, again and again while it runs."""

    def __init__(self, encoding: SharedEncoding, shard: Shard, local_file: Path) -> None:
        """Copy the lines of `local_file`, which may not exist yet."""
        self._encoding = encoding
        self._local_file = local_file

        # Attempts at one shard may overlap, so each has its own files.
        self.attempt = f"{shard.in_names}-{uuid.uuid4().hex[:8]}"
        self._part = 0
        self._part_start = 0
        self._put_bytes = 0

    def push(self) -> None:
        """Copy the complete lines that were written since the last call.

        Raises:
            StoreError: They cannot be written; the next call tries again.
        """
        # Object stores cannot append to a file, so the last part is replaced until it has `PART_BYTES`.
        while (lines := self._lines()) and len(lines) > self._put_bytes:
            self._encoding.put(f"results-{self.attempt}-{self._part:05}.jsonl", lines)
            self._put_bytes = len(lines)
            if len(lines) >= PART_BYTES:
                self._part, self._part_start, self._put_bytes = (
                    self._part + 1,
                    self._part_start + len(lines),
                    0,
                )

    def _lines(self) -> bytes:
        if not self._local_file.exists():
            return b""
        with self._local_file.open("rb") as file:
            file.seek(self._part_start)
            # A little more than a part, so that a line that crosses its end is complete.
            new = file.read(2 * PART_BYTES)
        return new[: new.rfind(b"\n") + 1]

    def put_error(self, text: str) -> None:
        """Write the error that ended the attempt, as JSON; raises StoreError if it cannot be written."""
        self._encoding.put(f"error-{self.attempt}.json", text.encode())


def _parts(jobs_file: Path) -> Iterator[bytes]:
    with jobs_file.open("rb") as file:
        while lines := file.readlines(JOBS_PART_BYTES):
            yield b"".join(lines)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _jobs_part(number: int) -> str:
    return f"jobs-{number:05}.jsonl"


def _below(root: Address, *names: str) -> Address:
    if isinstance(root, Url):
        return Url("/".join([root.rstrip("/"), *names]))
    return root.joinpath(*names)
