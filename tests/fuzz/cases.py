"""Give damaged files to the code that reads them, in a process of its own: `python -m tests.fuzz.cases`.

A crash, an endless loop or an exhausted memory then ends this process and not the tests. Each file must be
accepted, or rejected with a reason and a fix; any other exception ends the process with its traceback.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.cache.entry_format import WrongEntryError, parse
from pipeline.errors import LatentlineError, StoreError
from pipeline.models.convert.header import read_header
from pipeline.models.diffusers_folder import require_whole
from pipeline.models.families import family_spec
from pipeline.raw_images.manifest import captions_by_path, focus_by_path, selected_rows, walk_manifest
from pipeline.raw_images.manifest_file import read_manifest
from pipeline.raw_images.sources import source_of
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, load_recipe, recipe_from_mapping
from pipeline.storage.tables import Tables
from pipeline.trained_lora.export.lora_files import read_provenance
from pipeline.trained_lora.start_file import require_start_file
from pipeline.validated_dataset.stage import validate
from tests.fuzz import seeds
from tests.fuzz.mutations import mutated

Outcomes = Counter[str]


def fuzz_images(folder: Path, first: int, count: int) -> Outcomes:
    """Scan and validate a dataset of damaged images, half of which have a damaged caption too."""
    originals, captions = _cached(seeds.images), _cached(seeds.captions)
    data = [each for _, each in originals]
    photos = folder / "photos"
    photos.mkdir()
    for number in range(first, first + count):
        path = photos / f"{number}.{originals[number % len(originals)][0]}"
        path.write_bytes(mutated(data, "image", number))
        caption = mutated(captions, "caption", number) if number % 2 else b"a caption"
        path.with_suffix(".json" if number % 3 == 0 else ".txt").write_bytes(caption)

    dataset = {"path": str(photos), "captions": {"suffix": [".txt", ".json"]}, "duplicates": "keep_all"}
    recipe = _recipe(folder, dataset)
    tables = Tables(recipe.output_dir)
    scanned = scan(recipe, tables, log=_ignore)
    result = validate(recipe, scanned.table, tables, log=_ignore)

    assert len(scanned.table) + len(scanned.rejected) == count
    assert len(result.table) + len(result.rejected) == len(scanned.table)
    outcomes = Outcomes(accepted=len(result.table))
    for row in [*scanned.rejected.rows(named=True), *result.rejected.rows(named=True)]:
        assert all((row["reason"], row["detail"], row["fix"])), row
        outcomes[row["reason"]] += 1
    return outcomes


def fuzz_manifests(folder: Path, first: int, count: int) -> Outcomes:
    """Read damaged manifests with all their columns."""
    originals = _cached(seeds.manifests)
    columns = {"captions": {"from": "column", "columns": ["caption"]}, "focus_columns": ["x", "x"]}
    settings = {
        suffix: _recipe(
            folder,
            {"path": str(folder / f"list{suffix}"), "filters": {"where": "n > 0"}, **columns},
            buckets={"crop": "focus"},
        )
        for suffix in (".csv", ".jsonl", ".parquet")
    }

    def read(number: int) -> None:
        suffix = originals[number % len(originals)][0]
        same_format = [data for each, data in originals if each == suffix]
        dataset = settings[suffix].datasets[0]
        Path(str(dataset.path)).write_bytes(mutated(same_format, suffix, number))
        if number % 2:
            problems = walk_manifest(dataset, source_of(dataset, max_file_bytes=10**9)).problems
            assert [each for each in problems if not (each.reason and each.detail and each.fix)] == []
            return
        rows = selected_rows(dataset, read_manifest(dataset))
        captions_by_path(dataset, rows)
        focus_by_path(dataset, rows)

    return _outcomes(read, range(first, first + count))


def fuzz_headers(folder: Path, first: int, count: int) -> Outcomes:
    """Read damaged safetensors files as a checkpoint, a model's weights, a LoRA, and a cache entry."""
    originals = _cached(seeds.safetensors_files)
    file, index = folder / "file.safetensors", folder / "model_index.json"
    training = {"lora": {"rank": 2, "alpha": 2.0, "start_from": str(file)}}
    recipe = _recipe(folder, {"path": str(folder)}, training=training)
    index_text = b'{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}'

    def parse_entry() -> None:
        try:
            parse(seeds.ENTRY, file.read_bytes(), verify=True)
        except WrongEntryError as err:
            raise StoreError(str(err), where=str(file), fix="start the job again") from err

    readers: list[Callable[[], object]] = [
        lambda: read_header(file),
        lambda: require_whole(file),
        lambda: read_provenance(file),
        lambda: require_start_file(recipe),
        lambda: family_spec(folder),
        parse_entry,
    ]

    def read(number: int) -> None:
        file.write_bytes(mutated(originals, "safetensors", number))
        index.write_bytes(mutated([index_text], "index", number))
        errors = [_error_of(reader) for reader in readers]
        if errors[0] is not None:  # most files are no LoRA, so the checkpoint decides the outcome
            raise errors[0]

    return _outcomes(read, range(first, first + count))


def fuzz_recipes(folder: Path, first: int, count: int) -> Outcomes:
    """Load damaged recipes."""
    originals = _cached(seeds.recipes)
    file = folder / "damaged.yaml"

    def read(number: int) -> None:
        file.write_bytes(mutated(originals, "recipe", number))
        load_recipe(file)

    return _outcomes(read, range(first, first + count))


def _outcomes(read: Callable[[int], None], numbers: range) -> Outcomes:
    """Count the accepted files, and the rejected ones by the type of error."""
    outcomes = Outcomes()
    for number in numbers:
        started = time.process_time()
        try:
            error = _error_of(lambda number=number: read(number))
        except BaseException as err:
            err.add_note(f"case {number}")
            raise
        taken = time.process_time() - started
        assert taken < 10, f"case {number} took {taken:.0f} s"
        outcomes["accepted" if error is None else type(error).__name__] += 1
    return outcomes


def _error_of(read: Callable[[], object]) -> LatentlineError | None:
    """Return the error of a rejected file, which must have its three parts; None for an accepted one."""
    error: LatentlineError | None = None
    try:
        read()
    except LatentlineError as err:
        error = err
    assert error is None or all(part.strip() for part in (error.what, error.where, error.fix)), error
    return error


def _recipe(folder: Path, dataset: dict[str, Any], **changes: Any) -> Recipe:
    values = {
        "datasets": [{"name": "d", **dataset}],
        "cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "out"),
        "model": {"base": "no/model"},
        **changes,
    }
    return recipe_from_mapping("damaged", values)


_cached = cache(lambda make: make())


def _ignore(line: str) -> None:
    """Discard a line of a stage's log."""


def _peak_mb() -> int:
    """Return the peak memory of this process; ru_maxrss would include that of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) // 1000


KINDS = {
    "images": fuzz_images,
    "manifests": fuzz_manifests,
    "headers": fuzz_headers,
    "recipes": fuzz_recipes,
}


def main() -> None:
    """Run the cases named by the arguments, and print their outcomes and the peak memory as JSON."""
    kind, folder, first, count = sys.argv[1:]
    outcomes = KINDS[kind](Path(folder), int(first), int(count))
    sys.stdout.write(json.dumps({"outcomes": outcomes, "peak_mb": _peak_mb()}))


if __name__ == "__main__":
    main()
