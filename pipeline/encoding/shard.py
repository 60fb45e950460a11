"""Encode one shard of an encoding on any machine: `latentline encode`."""

from __future__ import annotations

import json
import platform
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from pipeline.background import in_background
from pipeline.cache.sealing import seal_new
from pipeline.cache.store import Store
from pipeline.encoding.collecting import Collector
from pipeline.encoding.jobs import (
    ENCODING_FILE,
    JOBS_FILE,
    Encoding,
    Job,
    Jobs,
    ResultsWriter,
    read_encoding,
    share,
    write_encoding,
)
from pipeline.encoding.shared_encoding import PICTURES, ResultsUpload, Shard, SharedEncoding
from pipeline.encoding.workers import WORKERS
from pipeline.errors import LatentlineError, ModelError, StoreError, counted
from pipeline.log import Log
from pipeline.models.captioner_folder import captioner_part, resolve_captioner
from pipeline.models.components import resolve_components
from pipeline.models.families import Use, detect
from pipeline.models.fingerprints import Fingerprints
from pipeline.models.resolve import resolve_base
from pipeline.processes.launch import Launch, LocalLaunch, error_to_json
from pipeline.recipe import AccelerateSettings, CaptionSettings, ModelSettings

if TYPE_CHECKING:
    from pipeline.cache.store import Kind
    from pipeline.models.fingerprints import ModelPart

# It decides how current the stage's progress is.
UPLOAD_INTERVAL_S = 2.0
"""Seconds between two copies of the results."""

_BASE = ("base model", "model.base")


def encode_shard(encoding: SharedEncoding, shard: Shard, *, log: Log, launch: Launch | None = None) -> None:
    """Encode the entries of a shard that the cache lacks; results and pictures go to the encoding.

    A shard may be encoded any number of times, also at the same time: entries that exist are skipped, and a
    shard that an earlier attempt has finished is not read again. By default, the encoding process is a
    subprocess on this machine.

    Raises:
        StoreError: The encoding or the cache cannot be read or written.
        ModelError: The model is not on this machine, or differs from the stage's.
        LatentlineError: The encoding process raised it.
        LaunchError: The encoding process died.
    """
    with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
        own_folder, pictures = Path(folder, "shard"), Path(folder, PICTURES)
        own_folder.mkdir()
        upload = ResultsUpload(encoding, shard, own_folder / "results-0.jsonl")
        with _error_uploaded(upload):
            encoding_file, settings = encoding.fetch(Path(folder))
            if is_finished(encoding, shard):
                log(f"shard {shard} of {encoding.encoding_id} was finished earlier")
                return

            with encoding.as_data(ENCODING_FILE):
                complete = read_encoding(encoding_file)
                accelerate = AccelerateSettings(cpu_threads=settings["cpu_threads"])
                named, fingerprint = _named_model(complete)
            complete = _with_model(complete, named, fingerprint, Path(folder), log)
            with encoding.as_data(JOBS_FILE):
                own = _own_encoding(complete, shard, pictures)
                own_file = write_encoding(own, own_folder)
            with _uploaded(upload, log):
                # A process without a job would load the model for nothing.
                if len(own.jobs) or (own.pictures is not None and own.pictures.jobs):
                    (launch or LocalLaunch(accelerate, log))(WORKERS[own.kind], own_file)
                else:
                    with ResultsWriter(own_file, 0) as results:
                        results.finish(0.0)

                for file in pictures.glob("*"):
                    encoding.put(f"{PICTURES}/{file.name}", file.read_bytes())
                if own.seal_packs:
                    seal_new(Store(own.store_root), [job.spec for job in own.jobs], log=log)
        log(f"shard {shard} of {encoding.encoding_id} is complete: {counted(len(own.jobs), 'job')}")


def is_finished(encoding: SharedEncoding, shard: Shard) -> bool:
    """Return whether an attempt at the shard has finished; raises StoreError if it cannot be read."""
    with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
        collector = Collector(encoding, Path(folder))
        collector.poll()
        return collector.has_finished(shard)


class _ShardJobs:
    """Jobs of a shard, chosen anew by each iteration, so that only one is in memory."""

    def __init__(self, jobs: Jobs, shard: Shard) -> None:
        self._jobs = jobs
        self._shard = shard

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Job]:
        return share(self._jobs, self._shard.index, self._shard.count)

    @cached_property
    def _count(self) -> int:
        return sum(1 for _ in self)


