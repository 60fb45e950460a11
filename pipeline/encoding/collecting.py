"""Results of an encoding's workers on other machines, collected by the stage."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from pipeline.encoding.jobs import DESCRIPTIONS, Results, add_result, read_encoding
from pipeline.encoding.shared_encoding import PICTURES, Shard, SharedEncoding, publish_encoding
from pipeline.errors import LatentlineError, LaunchError, StoreError, counted
from pipeline.escaping import without_secrets
from pipeline.log import Log
from pipeline.processes.launch import error_from_json
from pipeline.reporting.progress import progress
from pipeline.storage.atomic import write_bytes

_RESULTS = re.compile(r"results-(\d+)-of-(\d+)-[0-9a-f]+-\d+\.jsonl")
_ERROR = re.compile(r"error-(\d+)-of-(\d+)-[0-9a-f]+\.json")

_PICTURE = re.compile(rf"{PICTURES}/(\w[\w.-]*)")

_MAX_NAMED = 10

POLL_INTERVAL_S = 3.0
"""Shortest time between two listings of an encoding's results."""

# A job may wait in a queue for days, and `latentline gc` deletes encodings without a file from the last 24
# hours.
RENEWAL_INTERVAL_S = 3600.0
"""Time after which the stage renews its encoding."""

RunWorkers: TypeAlias = Callable[[SharedEncoding, int], Sequence[str]]
"""Runs a worker for each of so many shards until all have ended, and returns their last lines of output."""


def encode_on_workers(
    encoding_file: Path, run_workers: RunWorkers, *, max_workers: int, cpu_threads: int, log: Log
) -> None:
    """Let workers on other machines encode a local encoding, and copy their results to its folder.

    Args:
        encoding_file: File of the encoding; its jobs are complete.
        run_workers: Runs the workers. It does not raise for workers that failed.
        max_workers: Number of shards, if there are enough jobs.
        cpu_threads: The recipe's `accelerate.cpu_threads`.
        log: Receives one line of progress for all workers.

    Raises:
        StoreError: The cache cannot be read or written.
        LatentlineError: See `Collector.require_finished`. The encoding stays; `latentline gc` deletes it
            later.
    """
    local = read_encoding(encoding_file)
    num_jobs = len(local.jobs)

    # A worker without a job would load the model for nothing.
    num_shards = max(1, min(max_workers, num_jobs))
    encoding = publish_encoding(encoding_file, num_shards=num_shards, cpu_threads=cpu_threads)
    collector = Collector(encoding, encoding_file.parent)
    shards = counted(num_shards, "worker")
    log(f"{counted(num_jobs, 'entry', 'entries')} for {shards}: {without_secrets(str(encoding.address))}")

    with progress(collector.poll_sometimes, num_jobs, DESCRIPTIONS[local.kind], log=log):
        last_output = run_workers(encoding, num_shards)
    collector.poll()
    collector.require_finished(num_shards, last_output)
    if local.pictures is not None:
        collector.fetch_pictures(local.pictures.folder)

    # Removed only after success: a failed encoding can be finished by starting its workers by hand.
    encoding.remove()


@dataclass
class Collector:
    """Copies the results of all workers into the local folder of the encoding, for `read_results`."""

    encoding: SharedEncoding
    folder: Path
    _ended: set[str] = field(default_factory=set[str])
    _finished: set[Shard] = field(default_factory=set[Shard])
    _sizes: dict[str, int] = field(default_factory=dict[str, int])
    _errors: dict[Shard, LatentlineError] = field(default_factory=dict[Shard, LatentlineError])
    _polled_s: float = 0.0
    _renewed_s: float = field(default_factory=time.monotonic)

    def has_finished(self, shard: Shard) -> bool:
        """Return whether an attempt at the shard has finished, as far as `poll` has seen."""
        return shard in self._finished

    def poll(self) -> None:
        """Copy the files that are new or have grown since the last call.

        Raises:
            StoreError: The encoding cannot be listed, or a file cannot be read.
        """
        for file in self.encoding.files():
            # Results only grow, so an equal size means an equal file, and nothing is downloaded.
            if self._sizes.get(file.name) == file.num_bytes:
                continue
            results, error = _RESULTS.fullmatch(file.name), _ERROR.fullmatch(file.name)
            if results is not None:
                data = self.encoding.read(file.name)
                with self.encoding.as_data(file.name):
                    self._count(_shard(results), data)
                (self.folder / file.name).write_bytes(data)
            elif error is not None:
                data = self.encoding.read(file.name)
                with self.encoding.as_data(file.name):
                    self._errors[_shard(error)] = error_from_json(data.decode())
            self._sizes[file.name] = file.num_bytes

    def poll_sometimes(self) -> int:
        """Return the number of jobs that have ended, after a poll if the last one was some time ago."""
        if time.monotonic() - self._polled_s >= POLL_INTERVAL_S:
            # Only the last poll counts, after the end of the workers. A failed renewal is repeated.
            with suppress(StoreError, FileNotFoundError):
                self.poll()
            with suppress(StoreError, FileNotFoundError):
                self._renew_sometimes()
            self._polled_s = time.monotonic()
        return len(self._ended)

    def _renew_sometimes(self) -> None:
        if time.monotonic() - self._renewed_s >= RENEWAL_INTERVAL_S:
            self.encoding.renew()
            self._renewed_s = time.monotonic()

    def fetch_pictures(self, folder: Path) -> None:
        """Copy the pictures for the report into `folder`; raises StoreError if one cannot be read."""
        for file in self.encoding.files():
            # Object stores allow names such as pictures/../../x.
            picture = _PICTURE.fullmatch(file.name)
            if picture is not None:
                write_bytes(folder / picture[1], self.encoding.read(file.name))

    def require_finished(self, num_shards: int, last_output: Sequence[str]) -> None:
        """Raise the error of a worker, or a LaunchError that names the shards which are not finished.

        `last_output` has the last lines that the workers printed, as far as they are known.
        """
        shards = [Shard(index, num_shards) for index in range(num_shards)]

        # A shard may have failed and finished on a second attempt; then its error is old.
        unfinished = [shard for shard in shards if shard not in self._finished]
        for shard in unfinished:
            if shard in self._errors:
                raise _with_shard(self._errors[shard], shard)
        if unfinished:
            names = ", ".join(map(str, unfinished[:_MAX_NAMED])) + (
                ", ..." if len(unfinished) > _MAX_NAMED else ""
            )
            raise LaunchError(
                f"{counted(len(unfinished), 'shard is', 'shards are')} incomplete, although the encoding "
                f"workers have ended: {names}",
                where="\n".join([f"{self.encoding.address}, last output:", *(last_output or ["(none)"])]),
                fix="correct the cause that the output shows, often too little memory or time, and start the "
                "job again; it encodes the missing entries only",
            )

    def _count(self, shard: Shard, data: bytes) -> None:
        for text in data.splitlines():
            line = json.loads(text)
            add_result(line, Results())  # raises for a line that the stage could not read later
            if "work_s" in line:
                self._finished.add(shard)
            else:
                self._ended.add(line["key"])


def _shard(match: re.Match[str]) -> Shard:
    return Shard(int(match[1]), int(match[2]))


def _with_shard(error: LatentlineError, shard: Shard) -> LatentlineError:
    return type(error)(error.what, where=f"encoding shard {shard}: {error.where}", fix=error.fix)
