from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.entry_format import EntrySpec, TensorSpec, serialise
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.images.geometry import Geometry
from pipeline.maintenance.explain import explain
from pipeline.maintenance.forecast import forecast
from pipeline.maintenance.gc import survey
from pipeline.maintenance.verify import needed_entries, repair, verify
from pipeline.models.fingerprints import canonical_hash
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe
from pipeline.reporting.findings import CheckContext
from pipeline.reporting.reports import write_report
from pipeline.side_inputs import MASKS
from pipeline.storage.needed_columns import NEEDED
from pipeline.storage.tables import selected
from pipeline.vae_latents import checks
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.cached_job import Job, recipe_of
from tests.pipeline.images.tiffs import grey_tiff
from tests.profiles import gamma_curve, grey_profile


class MaskedJob(Job):
    """A job up to vae_latents; `result` is that of its last run."""

    def run(self) -> None:
        quiet: dict[str, Any] = {"log": lambda _: None}
        raw = self.keep("raw_images", scan(self.recipe, self.tables, **quiet)).table
        validated = self.keep("validated_dataset", validate(self.recipe, raw, self.tables, **quiet))
        buckets = self.keep("aspect_buckets", assign_buckets(self.recipe, validated.table, **quiet))
        self.result = cache_latents(self.recipe, buckets.table, self.tables, launch=self.launch, **quiet)
        self.keep("vae_latents", self.result)
        write_report(self.recipe.output_dir, "vae_latents", self.result.report)

    def failures(self, recipe: Recipe | None = None) -> dict[str, Any]:
        found = checks.run(CheckContext(recipe or self.recipe, self.tables))
        return {finding.name: finding for finding in found if not finding.passed}

    def counters(self) -> dict[str, int]:
        names = ("encoded", "masks_encoded", "masks_reused", "masks_failed")
        return {name: self.result.report[name] for name in names}


@pytest.fixture
def masked(
    tmp_path: Path, photos: Path, tiny_sd: Path, in_process_launch: InProcessLaunch, module_entries: Path
) -> MaskedJob:
    """A finished cache job of five photographs with masks of gradients, mirrored too."""
    for path in photos.glob("*.png"):
        with Image.open(path) as image:
            gradient = Image.linear_gradient("L").rotate(90).resize(image.size)
        (tmp_path / "masks").mkdir(exist_ok=True)
        gradient.save(tmp_path / "masks" / path.name)
    dataset = {"name": "photos", "path": str(photos), "mask": {"path": str(tmp_path / "masks")}}
    job = MaskedJob(
        recipe_of(tmp_path, tiny_sd, datasets=[dataset], latents={"flip": True}), in_process_launch
    )
    job.run_with(module_entries)
    return job


def mask_entry(entries: RecipeEntries, row: dict[str, Any]) -> tuple[EntrySpec, dict[str, Any]]:
    """Return the mask's entry of a row of vae_latents, and what decides its key."""
    (entry_row,) = MASKS.entry_rows(entries, pl.DataFrame([row])).to_dicts()
    return MASKS.spec(entries, entry_row), MASKS.inputs(entries, entry_row)


