"""Files of an output folder at an address that each stage and command fetches, or a stage uploads."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.errors import GateClosedError, LatentlineError

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.log import Log
    from pipeline.outputs.folder import OutputFolder

_MERGED_REJECTIONS = "tables/rejected.parquet"
_STAGE_REJECTIONS = "tables/rejected/"

_SCAN_INDEX = "tables/known/"
"""What scans and validations have read, so that no machine reads unchanged images and captions again."""

_EDITED_CAPTIONS = "captions/"

REPLACED_CAPTIONS = ".replaced_captions"
"""Folder with the texts of persons that were on this machine, and differ or are missing at the address."""

_DATASET_PAGE = "reports/dataset/"

EXPORTED_STEP = "runs/exported_step.json"
"""Record that `lora/` holds an earlier step, written by `latentline export`."""

_BEFORE = {
    "raw_images": (),
    "validated_dataset": ("raw_images", "captions"),
    "captions": ("raw_images",),
    "aspect_buckets": ("raw_images", "validated_dataset"),
    "vae_latents": ("raw_images", "validated_dataset", "aspect_buckets"),
    "text_embeddings": ("raw_images", "validated_dataset"),
    "diagnosis": (
        *("raw_images", "captions", "validated_dataset", "aspect_buckets", "vae_latents", "text_embeddings"),
    ),
    "trained_lora": (
        *("raw_images", "captions", "validated_dataset", "aspect_buckets", "vae_latents", "text_embeddings"),
    ),
    "evaluation": ("trained_lora",),
    "sweep": ("raw_images", "validated_dataset", "aspect_buckets", "vae_latents", "text_embeddings"),
}
"""Assets before each asset in the graph."""

_EVALUATION_ENTRIES = "tables/evaluation_entries.parquet"
"""What the last evaluation has read of the cache."""

_MORE_TABLES = {
    "validated_dataset": ("captions",),
    "trained_lora": ("raw_images", "captions", "validated_dataset", "aspect_buckets"),
    "evaluation": ("vae_latents",),
    "sweep": ("raw_images", "validated_dataset", "aspect_buckets"),
}
"""Tables that an asset reads besides its inputs, which the table IO manager fetches, and its own."""

_SCANNING = ("raw_images", "validated_dataset")
_WITH_DATASET_PAGE = ("validated_dataset", "aspect_buckets")


def table_file(asset: str) -> str:
    """Return the name of an asset's table."""
    return f"tables/{asset}.parquet"


def report_file(asset: str) -> str:
    """Return the name of an asset's report."""
    return f"reports/{asset}.json"


@contextmanager
def stage_files(outputs: OutputFolder, asset: str, *, checks_only: bool, log: Log) -> Generator[None]:
    """Fetch what a stage and its checks read before the body, and upload their results after it.

    A local output folder needs neither. With `checks_only`, the checks run without the stage.

    Raises:
        StoreError: The service does not answer.
    """
    if not outputs.is_remote:
        yield
        return

    fetch_stage(outputs, asset, checks_only=checks_only)
    report, checks = (outputs.folder / report_file(name) for name in (asset, f"{asset}_checks"))
    report_before, checks_before = _stat(report), _stat(checks)

    def upload() -> None:
        # A stage writes its report last. Without a new one, the local pictures may be old.
        if _stat(report) != report_before:
            upload_stage(outputs, asset)
        if _stat(checks) != checks_before:
            outputs.upload(report_file(f"{asset}_checks"))

    try:
        yield
    except GateClosedError:
        # The results show why the gate has closed, but its error matters more than their upload, which the
        # next run repeats.
        try:
            upload()
        except (LatentlineError, OSError) as err:
            reason = err.what if isinstance(err, LatentlineError) else str(err)
            log(f"warning: the results are not uploaded: {reason}")
        raise
    upload()


