"""Files that belong to images, such as masks: find the file of each image, and read each file once.

A file is paired with its image by relative path without suffix, or by a column of the manifest. Facts of
files are remembered like captions: a file is not read again while its stat is unchanged.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import polars as pl

from pipeline.images.decoder_warnings import counted_warnings
from pipeline.images.failures import image_errors
from pipeline.images.formats import ImageError
from pipeline.raw_images.folder import FoundFile, Problem, WalkResult, sidecar_path, walk_local, walk_remote
from pipeline.raw_images.manifest import composed, paired_by_path, path_normalizer, walk_manifest
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.scan_index import STAT
from pipeline.raw_images.stage import CLOCK_GRANULARITY_NS
from pipeline.storage.remote_source import RemoteSource
from pipeline.storage.source import LocalSource, Source, threads_for

if TYPE_CHECKING:
    from pipeline.log import Log
    from pipeline.recipe import DatasetSettings
    from pipeline.recipe.datasets import SideInputSettings
    from pipeline.side_inputs import SideInput
    from pipeline.storage.addresses import Address

Row = dict[str, Any]


class PairedFile(NamedTuple):
    """A file to read: the folder that its path is relative to, how to read it, its path and its stat."""

    root: str
    kind: str
    path: str
    stat: tuple[int, ...]


@dataclass
class PairedSamples:
    """Samples with their files.

    Attributes:
        samples: The samples that are kept, with further columns if the recipe has such files.
        rejected: Rows of the table of rejected samples.
        index: Facts of all usable files, for the next run.
        unmatched: Files without an image, as dataset name and path.
    """

    samples: pl.DataFrame
    rejected: pl.DataFrame
    index: pl.DataFrame
    unmatched: list[str] = field(default_factory=list[str])


class Finder:
    """Finds the files of one dataset's images."""

    def __init__(
        self,
        settings: DatasetSettings,
        paired: SideInputSettings,
        source: LocalSource | RemoteSource,
        raw: pl.DataFrame,
        *,
        side_input: SideInput,
    ) -> None:
        """List the files.

        Args:
            settings: The dataset.
            paired: Where its files are; without `path` and `column`, each image is its own file.
            source: Source of the files.
            raw: Table raw_images; a file of any of these images is not unmatched.
            side_input: The kind of files.

        Raises:
            DatasetError: The folder of the files cannot be listed, or the manifest cannot be used.
        """
        self._settings = settings
        self._paired = paired
        self._side_input = side_input
        self._root, self._kind = str(source.address), side_input.reads_as(paired)
        self._by_stem: dict[str, list[FoundFile]] = {}
        self._by_image: dict[str, FoundFile | Problem | None] = {}

        # All images count, also rejected ones: their files are not superfluous.
        images = raw.filter(pl.col("dataset") == settings.name)
        if paired.path is not None:
            self._by_stem = _files_by_stem(paired.path, paired.suffix, source)

            # Two images of one name, such as a.jpg and a.png, would share the file, which is an error.
            self._images_of_stem = Counter(_stem(path) for path in images["path"])
        elif paired.column is not None:
            self._by_image = _files_by_image(settings, paired.column, source)
        else:
            stats = images.select("path", *STAT).rows()
            self._by_image = {composed(path): FoundFile(path, *stat, device=0) for path, *stat in stats}

    def find(self, row: Row) -> PairedFile | ImageError:
        """Return the file of a sample, or the reason why it has none."""
        in_folder = self._paired.path is not None
        found = self._of_folder(row["path"]) if in_folder else self._of_image(row["path"])
        if isinstance(found, ImageError):
            return found
        return PairedFile(self._root, self._kind, found.path, found[1:5])

    def where(self, path: str) -> str:
        """Return the path or address of a file, for messages."""
        return f"{self._root}/{path}"

    def unmatched(self) -> list[str]:
        """Return the paths of files without an image."""
        # Only a separate folder can hold files that belong to no image, and a manifest may list a part of a
        # folder's images.
        if self._settings.is_manifest or self._paired.path is None:
            return []
        files = (
            file
            for stem, files in self._by_stem.items()
            if stem not in self._images_of_stem
            for file in files
        )
        return [file.path for file in files]

    def _of_folder(self, path: str) -> FoundFile | ImageError:
        stem, noun = _stem(path), self._side_input.name
        name = f"{stem}{self._paired.suffix}"
        files = self._by_stem.get(stem, [])
        if self._images_of_stem[stem] > 1:
            detail = f"{self._images_of_stem[stem]} images have the {noun} {name}"
            fix = f"rename the images, so that each has its own {noun}"
            return ImageError(f"{noun}_shared", detail, fix=fix)
        if not files:
            detail = f"{self._paired.path} does not contain an image {name}.*"
            add = self._side_input.add_file.format(folder=self._paired.path, name=name)
            fix = f"{add}; or move the image to a dataset without {noun}s"
            return ImageError(f"{noun}_missing", detail, fix=fix)
        if len(files) > 1:
            names = " and ".join(sorted(file.path for file in files))
            detail = f"it has several {noun}s: {names}"
            return ImageError(f"{noun}_ambiguous", detail, fix="remove all but one")
        return files[0]

    def _of_image(self, path: str) -> FoundFile | ImageError:
        found, noun = self._by_image.get(composed(path)), self._side_input.name
        if found is None:
            detail = f"the column {self._paired.column!r} is empty in its row of the manifest"
            fix = (
                f"write the path of the {noun} into that row, or move the image to a dataset without {noun}s"
            )
            return ImageError(f"{noun}_missing", detail, fix=fix)
        if isinstance(found, Problem):
            return ImageError(f"{noun}_{found.reason}", found.detail, fix=found.fix)
        return found


