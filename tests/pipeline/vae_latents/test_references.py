from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import BucketError, RecipeError
from pipeline.images.geometry import Crop, Geometry, Size
from pipeline.maintenance.explain import explain
from pipeline.maintenance.forecast import forecast
from pipeline.maintenance.gc import survey
from pipeline.maintenance.verify import needed_entries, verify
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe
from pipeline.reporting.findings import CheckContext
from pipeline.side_inputs import REFERENCES
from pipeline.side_inputs.images import mean_entries
from pipeline.side_inputs.references import reference_geometry
from pipeline.storage.tables import empty
from pipeline.vae_latents import checks
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.cached_job import Job, recipe_of
from tests.pipeline.reference_family import multiples_of_16, with_references
from tests.pipeline.used_case import make_old

QUIET: dict[str, Any] = {"log": lambda _: None}


class ReferencedJob(Job):
    """A job up to vae_latents; `result` is that of its last run."""

    def run(self) -> None:
        raw = self.keep("raw_images", scan(self.recipe, self.tables, **QUIET)).table
        validated = self.keep("validated_dataset", validate(self.recipe, raw, self.tables, **QUIET))
        buckets = self.keep("aspect_buckets", assign_buckets(self.recipe, validated.table, **QUIET))
        self.result = cache_latents(self.recipe, buckets.table, self.tables, launch=self.launch, **QUIET)
        self.keep("vae_latents", self.result)

    def failures(self, recipe: Recipe | None = None) -> dict[str, Any]:
        found = checks.run(CheckContext(recipe or self.recipe, self.tables))
        return {finding.name: finding for finding in found if not finding.passed}

    def keys(self) -> dict[tuple[str, bool], list[str]]:
        rows = self.result.table.select("sample_id", "flipped", "reference_keys").rows()
        return {(sample_id, flipped): keys.split() for sample_id, flipped, keys in rows}

    def forecast(self) -> dict[str, list[str]]:
        return forecast(self.recipe, self.tables, **QUIET).side_inputs["references"].reasons