def fetch_stage(outputs: OutputFolder, asset: str, *, checks_only: bool) -> None:
    """Fetch what a stage and its checks read besides its inputs, such as its own table of the last run.

    With `checks_only`, the checks run without the stage.

    Raises:
        StoreError: The service does not answer.
    """
    tables = (*_MORE_TABLES.get(asset, ()), asset)
    reports = (*_BEFORE[asset], asset)
    index = (_SCAN_INDEX,) if asset in _SCANNING else ()
    if asset in ("captions", "validated_dataset"):
        outputs.fetch_keeping(_EDITED_CAPTIONS, REPLACED_CAPTIONS)
    if asset == "evaluation" and not checks_only:
        # The stage itself fetches the LoRA files of its steps.
        outputs.fetch(_EVALUATION_ENTRIES, "lora/provenance.json", EXPORTED_STEP)
        # A closed gate of the training publishes nothing.
        outputs.fetch(report_file("trained_lora_checks"))
        outputs.fetch_listed(run_records(outputs))
    outputs.fetch(*map(table_file, tables), *map(report_file, reports), _STAGE_REJECTIONS, *index)
    if not checks_only:
        # A stage keeps pictures that are up to date, and replaces the folder.
        outputs.fetch(*_pages(asset))
    elif asset == "trained_lora":
        # The stage itself fetches or writes the LoRA and the logs of its run, which its checks read.
        outputs.fetch("lora/", EXPORTED_STEP)
        if run := _published_run(outputs):
            outputs.fetch_listed(run_records(outputs, run))
            outputs.fetch(f"runs/{run}/logs/")


def upload_stage(outputs: OutputFolder, asset: str) -> None:
    """Upload the results of a stage, except its table, and rebuild the merged table of rejected samples.

    Raises:
        StoreError: The service does not answer.
    """
    if not outputs.is_remote:
        return
    for page in _pages(asset):
        outputs.replace_folder(page)
    if asset in _SCANNING:
        outputs.upload(_SCAN_INDEX)
    if asset == "evaluation":
        outputs.upload(_EVALUATION_ENTRIES)
    outputs.upload(report_file(asset))
    outputs.upload(f"{_STAGE_REJECTIONS}{asset}.parquet")
    _merge_rejections(outputs)


def _pages(asset: str) -> tuple[str, ...]:
    own = f"reports/{asset}/"
    return (own, _DATASET_PAGE) if asset in _WITH_DATASET_PAGE else (own,)


def fetch_for_command(outputs: OutputFolder) -> None:
    """Fetch what commands read about the stages: tables, reports, and the records of runs and of the LoRA.

    Raises:
        StoreError: The service does not answer.
    """
    if not outputs.is_remote:
        return
    reports = [report_file(asset) for asset in _BEFORE]
    outputs.fetch_keeping(_EDITED_CAPTIONS, REPLACED_CAPTIONS)
    outputs.fetch("tables/", *reports, "lora/provenance.json", EXPORTED_STEP)
    outputs.fetch_listed(run_records(outputs))


def run_records(outputs: OutputFolder, run: str = "") -> dict[str, dict[str, Any]]:
    """Return the information about the JSON files of a run, or of all runs, at the address, by name.

    They include the record of each checkpoint that holds a LoRA.
    """
    infos = outputs.infos(f"runs/{run}")
    return {name: info for name, info in infos.items() if name.endswith(".json") and name.count("/") > 1}


def _merge_rejections(outputs: OutputFolder) -> None:
    # The definitions also use this module, and load without Polars.
    from pipeline.storage.tables import Tables

    # Stages on two machines may do so at the same time. Each one repeats it if rows were uploaded since it
    # read them, so that the last one includes every row.
    tables = Tables(outputs.folder)
    merged: dict[str, Any] = {}
    while merged != (found := outputs.infos(_STAGE_REJECTIONS)):
        merged = found
        outputs.fetch(_STAGE_REJECTIONS)
        tables.merge_rejected()
        outputs.upload(_MERGED_REJECTIONS)


def _stat(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.is_file() else None


def _published_run(outputs: OutputFolder) -> str | None:
    try:
        return str(json.loads((outputs.folder / "lora/provenance.json").read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
