"""Checks of text embeddings of a fixed length: captions without an entry, and captions that are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.recipe import Recipe
from pipeline.reporting.findings import CheckContext
from pipeline.text_embeddings import checks
from tests.pipeline.cache.forged_entries import forge
from tests.pipeline.cached_job import Job

ASSET = "text_embeddings"
IS_CAT = pl.col("sample_id") == "photos/cat.png"
SAMPLES = [f"photos/{name}.png" for name in ("astronaut", "camera", "cat", "coffee", "rocket")]


def test_every_caption_and_the_empty_one_have_an_entry(job: Job) -> None:
    findings = {each.name: each for each in checks.run(CheckContext(job.recipe, job.tables))}
    assert findings["completeness"].summary == "each of 5 captions and the empty one has its entry"


def test_missing_entries_are_listed_in_the_order_of_the_table_and_the_empty_caption_is_the_last(
    job: Job,
) -> None:
    for path in Path(f"{job.recipe.cache_dir}/text").rglob("*.safetensors"):
        path.unlink()
    rows = job.failing(ASSET)["completeness"].rows
    assert [row["sample_id"] for row in rows] == [*SAMPLES, "the empty caption"]
    assert {row["problem"] for row in rows} == {"the entry is missing"}


def test_samples_with_an_equal_caption_share_an_entry_that_is_reported_for_the_first(job: Job) -> None:
    for name in ("camera", "rocket", "coffee"):
        Path(f"{job.recipe.datasets[0].path}/{name}.txt").write_text("an equal caption")
    job.run()
    job.entry(ASSET, "photos/rocket.png").unlink()
    finding = job.failing(ASSET)["completeness"]
    assert [row["sample_id"] for row in finding.rows] == ["photos/camera.png"]
    assert finding.numbers == {"num_rows": 1, "entries": 4, "problems": 1}


def test_a_row_with_another_length_than_the_encoders_is_reported(job: Job) -> None:
    table = job.tables.read(ASSET)
    for length in (76, 78):
        changed = pl.when(IS_CAT).then(pl.lit(length)).otherwise("text_length")
        job.tables.write(ASSET, table.with_columns(text_length=changed))
        assert job.failing(ASSET)["shape_uniformity"].rows == [
            {
                "sample_id": "photos/cat.png",
                "problem": f"its text embedding must have 77 tokens, got {length}",
            }
        ]


def test_each_missing_or_superfluous_caption_is_reported_with_its_variant(job: Job) -> None:
    table = job.tables.read(ASSET)
    cat = table.filter(IS_CAT)
    more = [cat.with_columns(variant=pl.lit(number, pl.Int32)) for number in (-1, 2)]
    job.tables.write(ASSET, pl.concat([table, *more]).filter(pl.col("sample_id") != "photos/rocket.png"))
    rows = job.failing(ASSET)["completeness"].rows
    assert [(row["sample_id"], row["problem"]) for row in rows] == [
        ("photos/cat.png", "its empty caption is not in validated_dataset"),
        ("photos/cat.png", "variant 2 of its caption is not in validated_dataset"),
        ("photos/rocket.png", "it is in validated_dataset but not in text_embeddings"),
    ]


def test_a_caption_that_loses_one_token_is_reported_even_without_its_entry(job: Job) -> None:
    table = job.tables.read(ASSET)
    is_cut = pl.col("sample_id").is_in(["photos/cat.png", "photos/rocket.png"])
    num_cut = pl.when(is_cut).then(pl.lit(1, pl.Int32)).otherwise("num_cut")
    job.tables.write(ASSET, table.with_columns(num_cut=num_cut, num_tokens=pl.lit(78, pl.Int32)))
    entries = RecipeEntries(job.recipe)
    entries.store.path(entries.text_spec(table.filter(IS_CAT)["caption"].item())).unlink()

    finding = job.failing(ASSET)["captions_fit"]
    cut = {"num_tokens": 78, "num_cut": 1, "cut_part": ""}
    assert finding.rows == [{"sample_id": f"photos/{name}.png", **cut} for name in ("cat", "rocket")]
    assert finding.numbers == {"num_rows": 2, "samples": 5, "cut": 2, "max_length": 77}
    assert finding.summary == "2 of 5 captions are cut after 77 tokens; photos/cat.png loses 1 token"


LONG = "a red rose in a green vase on a white table, " * 9

CAPTIONS = {
    "cat": f"{LONG} a photo of sks",
    "camera": f"{LONG} a photo of [t]",
    "rocket": LONG,
    "astronaut": f"a photo of sks, {LONG} sks",
    "coffee": "a photo of sks",
}


def test_C12_texts_of_the_recipe_behind_the_last_token_are_warned(job: Job) -> None:
    for name, text in CAPTIONS.items():
        Path(f"{job.recipe.datasets[0].path}/{name}.txt").write_text(text)
    captions = {"trigger": "sks", "placeholder": "[t]", "postfix": ", film grain"}
    dataset = {"name": "photos", "path": str(job.recipe.datasets[0].path), "captions": captions}
    changed = Job(job.changed(datasets=[dataset]), job.launch)
    changed.run()
    finding = changed.failing(ASSET)["trigger_fits"]
    assert {(row["sample_id"], row["setting"]) for row in finding.rows} == {
        *((f"photos/{name}.png", "captions.trigger") for name in ("cat", "camera")),
        *((f"photos/{name}.png", "captions.postfix") for name in ("cat", "camera", "rocket", "astronaut")),
    }
    assert finding.severity == "warn"
    assert finding.numbers == {"num_rows": 6, "cut_off": 6}


@pytest.mark.parametrize("cut_from", [..., "9", [1], {}, 1.5], ids=str)
def test_a_check_reads_entries_with_metadata_of_somebody_else(job: Job, cut_from: object) -> None:
    Path(f"{job.recipe.datasets[0].path}/cat.txt").write_text(CAPTIONS["cat"])
    captions = {"trigger": "sks"}
    dataset = {"name": "photos", "path": str(job.recipe.datasets[0].path), "captions": captions}
    changed = Job(job.changed(datasets=[dataset]), job.launch)
    changed.run()
    assert "trigger_fits" in changed.failing(ASSET)
    forge(changed.entry(ASSET), cut_from=cut_from)
    assert "trigger_fits" not in changed.failing(ASSET)


def test_C12_captions_that_fit_lose_no_text_of_the_recipe(job: Job) -> None:
    captions = {"trigger": "sks", "postfix": ", film grain"}
    dataset = {"name": "photos", "path": str(job.recipe.datasets[0].path), "captions": captions}
    changed = Job(job.changed(datasets=[dataset]), job.launch)
    changed.run()
    assert "trigger_fits" not in changed.failing(ASSET)


@pytest.mark.parametrize(
    ("captions", "prompts", "missing"),
    [
        ({"trigger": "sks"}, ["a cat", "a dog"], ["sks"]),
        ({"trigger": "sks"}, ["a cat", "sks, a cat"], []),
        ({"trigger": "sks"}, ["a sksy cat", "SKS"], ["sks"]),
        ({"trigger": "sks", "placeholder": "[trigger]"}, ["[trigger] on a table"], []),
        ({"trigger": "sks", "placeholder": "[trigger]"}, ["[Trigger] on a table"], ["sks"]),
        ({"trigger": "c++"}, ["a c++ logo"], []),
        ({"trigger": "sks"}, [{"prompt": "a cat", "negative_prompt": "sks"}], ["sks"]),
        ({"trigger": "sks"}, [], []),
        ({}, ["a cat"], []),
    ],
)
def test_a_trigger_word_that_no_preview_contains_is_a_warning(
    job: Job, captions: dict[str, Any], prompts: list[Any], missing: list[str]
) -> None:
    values = job.recipe.model_dump(mode="json")
    values["datasets"][0]["captions"] |= captions
    values["training"]["sample_prompts"] = prompts
    recipe = Recipe.model_validate_json(json.dumps(values))
    findings = {each.name: each for each in checks.run(CheckContext(recipe, job.tables))}
    finding = findings["previews_name_trigger"]
    assert [row["trigger"] for row in finding.rows] == missing
    assert (finding.passed, finding.closes) == (not missing, False)
    no_previews = recipe.training.model_copy(update={"sample_every": 0})
    context = CheckContext(recipe.model_copy(update={"training": no_previews}), job.tables)
    assert {each.name: each.passed for each in checks.run(context)}["previews_name_trigger"]