def test_entries_hold_the_area_means_of_the_mask_in_the_crop_of_the_image(masked: MaskedJob) -> None:
    shutil.rmtree(masked.recipe.cache_dir)
    masked.run()
    assert masked.counters() == {"encoded": 10, "masks_encoded": 10, "masks_reused": 0, "masks_failed": 0}
    entries = RecipeEntries(masked.recipe)
    weights: dict[tuple[str, bool], np.ndarray] = {}
    for row in masked.result.table.iter_rows(named=True):
        spec, inputs = mask_entry(entries, row)
        assert spec.key == row["mask_key"] == canonical_hash({"masks": inputs})
        assert inputs["factor"] == 8
        stored = entries.store.read(spec)["mask"]
        assert stored.shape == (1, row["latent_height"], row["latent_width"])

        geometry = Geometry.from_row(row)
        target = geometry.target_size
        with Image.open(masked.recipe.output_dir.parent / "masks" / row["path"]) as mask:
            resized = mask.resize(
                (target.width, target.height), Image.Resampling.BICUBIC, box=geometry.source_box
            )
        pixels = np.asarray(resized)[:, ::-1] if row["flipped"] else np.asarray(resized)
        blocks = pixels.reshape(target.height // 8, 8, target.width // 8, 8)
        np.testing.assert_allclose(stored[0], blocks.mean(axis=(1, 3)) / 255, atol=5e-4)
        assert row["mask_ppm"] == round(float(pixels.mean()) / 255 * 1e6)
        weights[row["sample_id"], row["flipped"]] = stored
    for sample, _ in weights:
        np.testing.assert_array_equal(weights[sample, True], weights[sample, False][..., ::-1])
    assert masked.failures() == {}


def test_redrawing_a_mask_encodes_that_mask_alone(masked: MaskedJob) -> None:
    masked.launch.modules.clear()
    path = masked.recipe.output_dir.parent / "masks" / "cat.png"
    with Image.open(path) as mask:
        mask.point(lambda level: 255 - level).save(path)
    before = forecast(masked.recipe, masked.tables, log=lambda _: None)
    masks = before.side_inputs["masks"]
    assert masks.reasons == {"mask changed": ["photos/cat.png", "photos/cat.png"]}
    assert (masks.there, before.latents.to_make) == (8, 0)

    old = masked.result.table
    masked.run()
    assert masked.counters() == {"encoded": 0, "masks_encoded": 2, "masks_reused": 8, "masks_failed": 0}
    assert masked.launch.modules == []
    changed = masked.result.table.filter(pl.col("mask_key") != old["mask_key"])
    assert set(changed["sample_id"]) == {"photos/cat.png"}
    assert masked.result.table["key"].to_list() == old["key"].to_list()


def test_keys_of_latents_are_those_of_a_recipe_without_masks(masked: MaskedJob, tiny_sd: Path) -> None:
    keys = masked.result.table["key"].to_list()
    plain = MaskedJob(
        recipe_of(masked.recipe.output_dir.parent, tiny_sd, latents={"flip": True}), masked.launch
    )
    assert set(masked.failures(plain.recipe)) == set()
    plain.run()
    assert plain.result.report["encoded"] == 0
    assert plain.result.table["key"].to_list() == keys
    assert [name for name in (*plain.result.table.columns, *plain.result.report) if "mask" in name] == []


def test_a_lost_or_damaged_mask_entry_is_found_and_encoded_again(masked: MaskedJob) -> None:
    entries = RecipeEntries(masked.recipe)
    rows = masked.result.table.filter(~pl.col("flipped")).to_dicts()
    paths = [entries.store.path(mask_entry(entries, row)[0]) for row in rows[:4]]
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:-2])
    raw = paths[2].read_bytes()
    paths[2].write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    spec, _ = mask_entry(entries, rows[3])
    (height, width) = spec.tensors["mask"].shape[1:]
    column = EntrySpec(spec.kind, spec.key, {"mask": TensorSpec("float16", (height * width, 1, 1))})
    values = entries.store.read(spec)["mask"].reshape(height * width, 1, 1)
    paths[3].write_bytes(serialise(column, {"mask": values}, {}))

    failures = masked.failures()
    assert {name: Path(finding.rows[0]["path"]) for name, finding in failures.items()} == {
        "completeness": paths[0],
        "file_size_outliers": paths[1],
        "finite_values": paths[2],
        "shape_uniformity": paths[3],
    }
    assert [name for name, finding in failures.items() if not finding.closes] == []

    masked.cache()  # needed_entries reads text_embeddings too, and this run encodes the lost masks again
    assert masked.failures() == {}
    paths[0].unlink()
    bad = verify(masked.recipe, needed_entries(masked.recipe, masked.tables), log=lambda _: None)
    assert [Path(each.path) for each in bad] == [paths[0]]
    repair(masked.recipe, masked.tables, bad, log=lambda _: None)
    assert masked.failures() == {}