def _own_encoding(encoding: Encoding, shard: Shard, pictures: Path) -> Encoding:
    jobs = _ShardJobs(encoding.jobs, shard)
    if encoding.pictures is None:
        return replace(encoding, jobs=jobs)
    keys = encoding.pictures.keys
    own_keys = {job.spec.key for job in jobs if job.spec.key in keys}

    # Latents of earlier runs are in no shard's jobs, so the first shard draws them.
    if shard.index == 0:
        own_keys |= keys - {job.spec.key for job in encoding.jobs if job.spec.key in keys}
    return replace(encoding, jobs=jobs, pictures=replace(encoding.pictures.select(own_keys), folder=pictures))


@dataclass(frozen=True)
class _NamedBase:
    """The base model of an encoding, in the form that `resolve_base` needs."""

    model: ModelSettings
    source: Path

    def folders(self, log: Log) -> tuple[Path, dict[str, Path]]:
        return resolve_base(self, log=log), resolve_components(self, log=log)

    def parts(self, kind: Kind, folder: Path, components: Mapping[str, Path]) -> Sequence[ModelPart]:
        return detect(folder, components).fingerprint_parts(cast("Use", kind))


@dataclass(frozen=True)
class _NamedCaptioner:
    """The captioning model of an encoding."""

    captions: CaptionSettings
    source: Path

    def folders(self, log: Log) -> tuple[Path, dict[str, Path]]:
        where = f"{self.source}, datasets[].captions"
        return resolve_captioner(self.captions, where=where, log=log), {}

    def parts(self, kind: Kind, folder: Path, components: Mapping[str, Path]) -> Sequence[ModelPart]:
        return [captioner_part(self.captions, folder)]


_NamedModel: TypeAlias = _NamedBase | _NamedCaptioner


def _named_model(encoding: Encoding) -> tuple[_NamedModel, str]:
    """Return the model of an encoding and its fingerprint; raises an error of parsing if it is unusable."""
    if encoding.model is None or encoding.kind not in WORKERS:
        raise ValueError("it must have a kind and a model")
    settings, source = encoding.model.settings, Path(encoding.model.source)
    fingerprint = str(encoding.model.fingerprint)
    if encoding.kind == "captions":
        # As JSON, because the strict settings of Python have tuples in place of lists.
        captions = CaptionSettings.model_validate_json(json.dumps(dict(settings)))
        if captions.model is None:
            raise ValueError("captions must have a model")
        return _NamedCaptioner(captions, source), fingerprint
    return _NamedBase(ModelSettings.model_validate(settings), source), fingerprint


def _with_model(encoding: Encoding, named: _NamedModel, fingerprint: str, temp: Path, log: Log) -> Encoding:
    """Return the encoding with folders of this machine that hold exactly the stage's model."""
    what, key = ("captioning model", "captions.model") if encoding.kind == "captions" else _BASE
    folder, components = encoding.model_folder, dict(encoding.component_folders)
    if not all(each.is_dir() for each in (folder, *components.values())):
        try:
            folder, components = named.folders(log)
        except ModelError as err:
            raise ModelError(
                f"the {what} is not on this worker ({platform.node()}): {err.what}",
                where=f"{err.where}; the stage has it at {encoding.model_folder}",
                fix=f"put the model on a disk that all machines mount at the same path, or set {key} to "
                f"a Hub id; otherwise: {err.fix}",
            ) from err

    # The keys of the entries contain the stage's fingerprint, so the worker must encode with the same files.
    # Hashes of weights are remembered for each machine, and so not in a remote cache.
    memory = encoding.store_root if isinstance(encoding.store_root, Path) else temp
    own = Fingerprints(memory, log=log).of(named.parts(encoding.kind, folder, components))
    if own != fingerprint:
        raise ModelError(
            f"the {what} of this worker ({platform.node()}) differs from the stage's: fingerprint "
            f"{own[:16]} instead of {fingerprint[:16]}",
            where=str(folder),
            fix=f"if {key} is a Hub id, set {key.partition('.')[0]}.revision to a commit, so that all "
            "machines load the same files; if it is a folder, copy it to this machine again",
        )
    return replace(encoding, model_folder=folder, component_folders=components)


@contextmanager
def _uploaded(upload: ResultsUpload, log: Log) -> Generator[None]:
    def push_repeatedly(over: threading.Event) -> None:
        is_failing = False
        while not over.wait(UPLOAD_INTERVAL_S):
            try:
                upload.push()
                is_failing = False
            except StoreError as err:
                if not is_failing:
                    log(f"warning: {err.what}; trying again")
                is_failing = True

    try:
        # The stage shows the progress of a shard while it runs.
        with in_background(push_repeatedly, name="upload"):
            yield
    except BaseException:
        with suppress(StoreError):  # the first error is the cause
            upload.push()
        raise
    upload.push()


@contextmanager
def _error_uploaded(upload: ResultsUpload) -> Generator[None]:
    try:
        yield
    except LatentlineError as err:
        with suppress(StoreError):  # printed by this process in any case
            upload.put_error(error_to_json(err))
        raise
