"""What the cache stages and their child processes tell each other: files in one temporary folder.

order.json              written by the stage: the model, the store, the settings
jobs.jsonl              beside it, perhaps later: their number, and a line for each, in the order in which
                        they are taken up
results-<rank>.jsonl    written by each process: a line for each job as it ends, and a last one for its times
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO

from pipeline.cache.store import EntrySpec, Kind, TensorSpec
from pipeline.encoding.outcome import Failure
from pipeline.storage.addresses import Address, address

ORDER_FILE = "order.json"
JOBS_FILE = "jobs.jsonl"
RESULTS_PATTERN = "results-*.jsonl"

_LOOK_INTERVAL_S = 0.01
"""Between two looks for jobs that are still to be written."""


@dataclass(frozen=True)
class Job:
    """One entry to make.

    Attributes:
        spec: The entry.
        facts: Its metadata as far as the stage knows them.
        work: What the encoder needs: `root` and `path` of the image, `geometry` (a table row) and
            `content_hash`, or `caption`.
        name: What it is made of, for messages.
        cost: About proportional to the time it takes; above 0.
    """

    spec: EntrySpec
    facts: Mapping[str, Any]
    work: Mapping[str, Any]
    name: str
    cost: int


class Jobs(Protocol):
    """Jobs that are iterated over as often as one likes, whether or not they are in memory."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __iter__(self) -> Iterator[Job]:
        """Each."""
        ...


@dataclass(frozen=True)
class Order:
    """All that a launch is asked to make, by whichever of its processes.

    Attributes:
        kind: Of all entries in it.
        model_folder: The base model.
        store_root: Where the entries go.
        settings: `compute_dtype`, and for latents `posterior` and `background`.
        jobs: Each key once, `in_turn`; of an order that was read, as they come from the file.
        elsewhere: Folders of the model's components that are not taken from `model_folder`.
        beside: Of latents: which are looked at.
    """

    kind: Kind
    model_folder: Path
    store_root: Address
    settings: Mapping[str, Any]
    jobs: Jobs
    elsewhere: Mapping[str, Path] = field(default_factory=dict[str, Path])
    beside: Beside | None = None


@dataclass(frozen=True)
class Beside:
    """Latents that are decoded at the end, in the order or made before, for people to look at.

    Attributes:
        folder: Where their pictures go, see `pipeline.vae_latents.report`.
        jobs: What they were made of.
    """

    folder: Path
    jobs: Sequence[Job]

    @property
    def keys(self) -> set[str]:
        """Of all of them."""
        return {job.spec.key for job in self.jobs}

    def of(self, keys: set[str]) -> Beside:
        """Those with these keys."""
        return Beside(self.folder, [job for job in self.jobs if job.spec.key in keys])


class Meeting:
    """Jobs as they come, with a note of which keys have come by; iterated over once."""

    def __init__(self, jobs: Iterable[Job], keys: set[str]) -> None:
        """Take note of `keys`, and of no others."""
        self._jobs = jobs
        self._keys = keys
        self.met: set[str] = set()

    def __iter__(self) -> Iterator[Job]:
        """In their order."""
        for job in self._jobs:
            if job.spec.key in self._keys:
                self.met.add(job.spec.key)
            yield job


class JobsFile:
    """The jobs of an order, read anew by each iteration: only one is in memory, however many there are.

    Whoever asks while the stage has not written them yet waits until it has.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is read yet."""
        self._path = path

    def __len__(self) -> int:
        """How many there are."""
        with self._written().open(encoding="utf-8") as file:
            return json.loads(next(file))

    def __iter__(self) -> Iterator[Job]:
        """In the file's order."""
        with self._written().open(encoding="utf-8") as file:
            next(file)
            for line in file:
                yield _job(json.loads(line))

    def _written(self) -> Path:
        while not self._path.exists():
            time.sleep(_LOOK_INTERVAL_S)
        return self._path


@dataclass
class Results:
    """What the processes of one launch have said so far.

    Attributes:
        made: Keys of the entries that they put in place.
        present: Keys that were in place when their turn came: another job made them meanwhile.
        failed: By key.
        work_s: Seconds from the first read to the last write, of the process that took longest.
        aside_s: Seconds for what is looked at, of the process that took longest.
    """

    made: set[str] = field(default_factory=set[str])
    present: set[str] = field(default_factory=set[str])
    failed: dict[str, Failure] = field(default_factory=dict[str, Failure])
    work_s: float = 0.0
    aside_s: float = 0.0