def _stem(path: str) -> str:
    return composed(sidecar_path(path, ""))


def _files_by_stem(
    root: Address, suffix: str, source: LocalSource | RemoteSource
) -> dict[str, list[FoundFile]]:
    """Return the files of a folder by their path without `suffix` and file suffix."""
    walk = WalkResult()
    if isinstance(source, LocalSource):
        walk_local(Path(root), result=walk, key=source.key)
        source.links_out = frozenset(walk.links_out)
    else:
        walk_remote(source, result=walk)
    files: defaultdict[str, list[FoundFile]] = defaultdict(list)
    for file in walk.images:
        stem = _stem(file.path)
        if stem.endswith(suffix):
            files[stem.removesuffix(suffix)].append(file)
    return dict(files)


def _files_by_image(
    settings: DatasetSettings, column: str, source: Source
) -> dict[str, FoundFile | Problem | None]:
    """Return the file, or why there is none, of each image that the manifest lists."""
    walk = walk_manifest(settings.model_copy(update={"path_column": column}), source)
    files: dict[str, FoundFile | Problem] = {file.path: file for file in walk.images}
    normalize = path_normalizer(settings)
    files |= {normalize(problem.path): problem for problem in walk.problems}
    paths = paired_by_path(settings, column, max_bytes=source.max_file_bytes)

    # A file with the written name comes first: two names may differ only in Unicode form.
    others = {composed(path): file for path, file in files.items()}
    return {image: files.get(path, others.get(composed(path))) for image, path in paths.items()}


ReadContent = Callable[[BinaryIO, str], Row]
"""Decodes an open file of a `PairedFile.kind` completely and returns its facts.

Raises ImageError if the file cannot be used.
"""


class Reader:
    """Reads files, or takes their facts from earlier runs.

    Facts are `root`, `source` (the file's kind), `path`, the columns of `STAT`, `read_ns`, `hash`, and the
    facts that `content` returns.
    """

    def __init__(
        self, sources: Mapping[str, Source], content: ReadContent, known: pl.DataFrame, log: Log
    ) -> None:
        """Prepare to read.

        Args:
            sources: Sources by `PairedFile.root`.
            content: Decodes a file.
            known: Facts that earlier runs read.
            log: Receives the progress.
        """
        self._sources = sources
        self._content = content
        # As for images: a file that changed shortly before it was read may have changed again.
        settled = known.filter(pl.col("ctime_ns") + CLOCK_GRANULARITY_NS < pl.col("read_ns"))
        self._known = {_file_of(row): row for row in settled.rows(named=True)}
        self._log = log

    def read(self, files: list[PairedFile], *, doing: str) -> dict[PairedFile, Row | ImageError]:
        """Return the facts of each file, or why it cannot be used; `doing` names the work in the log."""
        facts: dict[PairedFile, Row | ImageError] = {
            file: self._known[file] for file in files if file in self._known
        }

        # A file's stat is part of `PairedFile`, so that a changed file is another one and is read.
        unread = [file for file in files if file not in facts]
        with counted_warnings(self._log):
            threads = threads_for(self._sources.values())
            read = in_threads(self._read, unread, log=self._log, doing=doing, threads=threads)
            facts |= dict(zip(unread, read, strict=True))
        return facts

    def _read(self, file: PairedFile) -> Row | ImageError:
        source, read_ns = self._sources[file.root], time.time_ns()
        where = source.where(file.path)
        try:
            with image_errors(where), source.open(file.path, file.stat[0]) as opened:
                content_hash = hashlib.file_digest(opened, "sha256").hexdigest()
                opened.seek(0)
                content = self._content(opened, file.kind)
        except ImageError as err:
            return err
        return {
            "root": file.root,
            "source": file.kind,
            "path": file.path,
            **dict(zip(STAT, file.stat, strict=True)),
            "read_ns": read_ns,
            "hash": content_hash,
            **content,
        }


def _file_of(row: Row) -> PairedFile:
    return PairedFile(row["root"], row["source"], row["path"], tuple(row[name] for name in STAT))


def usable(facts: list[Row | ImageError], schema: dict[str, Any]) -> pl.DataFrame:
    """Return the facts of usable files as a table with the columns `schema`."""
    return pl.DataFrame([each for each in facts if isinstance(each, dict)], schema=schema)