def draw_references(photos: Path, folder: Path) -> dict[str, Path]:
    """Write two references of each photograph: itself in negative and at half its size, by folder."""
    folders = {name: folder / name for name in ("negative", "half")}
    for each in folders.values():
        each.mkdir()
    for path in photos.glob("*.png"):
        with Image.open(path) as image:
            Image.fromarray(255 - np.asarray(image)).save(folders["negative"] / path.name)
            image.resize((image.width // 2, image.height // 2)).save(folders["half"] / path.name)
    return folders


@pytest.fixture
def referenced(
    tmp_path: Path,
    photos: Path,
    tiny_sd: Path,
    in_process_launch: InProcessLaunch,
    monkeypatch: pytest.MonkeyPatch,
    module_entries: Path,
) -> ReferencedJob:
    """A finished cache job of two photographs with two references each, mirrored too."""
    with_references(monkeypatch)
    for path in photos.glob("*"):
        if path.stem not in ("cat", "coffee"):
            path.unlink()
    folders = draw_references(photos, tmp_path)
    dataset = {
        "name": "photos",
        "path": str(photos),
        "references": [{"path": str(folders["negative"]), "resolution": 96}, {"path": str(folders["half"])}],
    }
    sections = {"datasets": [dataset], "latents": {"flip": True, "dtype": "float32"}}
    job = ReferencedJob(recipe_of(tmp_path, tiny_sd, **sections), in_process_launch)
    job.run_with(module_entries)
    return job


def root(job: ReferencedJob) -> Path:
    return job.recipe.output_dir.parent


def test_an_entry_is_the_mean_that_the_vae_gives_for_the_cropped_pixels(
    referenced: ReferencedJob, tiny_sd: Path
) -> None:
    shutil.rmtree(Path(str(referenced.recipe.cache_dir)))
    referenced.run()
    entries = RecipeEntries(referenced.recipe)
    rows = REFERENCES.entry_rows(entries, referenced.result.table)
    assert len(rows) == 8
    # In float64, because rounding in float32 depends on the order of values and the number of threads.
    vae = AutoencoderKL.from_pretrained(tiny_sd, subfolder="vae", torch_dtype=torch.float64)
    latents: dict[tuple[str, int, bool], np.ndarray] = {}
    for row in rows.iter_rows(named=True):
        folder = root(referenced) / ("negative", "half")[row["number"]]
        geometry = Geometry.from_row(row)
        target = geometry.target_size
        assert (target.height * target.width <= 96 * 96) or row["number"] == 1
        with Image.open(folder / row["path"]) as image:
            pixels = np.asarray(
                image.resize((target.width, target.height), Image.Resampling.BICUBIC, box=geometry.source_box)
            )
        pixels = (pixels[:, ::-1] if row["flipped"] else pixels).copy()
        with torch.no_grad():
            batch = torch.from_numpy(pixels).double()[None].permute(0, 3, 1, 2)
            posterior = vae.encode(batch / 127.5 - 1).latent_dist
        stored = entries.store.read(mean_entries(entries).latent_spec(row))["latent"]
        expected = (posterior.mean * vae.config.scaling_factor)[0].numpy()
        np.testing.assert_allclose(stored, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        latents[row["sample_id"], row["number"], row["flipped"]] = stored
    for (sample, number, flipped), latent in latents.items():
        if flipped:
            assert not np.array_equal(latent, latents[sample, number, False])
    assert referenced.failures() == {}
    report = referenced.result.report
    assert (report["reference_entries"], report["referenced_samples"], report["encoded"]) == (8, 2, 12)


def test_an_edited_reference_encodes_that_reference_alone(referenced: ReferencedJob) -> None:
    before = referenced.keys()
    latents = referenced.result.table["key"].to_list()
    path = root(referenced) / "half" / "cat.png"
    with Image.open(path) as image:
        image.point(lambda level: level // 2).save(path)
    names = ["photos/cat.png, reference 1"] * 2
    assert referenced.forecast() == {"reference changed": names}

    referenced.run()
    report = referenced.result.report
    assert (report["encoded"], report["reused"], report["removed"]) == (2, 10, 2)
    assert referenced.result.table["key"].to_list() == latents
    after = referenced.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {("photos/cat.png", False), ("photos/cat.png", True)}
    assert {name: keys[0] for name, keys in after.items()} == {name: keys[0] for name, keys in before.items()}
    assert referenced.failures() == {}


def test_an_unchanged_job_launches_nothing(referenced: ReferencedJob) -> None:
    referenced.launch.modules.clear()
    assert referenced.forecast() == {}
    before = referenced.result.table
    referenced.run()
    assert referenced.launch.modules == []
    assert referenced.result.table.equals(before)


def test_E01_the_order_of_references_is_that_of_the_recipe_and_swapping_it_encodes_nothing(
    referenced: ReferencedJob,
) -> None:
    before = referenced.keys()
    values = referenced.recipe.model_dump(mode="json", include={"datasets", "latents"})
    values["datasets"][0]["references"].reverse()
    referenced.recipe = recipe_of(root(referenced), referenced.recipe.model.base, **values)
    referenced.run()
    assert referenced.keys() == {name: keys[::-1] for name, keys in before.items()}
    assert referenced.result.report["encoded"] == 0

    # The table of the job before is not the one of this recipe.
    values["datasets"][0]["references"][0]["resolution"] = 64
    changed = recipe_of(root(referenced), referenced.recipe.model.base, **values)
    assert "its references are missing" in str(referenced.failures(changed)["completeness"].rows)


@pytest.mark.parametrize("crops", [True, False])
def test_E02_exchanging_height_and_width_of_a_reference_exchanges_its_geometry_and_changes_its_key(
    referenced: ReferencedJob, monkeypatch: pytest.MonkeyPatch, *, crops: bool
) -> None:
    with_references(monkeypatch, crops=crops)
    entries = RecipeEntries(referenced.recipe)
    for resolution in (None, 64):
        wide, tall = (
            reference_geometry(entries.family, size, resolution) for size in (Size(100, 170), Size(170, 100))
        )
        assert wide.target_size == tall.target_size.transposed
        assert wide.resized_size == tall.resized_size.transposed
        assert wide.crop == Crop(tall.crop.left, tall.crop.top, *wide.target_size)
        assert wide.target_size.width > wide.target_size.height
        assert crops or wide.resized_size == wide.target_size

    images = [{"path": "a.png", "hash": "0" * 64, "height": 100, "width": 170}]
    swapped = [{**images[0], "height": 170, "width": 100}]
    row = referenced.result.table.head(1)
    keys = [
        REFERENCES.entry_rows(entries, row.with_columns(reference_images=pl.lit(json.dumps(each))))["key"][0]
        for each in (images, swapped)
    ]
    assert keys[0] != keys[1]


def test_a_reference_with_the_pixels_of_a_latent_of_the_mean_shares_its_entry(
    tmp_path: Path,
    photos: Path,
    tiny_sd: Path,
    in_process_launch: InProcessLaunch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_references(monkeypatch)
    for path in photos.glob("*"):
        if path.stem != "cat":
            path.unlink()
    with Image.open(photos / "cat.png") as image:
        image.resize((64, 64)).save(photos / "cat.png")
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "cat.png").write_bytes((photos / "cat.png").read_bytes())
    dataset = {"name": "photos", "path": str(photos), "references": [{"path": str(tmp_path / "same")}]}
    for posterior, num_entries in (("mean", 1), ("sample", 2)):
        sections = {"datasets": [dataset], "latents": {"posterior": posterior}}
        job = ReferencedJob(recipe_of(tmp_path, tiny_sd, **sections), in_process_launch)
        job.run()
        keys = {job.result.table["key"][0], *job.result.table["reference_keys"][0].split()}
        assert len(keys) == num_entries
        assert job.failures() == {}


def test_a_lost_reference_closes_the_gate_and_is_encoded_again_and_gc_spares_it(
    referenced: ReferencedJob,
) -> None:
    entries = RecipeEntries(referenced.recipe)
    spec = mean_entries(entries).latent_spec(
        REFERENCES.entry_rows(entries, referenced.result.table).row(0, named=True)
    )
    cache = referenced.recipe.cache_dir
    make_old(Path(str(cache)))
    assert survey(cache).orphans == {}

    entries.store.path(spec).unlink()
    assert referenced.failures()["completeness"].closes
    assert referenced.forecast() == {"entry missing": ["photos/cat.png, reference 0"]}
    explained = {
        each.stage: each.facts
        for each in explain(referenced.recipe, referenced.tables, "photos/cat.png")
        if each.stage.startswith("reference")
    }
    assert [name for name, each in explained.items() if each["state"] == "missing"] == ["reference 0 entry"]
    assert len(explained) == 4

    empty_text = empty("text_embeddings")
    referenced.tables.write("text_embeddings", empty_text)
    needed = needed_entries(referenced.recipe, referenced.tables)
    bad = [each for each in verify(referenced.recipe, needed, **QUIET) if each.needed.spec.kind != "text"]
    assert [each.needed.name for each in bad] == ["the reference cat.png of photos/cat.png"]
    referenced.run()
    assert referenced.failures() == {}


def test_a_recipe_without_references_has_the_keys_and_columns_of_before(
    referenced: ReferencedJob, tiny_sd: Path
) -> None:
    latents = {"flip": True, "dtype": "float32"}
    plain = ReferencedJob(recipe_of(root(referenced), tiny_sd, latents=latents), referenced.launch)
    assert plain.failures() == {}
    keys = referenced.result.table["key"].to_list()
    plain.run()
    assert plain.result.table["key"].to_list() == keys
    assert [name for name in (*plain.result.table.columns, *plain.result.report) if "reference" in name] == []
    assert forecast(plain.recipe, plain.tables, **QUIET).side_inputs == {}


@pytest.mark.slow
def test_a_reference_that_the_pipeline_refuses_rejects_its_image(
    referenced: ReferencedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Image.open(root(referenced) / "half" / "cat.png") as image:
        small = Size(image.height, image.width)

    def size(model: object, original: Size) -> Size:
        if original == small:
            raise BucketError("the reference is too small", where="references", fix="enlarge it")
        return multiples_of_16(model, original)

    with_references(monkeypatch, size=size)
    expected = forecast(referenced.recipe, referenced.tables, **QUIET)
    assert (expected.samples, dict(expected.rejected)) == (1, {"reference_refused": 1})
    referenced.run()
    rejected = referenced.result.rejected.select("sample_id", "reason", "fix").rows()
    assert rejected == [("photos/cat.png", "reference_refused", "enlarge it")]
    assert set(referenced.result.table["sample_id"]) == {"photos/coffee.png"}
    assert set(referenced.failures()) == {"rejected_fraction"}


def test_a_reference_that_changes_before_it_is_encoded_rejects_its_image(referenced: ReferencedJob) -> None:
    buckets = referenced.tables.read("aspect_buckets")
    path = root(referenced) / "negative" / "coffee.png"
    path.write_bytes((root(referenced) / "negative" / "cat.png").read_bytes())
    for entry in Path(str(referenced.recipe.cache_dir)).rglob("*.safetensors"):
        entry.unlink()
    result = cache_latents(referenced.recipe, buckets, referenced.tables, launch=referenced.launch, **QUIET)
    (rejected,) = result.rejected.rows(named=True)
    assert (rejected["sample_id"], rejected["reason"]) == ("photos/coffee.png", "reference_changed")
    assert rejected["detail"].startswith("references[0], coffee.png: ")
    assert set(result.table["sample_id"]) == {"photos/cat.png"}


def test_a_recipe_with_more_references_than_the_base_model_sees_is_an_error(
    referenced: ReferencedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_references(monkeypatch, max_number=1)
    with pytest.raises(RecipeError, match="accepts at most 1 reference image, got 2"):
        forecast(referenced.recipe, referenced.tables, **QUIET)
    with pytest.raises(RecipeError, match="accepts at most 1 reference image, got 2"):
        referenced.run()
