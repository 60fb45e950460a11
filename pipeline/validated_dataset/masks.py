"""Find the mask of each image, decode it once, and reject samples whose mask is missing or not usable.

Facts of masks are remembered like those of captions: a file is not read again while its stat is unchanged.
"""

from __future__ import annotations

import hashlib
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from pipeline.cache.mask_requests import mask_sources
from pipeline.images.decode import DecodeLimits
from pipeline.images.decoder_warnings import counted_warnings
from pipeline.images.failures import image_errors
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Size
from pipeline.images.mask import MaskSource, mask_error, read_mask
from pipeline.raw_images.folder import FoundFile, Problem, WalkResult, sidecar_path, walk_local, walk_remote
from pipeline.raw_images.manifest import mask_column_by_path, walk_manifest
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.rejection import rejection
from pipeline.raw_images.scan_index import MASKS, STAT
from pipeline.raw_images.sources import mask_sources_of
from pipeline.raw_images.stage import CLOCK_GRANULARITY_NS
from pipeline.storage.local_source import LocalSource
from pipeline.storage.remote_source import RemoteSource
from pipeline.storage.source import Source, threads_for
from pipeline.storage.tables import MASK_COLUMNS, REJECTED

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe
    from pipeline.reporting.reports import Log
    from pipeline.storage.addresses import Address

STAGE = "validated_dataset"

Row = dict[str, Any]


class _MaskFile(NamedTuple):
    """A mask to read: the dataset, its path and stat; the stat is that of the scan for an image's opacity."""

    dataset: str
    path: str
    stat: tuple[int, ...]


@dataclass
class MaskedSamples:
    """Samples with their masks.

    Attributes:
        samples: The samples that are kept, with the columns of masks if the recipe has masks.
        rejected: Rows of the table of rejected samples.
        index: Facts of all usable masks, with the columns `MASKS`.
        unmatched: Masks without an image, as dataset name and path.
    """

    samples: pl.DataFrame
    rejected: pl.DataFrame
    index: pl.DataFrame
    unmatched: list[str] = field(default_factory=list[str])


def with_masks(
    recipe: Recipe, samples: pl.DataFrame, raw: pl.DataFrame, known: pl.DataFrame, *, log: Log
) -> MaskedSamples:
    """Add the masks of all samples whose dataset has masks; return all samples if none has.

    Args:
        recipe: The recipe.
        samples: Samples whose image and caption can be used.
        raw: Table raw_images; a mask of any of these images is not unmatched.
        known: Facts of masks that earlier runs read, with the columns `MASKS`.
        log: Receives the progress.

    Raises:
        DatasetError: The folder of the masks cannot be listed, or the manifest cannot be used.
    """
    sources = mask_sources_of(recipe)
    if not sources:
        return MaskedSamples(samples, pl.DataFrame(schema=REJECTED), pl.DataFrame(schema=MASKS))

    finders = {
        dataset.name: _Finder(dataset, sources[dataset.name], raw)
        for dataset in recipe.datasets
        if dataset.mask is not None
    }
    rows = samples.filter(pl.col("dataset").is_in(list(finders))).rows(named=True)
    found: dict[str, _MaskFile | ImageError] = {
        row["sample_id"]: finders[row["dataset"]].find(row) for row in rows
    }
    files = list(dict.fromkeys(each for each in found.values() if isinstance(each, _MaskFile)))
    facts = _Reader(recipe, sources, known, log).read(files)

    masks: list[Row] = []
    rejected: list[Row] = []
    for row in rows:
        mask = found[row["sample_id"]]
        try:
            fact = _usable(row, mask, facts)
        except ImageError as err:
            rejected.append({**row, **rejection(err, STAGE, row["content_hash"])})
        else:
            columns = {"mask_path": fact["path"], "mask_hash": fact["hash"], "mask_mean": fact["mean"]}
            masks.append({"sample_id": row["sample_id"], **columns})

    table = pl.DataFrame(masks, schema={"sample_id": pl.String, **MASK_COLUMNS[STAGE]})
    kept = samples.join(table, on="sample_id", how="left", maintain_order="left")
    kept = kept.filter(~pl.col("dataset").is_in(list(finders)) | pl.col("mask_hash").is_not_null())
    return MaskedSamples(
        kept,
        pl.DataFrame([{name: row[name] for name in REJECTED} for row in rejected], schema=REJECTED),
        pl.DataFrame([each for each in facts.values() if isinstance(each, dict)], schema=MASKS),
        sorted(f"{name}/{path}" for name, finder in finders.items() for path in finder.unmatched()),
    )


