"""Jobs of the cache stages, and the files in which a stage and its child processes exchange them.

All files are in one temporary folder:

    encoding.json           written by the stage: model, store and settings
    jobs.jsonl              written by the stage, possibly later: the number of jobs, then one job per line
    results-<rank>.jsonl    written by each process: one line per finished job, and a last line with its times
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO, TypeAlias

from pipeline.cache.entry_format import KINDS, Array
from pipeline.cache.store import EntrySpec, Kind, TensorSpec
from pipeline.storage.addresses import Address, address

ENCODING_FILE = "encoding.json"
JOBS_FILE = "jobs.jsonl"
DESCRIPTIONS: dict[Kind, str] = {
    "latents": "latents encoded",
    "text": "text embeddings encoded",
    "pictures": "pictures drawn",
    "features": "features computed",
    "diagnoses": "captions measured",
    "influences": "gradients computed",
    "captions": "captions written",
}
"""Description of the jobs of each kind for progress."""

RESULTS_PATTERN = "results-*.jsonl"

NUM_PROBES = 3
"""Maximum number of jobs that are encoded first to detect a broken model."""

_POLL_INTERVAL_S = 0.01

_KEY = re.compile(r"[0-9a-f]{64}")

_MAX_SECONDS = 1e9
"""Duration of thirty years."""


@dataclass(frozen=True)
class Job:
    """One entry to encode.

    Attributes:
        spec: Specification of the entry.
        facts: Metadata of the entry that the stage knows.
        work: Input of the encoder: a row of aspect_buckets with the `root` of its dataset, or a `caption`.
        name: Name of the image or caption, for messages.
        cost: Estimated effort, proportional to the time it takes; above 0.
    """

    spec: EntrySpec
    facts: Mapping[str, Any]
    work: Mapping[str, Any]
    name: str
    cost: int


@dataclass(frozen=True)
class Encoded:
    """Result of a job: tensors for `Store.write`, and metadata that only the encoder knows."""

    tensors: Mapping[str, Array]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """Reason why an entry could not be encoded; becomes a row of the table of rejected samples."""

    reason: str
    detail: str
    fix: str


Outcome: TypeAlias = Encoded | Failure | Literal["present"]
"""Outcome of a job; "present" if another process has written the entry since the stage checked."""


class Jobs(Protocol):
    """Sized collection of jobs that can be iterated any number of times, in memory or not."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Job]: ...


@dataclass(frozen=True)
class PictureJobs:
    """Latents, encoded now or earlier, that are decoded after encoding and shown in the report.

    `folder` is the folder of the pictures, see `pipeline.vae_latents.report`.
    """

    folder: Path
    jobs: Sequence[Job]

    @property
    def keys(self) -> set[str]:
        """Keys of the latents."""
        return {job.spec.key for job in self.jobs}

    def select(self, keys: set[str]) -> PictureJobs:
        """Return the jobs with these keys."""
        return PictureJobs(self.folder, [job for job in self.jobs if job.spec.key in keys])


@dataclass(frozen=True)
class EncodingModel:
    """The model as the recipe names it, for workers on machines without its folder.

    Attributes:
        settings: The recipe's section `model`, or the section `captions` of captions, as JSON values.
        source: The recipe's file, for messages.
        fingerprint: Fingerprint of the parts that decide the bytes of the entries.
    """

    settings: Mapping[str, Any]
    source: str
    fingerprint: str


@dataclass(frozen=True)
class Encoding:
    """Everything that the processes of one launch encode together.

    Attributes:
        kind: Kind of all entries.
        model_folder: Folder of the base model.
        store_root: Address of the store.
        settings: `compute_dtype`, and for latents `posterior` and `background`.
        jobs: Jobs with distinct keys, in the order in which they are encoded.
        component_folders: Folders of model components that replace the ones in `model_folder`, by role.
        pictures: Latents to decode for the report.
        model: The model by name; None if no other machine takes part.
        seal_packs: Whether a worker on another machine copies the entries of its shard into packs.
    """

    kind: Kind
    model_folder: Path
    store_root: Address
    settings: Mapping[str, Any]
    jobs: Jobs
    component_folders: Mapping[str, Path] = field(default_factory=dict[str, Path])
    pictures: PictureJobs | None = None
    model: EncodingModel | None = None
    seal_packs: bool = False


