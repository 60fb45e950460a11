"""Sealing of entries in packs: valid single entries are copied into packs, and their files stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pipeline.cache.entry_format import KINDS, EntrySpec, Kind, WrongEntryError
from pipeline.cache.packs import build_pack
from pipeline.cache.store import Store
from pipeline.errors import StoreError, counted
from pipeline.log import Log
from pipeline.reporting.progress import progress
from pipeline.storage.os_errors import is_disk_full

MAX_ENTRIES = 1000
"""Maximum number of entries in a pack."""

# A pack is built in memory. 1,000 latents of SDXL at 1024 px fit.
MAX_BYTES = 128 * 2**20
"""Maximum size of a pack with several entries."""

# Otherwise, small changes of a dataset would make small packs.
MIN_NEW = 100
"""Fewest new entries that `seal_new` seals."""

_READ_AT_ONCE = 64

_PACK_LATER = "then run latentline pack <recipe>"


@dataclass
class Sealed:
    """Result of `seal`.

    Attributes:
        num_packs: Number of packs that were written.
        num_entries: Number of entries in these packs.
        num_bytes: Size of these packs.
        num_packed_before: Number of entries that were in packs before.
        unusable: Problems of the entries that are missing or damaged, by key.
    """

    num_packs: int = 0
    num_entries: int = 0
    num_bytes: int = 0
    num_packed_before: int = 0
    unusable: dict[str, str] = field(default_factory=dict[str, str])


def seal(store: Store, specs: Iterable[EntrySpec], *, log: Log) -> Sealed:
    """Copy entries into packs, unless they are in packs already.

    Each entry is verified completely. Missing and damaged entries are omitted.

    Raises:
        StoreError: An entry or pack cannot be read or written. All packs that were written before are
            complete.
    """
    result = Sealed()
    by_kind: dict[Kind, dict[str, EntrySpec]] = {kind: {} for kind in KINDS}
    for spec in specs:
        by_kind[spec.kind][spec.key] = spec

    def num_done() -> int:
        return result.num_packed_before + result.num_entries + len(result.unusable)

    total = sum(map(len, by_kind.values()))
    with progress(num_done, total, "cache entries sealed in packs", log=log):
        for kind, own_specs in by_kind.items():
            packed = store.packed(kind, own_specs)
            result.num_packed_before += len(packed)

            # Sorted, so that the same entries are divided into the same packs.
            unpacked = [own_specs[key] for key in sorted(own_specs.keys() - packed)]
            for entries in _divided(_valid_entries(store, unpacked, result)):
                _write_pack(store, kind, entries, result)
    return result


def seal_new(store: Store, specs: Iterable[EntrySpec], *, log: Log) -> None:
    """Seal entries that were encoded just now, unless they are few; a failure is a warning."""
    specs = list(specs)
    if len(specs) < MIN_NEW:
        return
    try:
        sealed = seal(store, specs, log=log)
    # The entries are valid as single files, so the job continues.
    except StoreError as err:
        log(f"warning: new entries stay single files: {err.what} ({err.where}); {err.fix}; {_PACK_LATER}")
        return
    if sealed.num_packs:
        entries = counted(sealed.num_entries, "new entry", "new entries")
        log(f"{entries} sealed in {counted(sealed.num_packs, 'pack')}")


def _valid_entries(
    store: Store, specs: Sequence[EntrySpec], result: Sealed
) -> Iterator[tuple[EntrySpec, bytes]]:
    """Yield the valid entries; the problems of other entries are added to `result`."""

    def read(spec: EntrySpec) -> bytes | str:
        try:
            return store.read_verified(spec)
        except WrongEntryError as err:
            return str(err)

    with ThreadPoolExecutor(store.threads, thread_name_prefix="latentline-seal") as pool:
        # In parts, because `map` starts to read all of its entries at once.
        for start in range(0, len(specs), _READ_AT_ONCE):
            part = specs[start : start + _READ_AT_ONCE]
            for spec, raw in zip(part, pool.map(read, part), strict=True):
                if isinstance(raw, str):
                    result.unusable[spec.key] = raw
                else:
                    yield spec, raw


def _divided(entries: Iterable[tuple[EntrySpec, bytes]]) -> Iterator[dict[str, bytes]]:
    part: dict[str, bytes] = {}
    num_bytes = 0
    for spec, raw in entries:
        if part and (len(part) == MAX_ENTRIES or num_bytes + len(raw) > MAX_BYTES):
            yield part
            part, num_bytes = {}, 0
        part[spec.key] = raw
        num_bytes += len(raw)
    if part:
        yield part


def _write_pack(store: Store, kind: Kind, entries: dict[str, bytes], result: Sealed) -> None:
    # Atomically, so that a process that is killed leaves only complete packs. The name is the hash of the
    # content: sealing the same entries again writes the same pack.
    name, content = build_pack(kind, entries)
    try:
        store.folder.replace(name, content)
    except OSError as err:
        if is_disk_full(err):
            raise StoreError(
                f"the disk is full: a pack of {len(content):,} bytes cannot be written",
                where=store.folder.where(name),
                fix=f"free some space, {_PACK_LATER}: packs take as much space as the single files, which "
                "latentline gc --delete deletes; existing entries stay valid",
            ) from err
        raise store.packs_error(kind, err, "written") from err

    result.num_packs += 1
    result.num_entries += len(entries)
    result.num_bytes += len(content)