def test_gc_needs_the_masks_and_explain_shows_them(masked: MaskedJob) -> None:
    found = survey(masked.recipe.cache_dir)
    assert (found.entries, found.num_used, found.foreign) == (20, 20, [])
    names = [each.stage for each in explain(masked.recipe, masked.tables, "photos/cat.png")]
    assert {"mask entry", "mask entry, mirrored"} <= set(names)


def test_the_checks_refuse_latents_from_before_the_recipe_had_masks(masked: MaskedJob, tiny_sd: Path) -> None:
    plain = MaskedJob(
        recipe_of(masked.recipe.output_dir.parent, tiny_sd, latents={"flip": True}), masked.launch
    )
    plain.run()
    assert masked.failures()["completeness"].closes


def test_a_mask_that_the_crop_removes_is_rejected_and_one_that_it_shortens_is_named(
    masked: MaskedJob, tiny_sd: Path
) -> None:
    folder = masked.recipe.output_dir.parent
    for name, width_px in (("cat", 2), ("coffee", 60)):
        with Image.open(folder / "photos" / f"{name}.png") as image:
            mask = Image.new("L", image.size)
        mask.paste(255, (0, 0, width_px, mask.height))
        mask.save(folder / "masks" / f"{name}.png")
    datasets = [each.model_dump(mode="json", exclude_none=True) for each in masked.recipe.datasets]
    buckets = {"sizes": ["64x64"]}
    square = MaskedJob(recipe_of(folder, tiny_sd, datasets=datasets, buckets=buckets), masked.launch)
    square.run()
    rejected = dict(square.result.rejected.select("sample_id", "reason").rows())
    assert rejected == {"photos/cat.png": "mask_cropped_away"}
    finding = square.failures()["masks_cropped"]
    assert not finding.closes
    kept = {row["sample_id"]: row["kept"] for row in finding.rows}
    cropped_px = (330 - 240) / 2
    assert kept["photos/coffee.png"] == pytest.approx((60 - cropped_px) / 60, abs=0.02)
    assert "photos/camera.png" not in kept, "a square image loses nothing"


def add_images_with_rules(job: MaskedJob, photos: Path) -> None:
    """Add an image with white as zero, and a mask with a profile that changes grey."""
    levels = np.linspace(0, 65_535, 4_096).reshape(64, 64).astype(np.uint16)
    (photos / "scan.tif").write_bytes(grey_tiff(levels, white_is_zero=True))
    (photos / "scan.txt").write_text("a scan", encoding="utf-8")
    masks = job.recipe.output_dir.parent / "masks"
    Image.new("L", (64, 64), 128).save(masks / "scan.png", icc_profile=grey_profile(gamma_curve(1.0)))


def test_decoding_rules_change_the_keys_of_the_images_and_masks_that_they_apply_to_and_no_others(
    masked: MaskedJob, photos: Path
) -> None:
    before = masked.result.table
    add_images_with_rules(masked, photos)
    masked.run()
    table = masked.result.table
    assert masked.counters() == {"encoded": 2, "masks_encoded": 2, "masks_reused": 10, "masks_failed": 0}
    has_rules = pl.col("sample_id") == "photos/scan.tif"
    assert table.filter(~has_rules).drop("decoding").equals(before)

    rules = table.filter(has_rules).select("decoding", "mask_decoding").unique().rows()
    assert rules == [("white_is_zero", "stored_numbers")]
    assert table.filter(~has_rules).select("decoding", "mask_decoding").null_count().row(0) == (10, 10)

    # The keys of 0.3.0 have the number of the version instead of a text with the rules.
    entries = RecipeEntries(masked.recipe)
    for row in table.iter_rows(named=True):
        inputs, (mask,) = (
            entries.latent_inputs(row),
            MASKS.entry_rows(entries, pl.DataFrame([row])).to_dicts(),
        )
        former = canonical_hash({"latents": {**vars(inputs), "preprocessing_version": 1}})
        former_mask = canonical_hash({"masks": {**MASKS.inputs(entries, mask), "preprocessing_version": 1}})
        is_former = (row["key"] == former, row["mask_key"] == former_mask)
        assert is_former == ((False,) * 2 if row["sample_id"] == "photos/scan.tif" else (True,) * 2)