class _Finder:
    """Finds the mask files of one dataset."""

    def __init__(
        self, settings: DatasetSettings, source: LocalSource | RemoteSource, raw: pl.DataFrame
    ) -> None:
        assert settings.mask is not None
        self._settings = settings
        self._mask = settings.mask
        self._raw = raw.filter(pl.col("dataset") == settings.name)
        self._by_stem: dict[str, list[FoundFile]] = {}
        self._by_image: dict[str, FoundFile | Problem | None] = {}
        if self._mask.path is not None:
            self._by_stem = _files_by_stem(self._mask.path, self._mask.suffix, source)
            self._images_of_stem = Counter(_stem(path) for path in self._raw["path"])
        elif self._mask.column is not None:
            self._by_image = _files_by_image(settings, self._mask.column, source)
        else:
            stats = self._raw.select("path", *STAT).rows()
            self._by_image = {path: FoundFile(path, *stat, device=0) for path, *stat in stats}

    def find(self, row: Row) -> _MaskFile | ImageError:
        """Return the mask file of a sample, or the reason why it has none."""
        found = self._of_folder(row["path"]) if self._mask.path is not None else self._of_image(row["path"])
        if isinstance(found, ImageError):
            return found
        return _MaskFile(self._settings.name, found.path, found[1:5])

    def unmatched(self) -> list[str]:
        """Return the paths of masks without an image. A manifest may list a part of a folder's images."""
        if self._settings.is_manifest or self._mask.path is None:
            return []
        files = (
            file
            for stem, files in self._by_stem.items()
            if stem not in self._images_of_stem
            for file in files
        )
        return [file.path for file in files]

    def _of_folder(self, path: str) -> FoundFile | ImageError:
        stem = _stem(path)
        name = f"{stem}{self._mask.suffix}"
        files = self._by_stem.get(stem, [])
        if self._images_of_stem[stem] > 1:
            detail = f"{self._images_of_stem[stem]} images have the mask {name}"
            return ImageError("mask_shared", detail, fix="rename the images, so that each has its own mask")
        if not files:
            detail = f"{self._mask.path} has no image {name}.*"
            fix = f"draw the mask {name}.png, white where the image counts; or move the image to a dataset "
            return ImageError("mask_missing", detail, fix=f"{fix}without masks")
        if len(files) > 1:
            names = " and ".join(sorted(file.path for file in files))
            return ImageError("mask_ambiguous", f"it has several masks: {names}", fix="remove all but one")
        return files[0]

    def _of_image(self, path: str) -> FoundFile | ImageError:
        found = self._by_image.get(path)
        if found is None:
            detail = f"the column {self._mask.column!r} is empty in its row of the manifest"
            fix = "write the path of its mask, or move the image to a dataset without masks"
            return ImageError("mask_missing", detail, fix=fix)
        if isinstance(found, Problem):
            return ImageError(f"mask_{found.reason}", found.detail, fix=found.fix)
        return found


def _stem(path: str) -> str:
    return unicodedata.normalize("NFC", sidecar_path(path, ""))


