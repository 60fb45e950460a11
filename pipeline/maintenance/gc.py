"""Garbage collection: find cache entries that no job used for a while, and files of interrupted writers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import PurePosixPath

import numpy as np
import polars as pl

from pipeline.cache import used_keys
from pipeline.cache.backends import access_fix, cache_folder
from pipeline.cache.folder import CacheFile, CacheFolder
from pipeline.cache.packs import PACKS
from pipeline.cache.recipe_entries import SEEN, RecipeEntries
from pipeline.cache.store import KINDS, SUFFIX
from pipeline.cache.used_keys import KeyLists, Keys, UsedKeys, are_in
from pipeline.encoding.shared_encoding import ENCODINGS
from pipeline.errors import StoreError
from pipeline.evaluation.known_entries import read_known
from pipeline.log import Log, discard
from pipeline.maintenance.deletion import delete_files
from pipeline.maintenance.gc_packs import Packs, delete_old, delete_single
from pipeline.recipe import Recipe
from pipeline.side_inputs import SIDE_INPUTS
from pipeline.storage.addresses import Address
from pipeline.storage.atomic import OLD_S, is_temp_name
from pipeline.storage.tables import Tables
from pipeline.text_embeddings.caption_rows import CAPTION_COLUMNS, text_rows
from pipeline.text_embeddings.stage import needed_texts
from pipeline.vae_latents.side_inputs import without_refused

KEEP_S = 30 * 24 * 3600.0
"""Time for which an entry is kept after its last use."""

_EARLIER_FOLDER = "outputs"
"""Folder in which version 0.2 registered the output folders that use a cache."""

_BATCH = 500
"""Number of files that are deleted before the lists of used keys are read again."""

_CLASSIFIED_AT_ONCE = 10_000

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass
class Survey:
    """Contents of a cache. Files are named by their path below the cache.

    Attributes:
        used: Keys that jobs used recently.
        packs: Packs, and the single entries that packs also hold.
        recipe_keys: Keys that recipes need, see `survey`; None if they were not determined.
        entries: Number of single entries.
        entry_bytes: Size of all single entries.
        num_used: Number of single entries that were used recently.
        orphans: Size of each single entry that was not used or written recently.
        young: Number of single entries that were not used, but written recently or at an unknown time.
        expired_lists: Size of each list of used keys that does not count any more.
        leftovers: Size of each old temporary file, and of each old registration of version 0.2.
        old_encodings: Size of each file of a shared encoding without a recent file.
        num_old_encodings: Number of these encodings.
        num_young_encodings: Number of encodings with a recent file, which workers may be computing.
        foreign: Files that Latentline did not write and never touches.
    """

    used: UsedKeys
    packs: Packs
    recipe_keys: Sequence[pl.Series] | None = None
    entries: int = 0
    entry_bytes: int = 0
    num_used: int = 0
    orphans: dict[str, int] = field(default_factory=dict[str, int])
    young: int = 0
    expired_lists: dict[str, int] = field(default_factory=dict[str, int])
    leftovers: dict[str, int] = field(default_factory=dict[str, int])
    old_encodings: dict[str, int] = field(default_factory=dict[str, int])
    num_old_encodings: int = 0
    num_young_encodings: int = 0
    foreign: list[str] = field(default_factory=list[str])

    @property
    def is_use_known(self) -> bool:
        """Whether an entry without a recent list was not used for so long."""
        # Jobs of version 0.2 wrote no lists, so nothing is known until lists are older than entries may be.
        since_s = self.used.since_s
        return self.recipe_keys is not None or (since_s is not None and since_s < self.used.oldest_kept_s)

    def is_old(self, file: CacheFile) -> bool:
        """Return whether an entry or a pack that is not in a list may be deleted."""
        return self.is_use_known and self.used.is_old(file)

    def add_entries(self, kind: str, files: Sequence[CacheFile]) -> None:
        """Classify single entries of one kind."""
        keys = _keys_of(file.name for file in files)
        for file, is_used, pack in zip(
            files, are_in(keys, self.used.keys), self.packs.holders(kind, keys), strict=True
        ):
            self.entries += 1
            self.entry_bytes += file.num_bytes
            self.num_used += int(is_used)
            if not is_used and self.is_old(file):
                self.orphans[file.name] = file.num_bytes
            elif pack is not None:
                # Readers also find the entry in its pack, so its single file is not needed.
                pack.single[file.name] = file.num_bytes
            elif not is_used:
                self.young += 1

    def add_encodings(self, encodings: Mapping[str, Sequence[CacheFile]], oldest_kept_s: float) -> None:
        """Add shared encodings, by id. One with a file of unknown age counts as young."""
        for files in encodings.values():
            if all(_is_before(file, oldest_kept_s) for file in files):
                self.num_old_encodings += 1
                self.old_encodings |= {file.name: file.num_bytes for file in files}
            else:
                self.num_young_encodings += 1


def survey(
    cache_dir: Address, *, keep_s: float = KEEP_S, recipe_keys: Sequence[pl.Series] | None = None
) -> Survey:
    """Classify every file of a cache, without changing any.

    `keep_s` is the age in seconds up to which lists and entries are kept. `recipe_keys` are the hex keys that
    recipes need, in groups as for `KeyLists`. They are kept, and all other entries that are as old count as
    unused, even if lists are not that old yet.

    Raises:
        StoreError: The cache cannot be listed, or a list of used keys cannot be read.
    """
    used = UsedKeys(cache_dir, keep_s, also=(key for group in recipe_keys or () for key in group))
    used.read()
    result = Survey(used, _read_packs(cache_dir), recipe_keys, expired_lists=used.expired)
    # Encodings and temporary files belong to jobs of the last hours, whatever the age of entries.
    oldest_job_s = used.oldest_kept_s + keep_s - OLD_S

    # An encoding is old only if all of its files are, so these are classified together.
    encodings: defaultdict[str, list[CacheFile]] = defaultdict(list)
    old_pack_files = set[str]()
    for kind, files in groupby(_list_files(cache_dir), _entry_kind):
        if kind:
            # A cache may have millions of entries, and only one part of them is in memory.
            while part := list(islice(files, _CLASSIFIED_AT_ONCE)):
                result.add_entries(kind, part)
            continue

        for file in files:
            path = PurePosixPath(file.name)
            if path.parts[0] == ENCODINGS and len(path.parts) > 2:
                encodings[path.parts[1]].append(file)
            elif file.name in result.packs:
                old_pack_files |= {file.name} if result.is_old(file) else set()
            elif _is_leftover(path):
                if _is_before(file, oldest_job_s):
                    result.leftovers[file.name] = file.num_bytes
            elif _is_registration(path):
                # Another machine may still have the earlier version.
                if result.is_old(file):
                    result.leftovers[file.name] = file.num_bytes
            elif not _is_bookkeeping(path):
                result.foreign.append(file.name)

    result.add_encodings(encodings, oldest_job_s)
    result.packs.classify(used.keys, old_pack_files.__contains__)
    return result


def needed_keys(recipe: Recipe, *, log: Log) -> list[pl.Series]:
    """Return the keys that the next cache job would request for an unchanged dataset, in groups as its lists.

    A recipe without tables has no entries yet.

    Raises:
        ModelError: The base model cannot be found.
        TableError: A table cannot be read.
    """
    entries, tables = RecipeEntries(recipe, log=log), Tables(recipe.output_dir)
    by_kind: dict[str, list[pl.Series]] = {}
    if tables.path("aspect_buckets").is_file():
        requests, _ = without_refused(entries, entries.latent_requests(tables.read("aspect_buckets")))
        by_kind["latents"] = [requests["key"]]
        for side_input in SIDE_INPUTS:
            keys = side_input.entry_rows(entries, requests)["key"]
            by_kind.setdefault(side_input.kind, []).append(keys)
    if tables.path("validated_dataset").is_file():
        texts = needed_texts(entries, text_rows(entries, tables.read("validated_dataset", CAPTION_COLUMNS)))
        by_kind["text"] = [entries.text_keys(texts["caption"], texts.get_column(SEEN, default=None))]
    if (diagnosis := tables.read_previous("diagnosis")) is not None:
        by_kind["diagnoses"] = [diagnosis["key"].drop_nulls()]
    if (captions := tables.read_previous("captions")) is not None:
        by_kind["captions"] = [captions["key"]]
    for (kind,), rows in read_known(recipe.output_dir).group_by("kind"):
        by_kind[str(kind)] = [rows["key"]]
    return [pl.concat(parts) for parts in by_kind.values()]


def delete(cache_dir: Address, surveyed: Survey, *, log: Log = discard) -> tuple[int, int]:
    """Delete the survey's orphans, packs, leftovers and old encodings, except entries that a job uses since.

    Single entries that packs hold are deleted too, and lists that do not count any more.

    Returns:
        Number of deleted files, and their total size in bytes.

    Raises:
        StoreError: A list of used keys cannot be read, or a file cannot be deleted.
    """
    cache, used = cache_folder(cache_dir), surveyed.used
    if surveyed.recipe_keys:
        # Their lists may be deleted below, and a later gc must not take the entries for unused.
        KeyLists(cache_dir, surveyed.recipe_keys, log=log).mark()

    leftovers = {**surveyed.leftovers, **surveyed.old_encodings}
    try:
        deleted = delete_single(cache, surveyed.packs, log=log)
        deleted |= delete_old(cache, surveyed.packs, used)
    except OSError as err:
        raise StoreError(
            f"a pack cannot be read: {err.strerror or err}",
            where=cache.where(PACKS),
            fix=access_fix(cache_dir, err),
        ) from err

    names = sorted(surveyed.orphans)
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        # A job may have started since the survey, and may use entries that were orphans then.
        with used.deleting() as until_s:
            is_used = are_in(_keys_of(batch), used.keys)
            unused = {
                name: surveyed.orphans[name]
                for name, used_now in zip(batch, is_used, strict=True)
                if not used_now
            }
            deleted |= delete_files(cache, unused, until_s=until_s)

    if surveyed.expired_lists:
        with used.deleting() as until_s:
            deleted |= delete_files(cache, used.expired, until_s=until_s)
    deleted |= delete_files(cache, leftovers)

    # In reverse order, so that a folder comes after the folders that it contains.
    cache.tidy(sorted({str(PurePosixPath(name).parent) for name in deleted}, reverse=True))
    return len(deleted), sum(deleted.values())


def _keys_of(names: Iterator[str] | Sequence[str]) -> Keys:
    """Return the keys of entries in the order of their names, not sorted."""
    return np.array([bytes.fromhex(PurePosixPath(name).stem) for name in names], "S32")


def _is_before(file: CacheFile, time_s: float) -> bool:
    return file.modified_s is not None and file.modified_s < time_s


def _read_packs(cache_dir: Address) -> Packs:
    cache = cache_folder(cache_dir)
    try:
        return Packs(cache)
    except OSError as err:
        raise _listing_error(cache, err) from err


def _list_files(cache_dir: Address) -> Iterator[CacheFile]:
    cache = cache_folder(cache_dir)
    try:
        yield from cache.files()
    except OSError as err:
        raise _listing_error(cache, err) from err


def _listing_error(cache: CacheFolder, err: OSError) -> StoreError:
    return StoreError(
        f"the cache cannot be listed: {err}",
        where=cache.where(""),
        fix=access_fix(cache.address, err),
    )


def _entry_kind(file: CacheFile) -> str:
    """Return the kind of a single entry, `<kind>/<first two digits>/<key>.safetensors`; empty for others."""
    path = PurePosixPath(file.name)
    if path.suffix != SUFFIX or len(path.parts) != 3 or _KEY.fullmatch(path.stem) is None:
        return ""
    kind, digits, _ = path.parts
    return kind if kind in KINDS and digits == path.stem[:2] else ""


def _is_leftover(path: PurePosixPath) -> bool:
    """Return whether the path has the name of a temporary file, in a folder that Latentline writes to."""
    *folders, name = path.parts
    in_entry_folder = len(folders) == 2 and folders[0] in KINDS and len(folders[1]) == 2
    in_pack_folder = len(folders) == 2 and folders[0] == PACKS and folders[1] in KINDS
    in_folder = folders in ([], [used_keys.FOLDER], [_EARLIER_FOLDER])
    return is_temp_name(name) and (in_folder or in_entry_folder or in_pack_folder)


def _is_registration(path: PurePosixPath) -> bool:
    return len(path.parts) == 2 and path.parts[0] == _EARLIER_FOLDER and path.suffix in {".json", ".keys"}


def _is_bookkeeping(path: PurePosixPath) -> bool:
    """Return whether the path is state of this machine, or belongs to the lists of used keys."""
    if len(path.parts) == 1:
        return path.suffix == ".json"
    return len(path.parts) == 2 and path.parts[0] == used_keys.FOLDER and used_keys.is_used_file(path.name)