def test_every_reader_of_the_tables_finds_the_entries_of_images_with_decoding_rules(
    masked: MaskedJob, photos: Path
) -> None:
    add_images_with_rules(masked, photos)
    masked.run()
    masked.cache()  # needed_entries reads text_embeddings too
    assert masked.failures() == {}
    assert verify(masked.recipe, needed_entries(masked.recipe, masked.tables), log=lambda _: None) == []
    facts = {each.stage: each.facts for each in explain(masked.recipe, masked.tables, "photos/scan.tif")}
    of_scan = masked.tables.read("vae_latents").filter(pl.col("sample_id") == "photos/scan.tif")
    keys = [
        (facts[f"latents entry{end}"]["key"], facts[f"mask entry{end}"]["key"]) for end in ("", ", mirrored")
    ]
    assert of_scan.sort("flipped").select("key", "mask_key").rows() == keys

    entries, table = RecipeEntries(masked.recipe), masked.tables.read("vae_latents")
    for_training = selected("vae_latents", table, NEEDED["trained_lora"]["vae_latents"])
    assert entries.latent_keys(for_training).equals(table["key"], check_names=False)
    assert MASKS.keys(entries, for_training).equals(table["mask_key"], check_names=False)

    masked.run()
    assert masked.counters() == {"encoded": 0, "masks_encoded": 0, "masks_reused": 12, "masks_failed": 0}


def test_the_plan_says_that_the_preprocessing_of_an_image_and_its_mask_has_changed(
    masked: MaskedJob, photos: Path
) -> None:
    add_images_with_rules(masked, photos)
    masked.run()

    # As 0.3.0 left it: entries under keys without rules, and a table without the columns.
    entries, table = RecipeEntries(masked.recipe), masked.tables.read("vae_latents")
    scan_rows = pl.col("sample_id") == "photos/scan.tif"
    now = {*table.filter(scan_rows)["key"], *table.filter(scan_rows)["mask_key"]}
    table = table.drop("decoding", "mask_decoding")
    old = table.with_columns(
        entries.latent_keys(table).alias("key"), MASKS.keys(entries, table).alias("mask_key")
    )
    masked.tables.write("vae_latents", old)
    for row in old.filter(scan_rows).iter_rows(named=True):
        (mask,) = MASKS.entry_rows(entries, pl.DataFrame([row])).to_dicts()
        for spec, inputs in (
            (entries.latent_spec(row), vars(entries.latent_inputs(row))),
            (MASKS.spec(entries, mask), MASKS.inputs(entries, mask)),
        ):
            tensors = {name: np.ones(each.shape, each.dtype) for name, each in spec.tensors.items()}
            entries.store.write(spec, tensors, {"inputs": dict(inputs)})
    root = masked.recipe.output_dir.parent / "cache"
    for path in root.rglob("*.safetensors"):
        if path.stem in now:
            path.unlink()

    plan = forecast(masked.recipe, masked.tables, log=lambda _: None)
    names = ["photos/scan.tif", "photos/scan.tif, mirrored"]
    assert plan.latents.reasons == {"preprocessing changed": names}
    assert plan.side_inputs["masks"].reasons == {"preprocessing changed": ["photos/scan.tif"] * 2}
