"""Captions whose text encoder sees the reference images, with a tiny Qwen-Image-Edit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

from demo.tiny_models import make_tiny_bria_fibo2
from pipeline.cache.recipe_entries import SEEN, RecipeEntries
from pipeline.cache.worker.tensors import read_torch
from pipeline.errors import DatasetError, RecipeError
from pipeline.images.geometry import Size
from pipeline.maintenance.explain import explain
from pipeline.maintenance.forecast import forecast
from pipeline.maintenance.gc import survey
from pipeline.maintenance.verify import needed_entries, verify
from pipeline.models.recipe_support import require_references
from pipeline.models.worker.family import load_family
from pipeline.models.worker.text import SeenImage
from pipeline.recipe import Recipe
from pipeline.text_embeddings.caption_rows import EMPTY_CAPTION, file_images, text_rows
from pipeline.text_embeddings.stage import cache_text
from pipeline.trained_lora.prompts import recipe_prompts
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.cached_job import Job, recipe_of
from tests.pipeline.images.tiffs import grey_tiff
from tests.pipeline.used_case import make_old

QUIET: dict[str, Any] = {"log": lambda _: None}


class EditJob(Job):
    """A cache job of two photographs with a negative and a half-sized reference each."""

    def report(self) -> dict[str, Any]:
        """Encode what is missing, and return the report of text_embeddings."""
        self.run()
        validated = self.tables.read("validated_dataset")
        return cache_text(self.recipe, validated, self.tables, launch=self.launch, **QUIET).report

    @property
    def text(self) -> pl.DataFrame:
        return self.tables.read("text_embeddings")

    def keys(self) -> dict[tuple[str, int], str]:
        rows = self.text.select("sample_id", "variant", "key").iter_rows()
        return {(sample_id, variant): key for sample_id, variant, key in rows}

    def expected(self) -> dict[str, list[str]]:
        return forecast(self.recipe, self.tables, **QUIET).text.reasons


@pytest.fixture
def job(
    tmp_path: Path, photos: Path, tiny_edit: Path, in_process_launch: InProcessLaunch, module_entries: Path
) -> EditJob:
    for path in photos.glob("*"):
        if path.stem not in ("cat", "coffee"):
            path.unlink()
    folders = {name: tmp_path / name for name in ("negative", "half")}
    for folder in folders.values():
        folder.mkdir()
    for path in photos.glob("*.png"):
        with Image.open(path) as image:
            Image.fromarray(255 - np.asarray(image)).save(folders["negative"] / path.name)
            image.resize((image.width // 2, image.height // 2)).save(folders["half"] / path.name)
    job = EditJob(edit_recipe(tmp_path, tiny_edit), in_process_launch)
    job.run_with(module_entries)
    return job


def edit_recipe(root: Path, base: str | Path, *, reverse: bool = False, **sections: Any) -> Recipe:
    references = [{"path": str(root / name), "resolution": 64} for name in ("negative", "half")]
    dataset = {
        "name": "photos",
        "path": str(root / "photos"),
        "references": references[::-1] if reverse else references,
    }
    prompt = {"prompt": "a cat", "references": [str(root / "half" / "cat.png")]}
    values = {
        "datasets": [dataset],
        "buckets": {"resolution": 64, "step": 32},
        "text": {"dtype": "float32", "compute_dtype": "float32", "caption_dropout": 0.5},
        "training": {"sample_prompts": [prompt], "sample_every": 10},
    }
    return recipe_of(root, base, **{**values, **sections})


def root(job: EditJob) -> Path:
    return job.recipe.output_dir.parent


def edit(path: Path) -> None:
    with Image.open(path) as image:
        image.point(lambda level: level // 2).save(path)


def test_each_caption_and_the_empty_one_are_encoded_with_the_references_of_their_sample(job: EditJob) -> None:
    family = load_family(Path(job.recipe.model.base))
    encoders = family.text.load("float32", "cpu")
    spec = family.spec.references
    assert spec is not None
    assert spec.in_text is not None
    entries = RecipeEntries(job.recipe)
    rows = text_rows(entries, job.tables.read("validated_dataset"))
    assert rows["variant"].to_list() == [EMPTY_CAPTION, 0] * 2
    for row in rows.iter_rows(named=True):
        paths = [root(job) / name / f"{Path(row['path']).stem}.png" for name in ("negative", "half")]
        images = [Image.open(path).convert("RGB") for path in paths]
        sizes = [spec.in_text.size(Size(image.height, image.width)) for image in images]
        seen = [SeenImage(image, size) for image, size in zip(images, sizes, strict=True)]
        expected = family.text.encode_caption(encoders, row["caption"], seen)
        stored = read_torch(entries.store, entries.text_spec(row["caption"], images=row[SEEN]))
        torch.testing.assert_close(
            stored["text_embedding"], expected.tensors["text_embedding"], rtol=0, atol=1e-5
        )
        hashes = [image["hash"] for image in json.loads(row["reference_images"])]
        assert [each[0] for each in json.loads(row[SEEN])] == hashes
        assert file_images(entries, paths)[0] == row[SEEN]
    assert job.failing("text_embeddings") == {}


def test_an_edited_reference_encodes_the_captions_that_see_it_and_no_others(job: EditJob) -> None:
    before = job.keys()
    edit(root(job) / "negative" / "coffee.png")
    assert job.expected() == {"reference changed": ["photos/coffee.png"] * 2}
    job.launch.modules.clear()
    job.run()
    after = job.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {("photos/coffee.png", EMPTY_CAPTION), ("photos/coffee.png", 0)}
    assert job.failing("text_embeddings") == {}
    assert job.expected() == {}

    # The reference of a preview decides the preview's embeddings too.
    edit(root(job) / "half" / "cat.png")
    reasons = job.expected()
    assert reasons["reference changed"] == ["photos/cat.png"] * 2
    assert sorted(reasons["new caption"]) == ["the empty caption", "the preview prompt 'a cat'"]


def test_a_reference_that_changed_since_validation_rejects_its_sample_and_no_other(job: EditJob) -> None:
    """Both stages read the reference, and each rejects the sample only if it needs to encode it."""
    entries = RecipeEntries(job.recipe)
    rows = text_rows(entries, job.tables.read("validated_dataset"))
    for row in rows.filter(pl.col("sample_id") == "photos/coffee.png").iter_rows(named=True):
        entries.store.path(entries.text_spec(row["caption"], images=row[SEEN])).unlink()
    edit(root(job) / "half" / "coffee.png")
    job.cache()
    assert job.tables.read("vae_latents")["sample_id"].to_list() == ["photos/cat.png", "photos/coffee.png"]
    assert job.text["sample_id"].to_list() == ["photos/cat.png"] * 2
    (rejected,) = job.tables.read_rejected().to_dicts()
    assert (rejected["sample_id"], rejected["stage"]) == ("photos/coffee.png", "text_embeddings")
    assert rejected["reason"].startswith("reference_")
    assert rejected["detail"].startswith("references[1], coffee.png: ")
    assert job.failing("text_embeddings") == {}

    job.run()
    assert job.tables.read_rejected().is_empty()
    assert len(job.text) == 4


def test_a_reference_of_a_preview_that_changes_meanwhile_is_an_error(job: EditJob) -> None:
    entries = RecipeEntries(job.recipe)
    files = [root(job) / "half" / "cat.png"]
    entries.store.path(entries.text_spec("a cat", images=file_images(entries, files)[0])).unlink()

    def change_and_launch(*arguments: Any) -> None:
        edit(files[0])
        InProcessLaunch.__call__(job.launch, *arguments)

    validated = job.tables.read("validated_dataset")
    with pytest.raises(DatasetError, match=r"references\[0\], cat.png") as raised:
        cache_text(job.recipe, validated, job.tables, launch=change_and_launch, **QUIET)
    assert raised.value.where == "training.sample_prompts"


def test_an_unchanged_job_launches_nothing(job: EditJob) -> None:
    before = job.text
    job.launch.modules.clear()
    report = job.report()
    assert job.launch.modules == []
    assert (report["encoded"], report["reused"]) == (0, 7)  # two captions, two empty ones, three of previews
    assert job.text.equals(before)


def test_E04_the_order_of_references_and_the_background_change_the_keys(job: EditJob) -> None:
    entries = RecipeEntries(job.recipe)
    validated = job.tables.read("validated_dataset")
    recipes = [
        edit_recipe(root(job), job.recipe.model.base, reverse=True),
        edit_recipe(root(job), job.recipe.model.base, latents={"background": [0, 0, 0]}),
    ]
    keys = set(job.keys().values())
    for recipe in recipes:
        other = RecipeEntries(recipe)
        rows = text_rows(other, validated)
        if recipe is recipes[0]:
            rows = swapped(rows)
        others = other.text_keys(rows["caption"], rows[SEEN])
        assert keys.isdisjoint(others)
        specs = [other.text_spec(caption, images=seen).key for caption, seen in rows["caption", SEEN].rows()]
        assert others.to_list() == specs
    assert entries.text_spec("a cat").key == RecipeEntries(recipes[1]).text_spec("a cat").key


def swapped(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with their images in reverse order, as validation finds them for a reversed recipe."""
    seen = [json.dumps(json.loads(each)[::-1], separators=(",", ":")) for each in rows[SEEN]]
    return rows.with_columns(pl.Series(SEEN, seen))