class JobsFile:
    """Jobs of an encoding, read from the file by each iteration, so that only one is in memory.

    Waits until the stage has written the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __len__(self) -> int:
        with self._wait().open(encoding="utf-8") as file:
            return json.loads(next(file))

    def __iter__(self) -> Iterator[Job]:
        with self._wait().open(encoding="utf-8") as file:
            next(file)
            for line in file:
                yield _job_from_json(json.loads(line))

    def _wait(self) -> Path:
        while not self._path.exists():
            time.sleep(_POLL_INTERVAL_S)
        return self._path


@dataclass
class Results:
    """Results of all processes of one launch so far.

    Attributes:
        made: Keys of the entries that they wrote.
        present: Keys of entries that another process wrote meanwhile.
        failed: Failures by key.
        work_s: Seconds from first read to last write, in the slowest process.
        aside_s: Seconds for the report's pictures, in the slowest process.
    """

    made: set[str] = field(default_factory=set[str])
    present: set[str] = field(default_factory=set[str])
    failed: dict[str, Failure] = field(default_factory=dict[str, Failure])
    work_s: float = 0.0
    aside_s: float = 0.0


def write_encoding(encoding: Encoding, folder: Path, *, jobs_follow: bool = False) -> Path:
    """Write an encoding into an existing folder that holds no other encoding; return the path of its file.

    With `jobs_follow`, the jobs are omitted, for a later `write_jobs`.
    """
    if not jobs_follow:
        write_jobs(encoding.jobs, folder)

    fields: dict[str, Any] = {
        "kind": encoding.kind,
        "model_folder": str(encoding.model_folder),
        "component_folders": {role: str(path) for role, path in encoding.component_folders.items()},
        "store_root": str(encoding.store_root),
        "settings": dict(encoding.settings),
        "seal_packs": encoding.seal_packs,
    }
    if encoding.pictures is not None:
        jobs = [_job_to_json(job) for job in encoding.pictures.jobs]
        fields["pictures"] = {"folder": str(encoding.pictures.folder), "jobs": jobs}
    if encoding.model is not None:
        fields["model"] = asdict(encoding.model)

    path = folder / ENCODING_FILE
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


def write_jobs(jobs: Jobs, folder: Path) -> None:
    """Write the jobs of the encoding in `folder`."""
    unfinished = folder / f"{JOBS_FILE}.unfinished"
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(f"{len(jobs)}\n")
        for job in jobs:
            file.write(json.dumps(_job_to_json(job)) + "\n")

    # Waiting processes poll for the name, so the file must appear complete.
    unfinished.rename(folder / JOBS_FILE)


def read_encoding(path: Path) -> Encoding:
    """Read an encoding; its jobs are read from their file by each iteration."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    pictures = None
    if "pictures" in fields:
        jobs = [_job_from_json(job) for job in fields["pictures"]["jobs"]]
        pictures = PictureJobs(Path(fields["pictures"]["folder"]), jobs)

    return Encoding(
        kind=fields["kind"],
        model_folder=Path(fields["model_folder"]),
        store_root=address(fields["store_root"]),
        settings=fields["settings"],
        jobs=JobsFile(path.parent / JOBS_FILE),
        component_folders={role: Path(folder) for role, folder in fields["component_folders"].items()},
        pictures=pictures,
        model=EncodingModel(**fields["model"]) if "model" in fields else None,
        seal_packs=fields["seal_packs"],
    )


