"""The checks of vae_latents: rejections of all stages, another geometry, and masks that a crop cuts."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from pipeline.vae_latents.checks import cropped_masks
from tests.pipeline.cached_job import Job, recipe_of

SAMPLES = [f"photos/{name}.png" for name in ("astronaut", "camera", "cat", "coffee", "rocket")]
"""Samples of the project, in the order of its tables."""


def reject(job: Job, stage: str, *rejections: tuple[str, str]) -> None:
    """Write rejected rows of a stage, each from (name of the sample, reason)."""
    columns = job.tables.read_rejected().columns
    rows = [
        {"sample_id": f"photos/{name}.png", "stage": stage, "reason": reason, "fix": f"fix {reason}"}
        for name, reason in rejections
    ]
    filled = [{**dict.fromkeys(columns, ""), **row} for row in rows]
    job.tables.write_rejected(stage, pl.DataFrame(filled).select(columns))


def test_each_image_with_a_defect_counts_once_and_excluded_images_do_not_count(job: Job) -> None:
    """Of 7 images with a valid size, 3 are left; a further one is rejected by both cache stages."""
    excluded = [("f", "filter_min_width"), ("g", "duplicate")]
    reject(job, "validated_dataset", ("a", "undecodable"), ("b", "undecodable"), *excluded)
    reject(job, "aspect_buckets", ("c", "too_small"))
    reject(job, "vae_latents", ("cat", "latent_not_finite"))
    reject(job, "text_embeddings", ("cat", "reference_changed"), ("coffee", "reference_changed"))
    table = job.tables.read("vae_latents")
    job.tables.write("vae_latents", table.filter(pl.col("sample_id") != "photos/cat.png"))

    finding = job.failing("vae_latents")["rejected_fraction"]
    counts = {"rejected": 4, "rejected_here": 1, "of": 7, "limit": 0.05, "fraction": 0.571429}
    assert finding.numbers == {"num_rows": 4, **counts}
    assert [(row["sample_id"], row["reason"]) for row in finding.rows] == [
        ("photos/a.png", "undecodable"),
        ("photos/b.png", "undecodable"),
        ("photos/cat.png", "latent_not_finite"),
        ("photos/coffee.png", "reference_changed"),
    ]
    lines = finding.fix.splitlines()
    assert lines[0] == "2 undecodable, the first is photos/a.png: fix undecodable"
    assert lines[-1].startswith("or raise checks.max_rejected_fraction")


def test_missing_entries_are_listed_in_the_order_of_the_table(job: Job) -> None:
    for path in Path(f"{job.recipe.cache_dir}/latents").rglob("*.safetensors"):
        path.unlink()
    rows = job.failing("vae_latents")["completeness"].rows
    problem = {"problem": "the entry is missing", "bytes": None}
    entries = [(job.entry("vae_latents", sample), sample) for sample in SAMPLES]
    sizes = dict(job.tables.read("vae_latents").select("sample_id", "entry_bytes").rows())
    assert rows == [
        {"sample_id": sample, **problem, "expected_bytes": sizes[sample], "path": str(path)}
        for path, sample in entries
    ]


def test_latents_of_another_geometry_are_listed_in_the_order_of_the_table_with_both_shapes(job: Job) -> None:
    larger = job.changed(buckets={"resolution": 128, "step": 16})
    rows = job.failing("vae_latents", larger)["shape_uniformity"].rows
    assert [row["sample_id"] for row in rows] == SAMPLES
    assert rows[0]["problem"] == "its latent must have the shape (4, 14, 18), got (4, 6, 10)"


def test_random_crops_have_the_shapes_of_their_buckets(job: Job) -> None:
    random = job.changed(buckets={"resolution": 64, "step": 16, "crop": "random"})
    assert job.failing("vae_latents", random) == {}


def test_a_bucket_with_latents_of_two_shapes_is_listed_and_others_are_not(job: Job) -> None:
    table = job.tables.read("vae_latents")
    names = table["bucket"].unique().sort().to_list()
    assert len(names) > 2
    merged = pl.when(pl.col("bucket") == names[0]).then(pl.lit(names[1])).otherwise("bucket")
    job.tables.write("vae_latents", table.with_columns(bucket=merged))
    rows = job.failing("vae_latents")["shape_uniformity"].rows
    assert rows == [{"sample_id": f"bucket {names[1]}", "problem": "it has latents of 2 shapes"}]


@pytest.mark.parametrize(("mask_ppm", "named"), [(500_000, []), (499_000, [0.499])])
def test_a_mask_is_named_only_if_the_crop_keeps_less_than_half_of_it(
    tmp_path: Path, tiny_sd: Path, mask_ppm: int, named: list[float]
) -> None:
    mask = {"path": str(tmp_path / "masks")}
    dataset = {"name": "photos", "path": str(tmp_path / "photos"), "mask": mask}
    size = {f"{kind}_{edge}": 64 for kind in ("resized", "target") for edge in ("height", "width")}
    sample = {"sample_id": "photos/cat.png", "dataset": "photos", "bucket": "64x64", "flipped": False}
    row = {**sample, **size, "mask_hash": "ab", "mask_mean": 1.0, "mask_ppm": mask_ppm}

    outcome = cropped_masks(recipe_of(tmp_path, tiny_sd, datasets=[dataset]), pl.DataFrame([row]))
    assert [each["kept"] for each in outcome.rows] == named, f"a crop that keeps {mask_ppm / 1e6:.1%}"
    assert outcome.passed == (named == []), outcome.summary