def test_a_lost_entry_closes_the_gate_and_is_found_and_encoded_again(job: EditJob) -> None:
    cache = Path(str(job.recipe.cache_dir))
    make_old(cache)
    assert survey(job.recipe.cache_dir).orphans == {}
    assert verify(job.recipe, needed_entries(job.recipe, job.tables), **QUIET) == []

    entries = RecipeEntries(job.recipe)
    row = text_rows(entries, job.tables.read("validated_dataset")).row(0, named=True)
    assert row["variant"] == EMPTY_CAPTION
    entries.store.path(entries.text_spec("", images=row[SEEN])).unlink()
    assert job.failing("text_embeddings")["completeness"].closes
    assert job.expected() == {"entry missing": ["photos/cat.png"]}
    (bad,) = verify(job.recipe, needed_entries(job.recipe, job.tables), **QUIET)
    assert bad.needed.name == "photos/cat.png"

    explained = {each.stage: each.facts for each in explain(job.recipe, job.tables, "photos/cat.png")}
    assert explained["text entry, empty caption"]["state"] == "missing"
    assert explained["text entry"]["state"] == "valid"
    made_of = explained["text entry"]["made of references"]
    assert made_of["processor"] == "Qwen2VLImageProcessorPil, 1"
    assert len(made_of["images"]) == 2
    job.run()
    assert job.failing("text_embeddings") == {}


