"""A sample is found by its id, its path or a part of either, and explained stage by stage."""

from __future__ import annotations

import polars as pl
import pytest

from pipeline.errors import TableError
from pipeline.maintenance.explain import explain, find_sample
from tests.pipeline.cache.forged_entries import forge
from tests.pipeline.cached_job import Job


@pytest.mark.parametrize("name", ["photos/cat.png", "cat.png", "cat"])
def test_a_sample_is_found_by_id_by_path_or_by_part_of_either(job: Job, name: str) -> None:
    assert find_sample(job.tables, name) == "photos/cat.png"


def test_an_ambiguous_name_lists_the_candidates_and_an_unknown_name_is_an_error(job: Job) -> None:
    with pytest.raises(TableError, match="5 samples") as excinfo:
        find_sample(job.tables, ".png")
    assert "photos/camera.png" in excinfo.value.fix
    with pytest.raises(TableError, match="no sample matches 'dog'"):
        find_sample(job.tables, "dog")


def test_all_stages_and_entries_are_explained(job: Job) -> None:
    facts = {each.stage: each.facts for each in explain(job.recipe, job.tables, "photos/cat.png")}
    assert facts["raw_images"]["format"] == "PNG"
    assert facts["validated_dataset"]["caption"] == "a cat that looks at the camera"
    row = job.tables.read("vae_latents").to_dicts()[2]
    assert row["sample_id"] == "photos/cat.png"
    assert facts["aspect_buckets"]["bucket"] == row["bucket"]
    assert "content_hash" not in facts["vae_latents"], "a value is shown twice"
    latent, text = facts["latents entry"], facts["text entry"]
    assert latent["path"] == str(job.entry("vae_latents"))
    assert text["path"] == str(job.entry("text_embeddings"))
    assert latent["state"] == text["state"] == "valid"
    assert latent["made of posterior"] == "sample"


def test_L08_mirrored_latents_and_further_captions_are_shown_with_their_state(job: Job) -> None:
    flipped = job.changed(latents={"flip": True})
    validated = job.tables.read("validated_dataset")
    job.tables.write("validated_dataset", validated.with_columns(more_captions=pl.lit('["a tabby"]')))
    facts = {each.stage: each.facts for each in explain(flipped, job.tables, "photos/cat.png")}
    assert facts["latents entry"]["state"] == "valid"
    assert facts["latents entry, mirrored"]["state"] == "missing"
    assert facts["text entry"]["state"] == "valid"
    assert facts["text entry, variant 1"]["state"] == "missing"


@pytest.mark.parametrize("inputs", [..., None, [1], "text", 5], ids=str)
def test_an_entry_with_metadata_of_somebody_else_is_explained_without_its_inputs(
    job: Job, inputs: object
) -> None:
    forge(job.entry("vae_latents"), inputs=inputs)
    facts = {each.stage: each.facts for each in explain(job.recipe, job.tables, "photos/cat.png")}
    assert facts["latents entry"]["state"] == "valid"
    assert not any(name.startswith("made of") for name in facts["latents entry"])


def test_a_damaged_entry_and_a_rejected_image_are_explained(job: Job) -> None:
    job.entry("vae_latents").write_bytes(b"torn")
    facts = {each.stage: each.facts for each in explain(job.recipe, job.tables, "photos/cat.png")}
    assert facts["latents entry"]["state"] == "expected 2560 bytes, got 4 bytes"
    root = job.recipe.datasets[0].path
    (root / "broken.png").write_bytes(b"")
    (root / "broken.txt").write_text("a caption")
    job.run()
    (rejected,) = explain(job.recipe, job.tables, find_sample(job.tables, "broken"))
    assert (rejected.stage, rejected.facts["reason"]) == ("rejected", "empty_file")
    assert rejected.facts["fix"]