def _files_by_stem(
    root: Address, suffix: str, source: LocalSource | RemoteSource
) -> dict[str, list[FoundFile]]:
    """Return the files of a mask folder by their path without `suffix` and file suffix."""
    walk = WalkResult()
    if isinstance(source, LocalSource):
        walk_local(Path(root), result=walk)
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
    """Return the file, or why there is none, of each image whose row of the manifest names a mask."""
    walk = walk_manifest(settings.model_copy(update={"path_column": column}), source)
    files: dict[str, FoundFile | Problem] = {file.path: file for file in walk.images}
    files |= {problem.path: problem for problem in walk.problems}
    return {image: files.get(mask) for image, mask in mask_column_by_path(settings, column).items()}


class _Reader:
    """Reads mask files, or takes their facts from earlier runs."""

    def __init__(self, recipe: Recipe, sources: Mapping[str, Source], known: pl.DataFrame, log: Log) -> None:
        self._sources = sources
        self._kinds = mask_sources(recipe)
        self._limits = DecodeLimits(recipe.checks.max_image_pixels, recipe.checks.max_decode_bytes)
        # As for images: a file that changed shortly before it was read may have changed again.
        settled = known.filter(pl.col("ctime_ns") + CLOCK_GRANULARITY_NS < pl.col("read_ns"))
        self._known = {_key(row): row for row in settled.rows(named=True)}
        self._log = log

    def read(self, files: list[_MaskFile]) -> dict[_MaskFile, Row | ImageError]:
        """Return the facts of each file (columns `MASKS`), or why it cannot be used."""
        facts: dict[_MaskFile, Row | ImageError] = {}
        unread: list[_MaskFile] = []
        for file in files:
            known = self._known.get((self._root(file), self._kinds[file.dataset], file.path, file.stat))
            if known is None:
                unread.append(file)
            else:
                facts[file] = known
        with counted_warnings(self._log):
            threads = threads_for(self._sources.values())
            read = in_threads(self._read, unread, log=self._log, doing="masks read", threads=threads)
            facts |= dict(zip(unread, read, strict=True))
        return facts

    def _root(self, file: _MaskFile) -> str:
        return str(self._sources[file.dataset].address)

    def _read(self, file: _MaskFile) -> Row | ImageError:
        source, kind, read_ns = self._sources[file.dataset], self._kinds[file.dataset], time.time_ns()
        where = source.where(file.path)
        try:
            with image_errors(where), source.open(file.path, file.stat[0]) as opened:
                content_hash = hashlib.file_digest(opened, "sha256").hexdigest()
                opened.seek(0)
                content = read_mask(opened, kind, limits=self._limits)
        except ImageError as err:
            return err
        return {
            "root": self._root(file),
            "source": kind,
            "path": file.path,
            **dict(zip(STAT, file.stat, strict=True)),
            "read_ns": read_ns,
            "hash": content_hash,
            **content.size._asdict(),
            "mean": content.mean,
        }


def _key(row: Row) -> tuple[str, MaskSource, str, tuple[int, ...]]:
    return row["root"], row["source"], row["path"], tuple(row[name] for name in STAT)


def _usable(row: Row, mask: _MaskFile | ImageError, facts: Mapping[_MaskFile, Row | ImageError]) -> Row:
    """Return the facts of a sample's mask.

    Raises:
        ImageError: The sample has no mask, or it cannot be used; the reason starts with "mask_".
    """
    if isinstance(mask, ImageError):
        raise mask
    fact = facts[mask]
    if isinstance(fact, ImageError):
        raise mask_error(fact, mask.path)

    image, size = Size(row["height"], row["width"]), Size(fact["height"], fact["width"])
    if size == image:
        return fact
    detail = f"the mask {mask.path} is {size}, and its image is {image} (height x width, as displayed)"
    if size == image.transposed:
        fix = "rotate the mask as the image is displayed; the image's EXIF orientation rotates it"
        raise ImageError("mask_orientation", detail, fix=fix)
    raise ImageError("mask_size", detail, fix=f"export the mask in the size of the image, {image}")