def test_empty_captions_are_encoded_with_references_only_if_something_uses_them(job: EditJob) -> None:
    training = {"sample_prompts": [], "sample_every": 0}
    recipe = edit_recipe(root(job), job.recipe.model.base, text={"caption_dropout": 0.0}, training=training)
    rows = text_rows(RecipeEntries(recipe), job.tables.read("validated_dataset"))
    assert rows["variant"].to_list() == [0, 0]


def test_mirrored_images_are_refused(job: EditJob) -> None:
    recipe = edit_recipe(root(job), job.recipe.model.base, latents={"flip": True})
    with pytest.raises(RecipeError, match="sees the references"):
        require_references(recipe)


def test_a_family_may_encode_the_empty_caption_and_negative_prompts_without_references(
    job: EditJob, tmp_path: Path
) -> None:
    """As the pipeline of Bria FIBO 2 does."""
    base = tmp_path / "fibo2"
    make_tiny_bria_fibo2(base)
    prompt = {
        "prompt": "a cat",
        "negative_prompt": "a dog",
        "references": [str(root(job) / "half" / "cat.png")],
    }
    training = {"sample_prompts": [prompt], "sample_every": 10}
    other = EditJob(edit_recipe(root(job), base, training=training), job.launch)
    other.run()
    assert list(other.keys()) == [("photos/cat.png", 0), ("photos/coffee.png", 0)]
    assert other.failing("text_embeddings") == {}
    assert other.expected() == {}

    entries = RecipeEntries(other.recipe)
    (drawn,) = recipe_prompts(entries, other.recipe.training.sample_prompts)
    assert drawn.negative is not None
    assert drawn.negative.text.key == entries.text_spec("a dog").key
    assert drawn.text.key != entries.text_spec("a cat").key
    assert [each for each in drawn.entries() if not entries.store.check(each.text).valid] == []
    assert entries.store.check(entries.text_spec("")).valid

    before = other.keys()
    edit(root(job) / "negative" / "coffee.png")
    assert other.expected() == {"reference changed": ["photos/coffee.png"]}
    other.run()
    after = other.keys()
    assert {name for name in before if before[name] != after[name]} == {("photos/coffee.png", 0)}


def test_a_reference_above_the_recipes_limit_is_rejected_when_it_is_encoded(job: EditJob) -> None:
    sizes = {
        path: path.stat().st_size for name in ("negative", "half") for path in (root(job) / name).iterdir()
    }
    largest = max(sizes, key=sizes.__getitem__)
    shutil.rmtree(job.recipe.cache_dir)
    limits = {"max_file_bytes": sizes[largest] - 1, "max_rejected_fraction": 1.0}
    recipe = edit_recipe(root(job), job.recipe.model.base, checks=limits)
    result = cache_text(recipe, job.tables.read("validated_dataset"), job.tables, launch=job.launch, **QUIET)
    rejected = dict(result.rejected.select("sample_id", "reason").rows())
    assert rejected == {f"photos/{largest.name}": "reference_file_too_large"}


def test_decoding_rules_of_a_reference_are_part_of_what_decides_its_captions(job: EditJob) -> None:
    levels = np.linspace(0, 65_535, 4_096).reshape(64, 64).astype(np.uint16)
    (root(job) / "negative" / "coffee.png").write_bytes(grey_tiff(levels, white_is_zero=True))
    job.run()
    entries = RecipeEntries(job.recipe)
    rows = text_rows(entries, job.tables.read("validated_dataset"))
    for row in rows.iter_rows(named=True):
        rules = [each[3:] for each in json.loads(row[SEEN])]
        assert rules == ([["white_is_zero"], []] if row["path"] == "coffee.png" else [[], []])
        paths = [root(job) / name / f"{Path(row['path']).stem}.png" for name in ("negative", "half")]
        assert file_images(entries, paths)[0] == row[SEEN]
    assert job.failing("text_embeddings") == {}
    assert job.failing("vae_latents") == {}