def share(jobs: Iterable[Job], rank: int, num_ranks: int) -> Iterator[Job]:
    """Yield the jobs of one rank in order, so that all ranks have about the same cost."""
    # The result depends on the jobs alone, so that ranks need not communicate.
    costs = [0] * num_ranks
    for job in jobs:
        # The first of equal ranks, so that all ranks compute the same shares.
        lowest = costs.index(min(costs))
        costs[lowest] += job.cost
        if lowest == rank:
            yield job


class ResultsWriter:
    """Appends the results of one process, from any thread; each line is flushed at once."""

    def __init__(self, encoding_file: Path, rank: int) -> None:
        self._lock = threading.Lock()
        self._file: TextIO = (encoding_file.parent / f"results-{rank}.jsonl").open("w", encoding="utf-8")

    def ended(self, key: str, outcome: Literal["made", "present"] | Failure) -> None:
        """Write the outcome of one job."""
        failure = asdict(outcome) if isinstance(outcome, Failure) else None
        self._write({"key": key, "outcome": "failed" if failure else outcome, "failure": failure})

    def finish(self, work_s: float, *, aside_s: float = 0.0) -> None:
        """Write the times of this process: encoding without start-up, and the report's pictures."""
        self._write({"work_s": work_s, "aside_s": aside_s})

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        # One write per line, since readers take a line without its end as unfinished.
        text = json.dumps(line) + "\n"
        with self._lock:
            self._file.write(text)
            self._file.flush()


def read_results(folder: Path) -> Results:
    """Read the results of all processes; a line that is still being written is ignored."""
    results = Results()
    for path in sorted(folder.glob(RESULTS_PATTERN)):
        # As bytes, because a text would also be divided at separators inside of a value.
        for text in path.read_bytes().splitlines(keepends=True):
            if text.endswith(b"\n"):
                add_result(json.loads(text), results)
    # A restarted worker finds the entries of its first attempt.
    results.present -= results.made
    return results


def add_result(line: dict[str, Any], results: Results) -> None:
    """Add a line that a `ResultsWriter` wrote; any other raises one of the errors of parsing."""
    if "work_s" in line:
        results.work_s = max(results.work_s, _seconds(line["work_s"]))
        results.aside_s = max(results.aside_s, _seconds(line["aside_s"]))
    elif line["outcome"] == "failed":
        failure = {name: _text(value) for name, value in line["failure"].items()}
        results.failed[_text(line["key"])] = Failure(**failure)
    else:
        {"made": results.made, "present": results.present}[line["outcome"]].add(_text(line["key"]))


def _seconds(value: Any) -> float:
    # Whoever may write a shared cache may have written any number, and reports and estimates use this one.
    if not isinstance(value, int | float) or not 0 <= value < _MAX_SECONDS:
        raise ValueError(f"a time must be a number of seconds, got {value!r:.20}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a result must have texts, got {value!r:.20}")
    return value


def _job_to_json(job: Job) -> dict[str, Any]:
    # Written out, because `asdict` takes half a millisecond per job.
    tensors = {name: (t.dtype, t.shape, t.ragged) for name, t in job.spec.tensors.items()}
    spec = {"kind": job.spec.kind, "key": job.spec.key, "tensors": tensors}
    return {"spec": spec, "facts": job.facts, "work": job.work, "name": job.name, "cost": job.cost}


def _job_from_json(fields: dict[str, Any]) -> Job:
    tensors = {
        name: TensorSpec(dtype, tuple(shape), ragged)
        for name, (dtype, shape, ragged) in fields["spec"]["tensors"].items()
    }
    kind, key = fields["spec"]["kind"], fields["spec"]["key"]

    # They become names of files, and anybody who may write a shared cache can have written them.
    if kind not in KINDS or _KEY.fullmatch(key) is None:
        raise ValueError(
            f"an entry must have a kind and 64 hexadecimal digits, got {kind!r:.20}, {key!r:.80}"
        )
    spec = EntrySpec(kind, key, tensors)
    return Job(spec, fields["facts"], fields["work"], fields["name"], fields["cost"])