def write_order(order: Order, folder: Path, *, jobs_follow: bool = False) -> Path:
    """Write the order into `folder`, which must exist.

    Args:
        order: What to write.
        folder: Of this order alone.
        jobs_follow: Leave its jobs to a `write_jobs` that comes later.

    Returns:
        The path of the order file.
    """
    if not jobs_follow:
        write_jobs(order.jobs, folder)
    fields: dict[str, Any] = {
        "kind": order.kind,
        "model_folder": str(order.model_folder),
        "elsewhere": {role: str(place) for role, place in order.elsewhere.items()},
        "store_root": str(order.store_root),
        "settings": dict(order.settings),
    }
    if order.beside is not None:
        jobs = [_fields(job) for job in order.beside.jobs]
        fields["beside"] = {"folder": str(order.beside.folder), "jobs": jobs}
    path = folder / ORDER_FILE
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


def write_jobs(jobs: Jobs, folder: Path) -> None:
    """Write the jobs of the order in `folder`; processes that wait for them see all at once."""
    unfinished = folder / f"{JOBS_FILE}.unfinished"
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(f"{len(jobs)}\n")
        for job in jobs:
            file.write(json.dumps(_fields(job)) + "\n")
    unfinished.rename(folder / JOBS_FILE)


def read_order(path: Path) -> Order:
    """The order as it was written; its jobs are read when they are iterated over."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    looked_at = fields.get("beside")
    beside = looked_at and Beside(Path(looked_at["folder"]), [_job(job) for job in looked_at["jobs"]])
    return Order(
        fields["kind"],
        Path(fields["model_folder"]),
        address(fields["store_root"]),
        fields["settings"],
        JobsFile(path.parent / JOBS_FILE),
        {role: Path(place) for role, place in fields["elsewhere"].items()},
        beside,
    )


def _fields(job: Job) -> dict[str, Any]:
    """For `_job`; written out, since `asdict` copies for half a millisecond a job."""
    tensors = {name: (t.dtype, t.shape, t.ragged) for name, t in job.spec.tensors.items()}
    spec = {"kind": job.spec.kind, "key": job.spec.key, "tensors": tensors}
    return {"spec": spec, "facts": job.facts, "work": job.work, "name": job.name, "cost": job.cost}


def _job(fields: dict[str, Any]) -> Job:
    spec = fields["spec"]
    tensors = {
        name: TensorSpec(dtype, tuple(shape), ragged)
        for name, (dtype, shape, ragged) in spec["tensors"].items()
    }
    made_of = EntrySpec(spec["kind"], spec["key"], tensors)
    return Job(made_of, fields["facts"], fields["work"], fields["name"], fields["cost"])


NUM_PROBES = 3
"""Most jobs that come before the others, see `pipeline.encoding.turn`."""


def share(jobs: Iterable[Job], rank: int, num_ranks: int) -> Iterator[Job]:
    """The jobs of one process, in their order: each job goes to exactly one, and all take about as long.

    Each to the process with the least so far. The answer depends on the jobs alone, so processes need not
    talk.
    """
    loads = [0] * num_ranks
    for job in jobs:
        lightest = loads.index(min(loads))
        loads[lightest] += job.cost
        if lightest == rank:
            yield job


class ResultsWriter:
    """Appends one process's results, from any thread, each visible to others at once; a context manager."""

    def __init__(self, order_file: Path, rank: int) -> None:
        """Begin `results-<rank>.jsonl` beside the order."""
        self._lock = threading.Lock()
        self._file: TextIO = (order_file.parent / f"results-{rank}.jsonl").open("w", encoding="utf-8")

    def ended(self, key: str, outcome: Literal["made", "present"] | Failure) -> None:
        """One job came to its end."""
        failure = asdict(outcome) if isinstance(outcome, Failure) else None
        self._write({"key": key, "outcome": "failed" if failure else outcome, "failure": failure})

    def finish(self, work_s: float, *, aside_s: float = 0.0) -> None:
        """All jobs of this process have ended; `work_s` is without start-up and without `aside_s`."""
        self._write({"work_s": work_s, "aside_s": aside_s})

    def __enter__(self) -> ResultsWriter:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        with self._lock:
            self._file.write(text)
            self._file.flush()


def read_results(folder: Path) -> Results:
    """What all processes have said; a line that is still being written is left out."""
    results = Results()
    for path in sorted(folder.glob(RESULTS_PATTERN)):
        for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if text.endswith("\n"):
                _take(json.loads(text), results)
    return results


def _take(line: dict[str, Any], results: Results) -> None:
    if "work_s" in line:
        results.work_s = max(results.work_s, line["work_s"])
        results.aside_s = max(results.aside_s, line["aside_s"])
    elif line["outcome"] == "failed":
        results.failed[line["key"]] = Failure(**line["failure"])
    else:
        (results.made if line["outcome"] == "made" else results.present).add(line["key"])
