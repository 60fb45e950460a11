"""The checks of aspect_buckets about batches and crops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pipeline.aspect_buckets import checks as aspect_buckets
from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.raw_images.stage import scan
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.validated_dataset.holdout import held_out
from pipeline.validated_dataset.stage import validate
from tests.pipeline.reporting.row_columns import require_columns


def findings_of(folder: Any, base: Path, **sections: dict[str, Any]) -> dict[str, Finding]:
    """Return the findings for the folder's images and its recipe with other settings."""
    recipe = folder.recipe
    for name, values in {**sections, "model": {"base": str(base)}}.items():
        recipe = recipe.model_copy(update={name: getattr(recipe, name).model_copy(update=values)})
    folder.tables.write("aspect_buckets", assign_buckets(recipe, folder.ingest().table, log=str).table)
    findings = aspect_buckets.run(CheckContext(recipe, folder.tables))
    require_columns(findings)
    return {finding.name: finding for finding in findings}


@pytest.fixture
def shapes(folder: Any) -> Any:
    """Five landscape images and two portraits."""
    for index in range(5):
        folder.add(f"wide{index}.png", folder.picture(index, 24, 40))
    for index in range(2):
        folder.add(f"tall{index}.png", folder.picture(index + 9, 40, 24))
    return folder


def test_B01_a_bucket_that_drop_would_always_skip_closes_the_gate(shapes: Any, tiny_sd: Path) -> None:
    gate = findings_of(shapes, tiny_sd, buckets={"underfilled": "drop"}, training={"batch_size": 3})[
        "batches_possible"
    ]
    assert gate.closes
    assert gate.rows == [{"bucket": "80x48", "draws": 2}]
    assert "1 bucket with 2 samples does not fill a batch of 3 on 1 process" in gate.summary
    assert "partial or repeat" in gate.fix


def test_B09_the_gate_counts_for_the_world_size(shapes: Any, tiny_sd: Path) -> None:
    for processes, closes in ((1, False), (2, True)):
        gate = findings_of(
            shapes,
            tiny_sd,
            buckets={"underfilled": "drop"},
            training={"batch_size": 2},
            accelerate={"num_processes": processes},
        )["batches_possible"]
        assert gate.closes == closes, f"{processes} processes: {gate.summary}; buckets: {gate.rows}"
        assert gate.rows == ([{"bucket": "80x48", "draws": 2}] if closes else [])
        assert gate.numbers["samples_at_once"] == 2 * processes


def test_B01_the_holdout_does_not_count_for_batches(shapes: Any, tiny_sd: Path) -> None:
    table = shapes.ingest().table
    tall = pl.col("height") > pl.col("width")
    for hundredths in range(1, 100):
        shapes.validation_fraction = hundredths / 100
        held = held_out(table, {"d": hundredths / 100})
        training_rows = table.filter(~held)
        if training_rows.select(tall.sum()).item() == 1:
            break
    settings = {"buckets": {"underfilled": "drop"}, "training": {"batch_size": 2}}
    gate = findings_of(shapes, tiny_sd, **settings)["batches_possible"]
    assert gate.closes
    assert {"bucket": "80x48", "draws": 1} in gate.rows
    assert gate.numbers["draws_per_epoch"] == len(training_rows) == 7 - held.sum()
    warning = findings_of(shapes, tiny_sd, training={"batch_size": 2})["underfilled"]
    assert {"bucket": "80x48", "draws": 1} in warning.rows


def test_B01_without_training_samples_the_gate_closes_and_cannot_be_allowed(
    folder: Any, tiny_sd: Path
) -> None:
    folder.add("a.png")
    folder.validation_fraction = 0.9999
    folder.checks = {"allow": ["batches_possible"]}
    gate = findings_of(folder, tiny_sd)["batches_possible"]
    assert gate.closes
    assert gate.summary == "there are no training samples: 1 sample is in the holdout"
    none = {"draws_per_epoch": 0, "in_full_batches": 0.0, "full_batches_per_epoch": 0}
    assert gate.numbers == {"num_rows": 0, "samples_at_once": 1, **none}


def test_underfilled_buckets_are_a_warning_with_numbers(shapes: Any, tiny_sd: Path) -> None:
    findings = findings_of(shapes, tiny_sd, training={"batch_size": 4})
    assert findings["batches_possible"].passed
    warning = findings["underfilled"]
    assert (warning.passed, warning.severity) == (False, "warn")
    assert warning.rows == [{"bucket": "80x48", "draws": 2}]
    assert warning.numbers["in_full_batches"] == round(4 / 7, 4)
    assert findings_of(shapes, tiny_sd, training={"batch_size": 2})["underfilled"].passed


def test_images_with_a_large_crop_loss_are_listed_worst_first(folder: Any, tiny_sd: Path) -> None:
    for name, height, width in (("long", 10, 100), ("longer", 10, 200), ("square", 64, 64)):
        folder.add(f"{name}.png", folder.picture(1, height, width))
    warning = findings_of(folder, tiny_sd)["crop_loss"]
    assert (warning.passed, warning.severity) == (False, "warn")
    assert warning.rows == [
        {"sample_id": "d/longer.png", "crop_loss": 0.88, "size": "10x200", "bucket": "40x96"},
        {"sample_id": "d/long.png", "crop_loss": 0.76, "size": "10x100", "bucket": "40x96"},
    ]
    assert "d/longer.png (10x200 to" in warning.summary
    assert findings_of(folder, tiny_sd, buckets={"max_crop_loss": 0.9})["crop_loss"].passed


def test_a_crop_loss_equal_to_the_limit_is_not_reported(folder: Any, tiny_sd: Path) -> None:
    folder.add("long.png", folder.picture(1, 17, 101))
    findings_of(folder, tiny_sd)
    loss = folder.tables.read("aspect_buckets")["crop_loss"][0]
    assert 0 < loss < 1
    for limit, passed in ((loss, True), (np.nextafter(loss, 0).item(), False)):
        warning = findings_of(folder, tiny_sd, buckets={"max_crop_loss": limit})["crop_loss"]
        assert warning.passed == passed, f"limit {limit!r} and crop loss {loss!r}"
        assert warning.numbers["worst"] == pytest.approx(loss, abs=0.5e-4)


def test_B08_the_gate_closes_if_all_images_are_too_small(folder: Any, tiny_sd: Path) -> None:
    folder.add("small.png", folder.picture(1, 24, 24))
    recipe = folder.recipe
    buckets = recipe.buckets.model_copy(update={"upscale": "never", "small_images": "reject"})
    recipe = recipe.model_copy(
        update={"buckets": buckets, "model": recipe.model.model_copy(update={"base": str(tiny_sd)})}
    )
    result = assign_buckets(recipe, folder.ingest().table, log=folder.log.append)
    folder.tables.write("aspect_buckets", result.table)
    folder.tables.write_rejected("aspect_buckets", result.rejected)
    findings = aspect_buckets.run(CheckContext(recipe, folder.tables))
    (gate,) = (each for each in findings if not each.passed)
    assert gate.name == "batches_possible"
    assert gate.closes
    assert gate.summary == "no samples are left of 1 image: 1 too_small"
    assert "buckets.small_images: own_bucket" in gate.fix
    (crops,) = (each for each in findings if each.name == "crop_loss")
    assert crops.numbers["worst"] == 0.0


def test_rejected_images_are_conserved_and_have_a_reason(folder: Any, tiny_sd: Path) -> None:
    folder.add("small.png", folder.picture(1, 24, 24))
    folder.add("large.png", folder.picture(2, 80, 80))
    recipe = folder.recipe
    buckets = recipe.buckets.model_copy(update={"upscale": "never", "small_images": "reject"})
    recipe = recipe.model_copy(
        update={"buckets": buckets, "model": recipe.model.model_copy(update={"base": str(tiny_sd)})}
    )
    result = assign_buckets(recipe, folder.ingest().table, log=folder.log.append)
    folder.tables.write("aspect_buckets", result.table)
    folder.tables.write_rejected("aspect_buckets", result.rejected)
    (row,) = result.rejected.to_dicts()
    assert (row["sample_id"], row["stage"], row["reason"]) == ("d/small.png", "aspect_buckets", "too_small")
    assert "24x24 pixels would be enlarged 2.67 times to fill bucket 64x64 (height x width)" in row["detail"]
    assert result.report["in"] == result.report["kept"] + result.report["rejected"] == 2
    findings = aspect_buckets.run(CheckContext(recipe, folder.tables))
    assert {finding.name: finding.summary for finding in findings if not finding.passed} == {}


def slider_finding(folder: Any, base: Path) -> Finding:
    """Return the finding on pairs of a recipe in which the folders `day` and `night` are a slider."""
    (settings,) = folder.recipe.datasets
    datasets = tuple(
        settings.model_copy(update={"name": name, "path": folder.root / name, "slider": scale})
        for name, scale in (("day", 1), ("night", -1))
    )
    model = folder.recipe.model.model_copy(update={"base": str(base)})
    recipe = folder.recipe.model_copy(update={"datasets": datasets, "model": model})
    raw = scan(recipe, folder.tables, log=str)
    folder.tables.write("raw_images", raw.table)
    samples = validate(recipe, raw.table, folder.tables, log=str)
    folder.tables.write("validated_dataset", samples.table)
    buckets = assign_buckets(recipe, samples.table, log=str)
    folder.tables.write("aspect_buckets", buckets.table)
    findings = aspect_buckets.run(CheckContext(recipe, folder.tables))
    return next(finding for finding in findings if finding.name == "slider_pairs")


def test_images_of_a_slider_without_a_partner_are_listed(folder: Any, tiny_sd: Path) -> None:
    for number, side in enumerate(("day", "night")):
        folder.add(f"{side}/a.png", folder.picture(number))
        folder.add(f"{side}/b.png", folder.picture(10 + number, *((24, 40), (40, 24))[number]))
    folder.add("night/c.png", folder.picture(20))
    finding = slider_finding(folder, tiny_sd)
    assert not finding.passed
    assert not finding.closes
    assert finding.numbers == {"num_rows": 3, "pairs": 1, "alone": 3}
    assert finding.rows == [
        {"sample_id": "day/b.png", "bucket": "48x80", "slider": 1},
        {"sample_id": "night/b.png", "bucket": "80x48", "slider": -1},
        {"sample_id": "night/c.png", "bucket": "48x80", "slider": -1},
    ]
    assert finding.summary.startswith(
        "3 of 5 images lack a partner in the opposite dataset, the first: day/b.png"
    )
    assert "the same name and the same size" in finding.fix

    (folder.root / "night" / "c.png").unlink()
    folder.add("night/b.png", folder.picture(30))
    finding = slider_finding(folder, tiny_sd)
    assert finding.passed
    assert finding.summary == "2 pairs of images"
    assert finding.numbers == {"num_rows": 0, "pairs": 2, "alone": 0}


def test_without_sliders_there_are_no_pairs(shapes: Any, tiny_sd: Path) -> None:
    assert findings_of(shapes, tiny_sd)["slider_pairs"].passed
