"""What plan, explain, gc and verify say about the captions of a model."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.captions.entries import caption_spec
from pipeline.captions.stage import ASSET, caption_images
from pipeline.maintenance.caption_forecast import forecast_captions
from pipeline.maintenance.explain import explain
from pipeline.maintenance.forecast import forecast
from pipeline.maintenance.gc import needed_keys
from pipeline.recipe import Recipe
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.edited_captions import edit_captions
from pipeline.validated_dataset.stage import validate
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.captions.conftest import Captioned, captioned, captioner, picture

__all__ = ["captioned", "captioner"]


def quiet(_: str) -> None: ...


def test_plan_counts_captions_and_gives_pending_images_a_text(captioned: Captioned) -> None:
    recipe = captioned.recipe()
    tables, raw = Tables(recipe.output_dir), captioned.raw(recipe)
    entries = RecipeEntries(recipe)
    captions = forecast_captions(entries, tables, raw)
    assert captions is not None
    expected, written, pending = captions
    assert (expected.there, expected.to_make, len(pending)) == (0, 3, 3)
    valid = validate(recipe, raw, tables, log=quiet, written=written, remember=False).table
    assert valid["caption"].n_unique() == 3

    table, _, _ = captioned.run()
    captions = forecast_captions(entries, tables, raw)
    assert captions is not None
    assert (captions.expected.there, captions.expected.to_make, captions.pending) == (3, 0, {})
    assert captions.table["caption"].to_list() == table["caption"].to_list()

    changed = RecipeEntries(captioned.recipe(prompt="What is this?"))
    captions = forecast_captions(changed, tables, raw)
    assert captions is not None
    assert list(captions.expected.reasons) == ["prompt changed"]

    for examples in ([{"caption": "a red rose"}], [{"caption": "a lily"}]):
        captions = forecast_captions(RecipeEntries(captioned.recipe(examples=examples)), tables, raw)
        assert captions is not None
        assert list(captions.expected.reasons) == ["examples changed"]
        captioned.run(examples=examples)


def test_plan_judges_no_caption_that_is_not_written_yet(captioned: Captioned, tiny_sd: Path) -> None:
    (captioned.images / "copy_of_a.png").write_bytes((captioned.images / "a.png").read_bytes())
    recipe = captioned.recipe(trigger="sks", shuffle={"variants": 4, "keep": 0})
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"base": str(tiny_sd)})})
    tables = Tables(recipe.output_dir)

    planned = forecast(recipe, tables, log=quiet)
    assert not planned.closed
    assert (planned.samples, planned.rejected) == (3, {"duplicate": 1})
    assert "captions_repeated" not in {each.name for each in planned.warnings}
    assert planned.pending_captions == 3
    # One text for each caption, whatever shuffling does with the words that stand for it.
    assert planned.text.reasons["caption not written yet"] == [f"photos/{name}.png" for name in "abc"]
    assert planned.training is not None
    assert planned.training.action.work == "1,000 steps to train"
    assert planned.training.action.state == "the run depends on captions that are not written yet"

    table, _, _ = captioned.run()
    planned = forecast(recipe, tables, log=quiet)
    assert (planned.samples, planned.pending_captions) == (3, 0)
    assert "caption not written yet" not in planned.text.reasons
    assert planned.training is not None
    run = planned.training.action.run
    assert planned.training.action.state == f"run {run} is new"

    # The model would write a damaged entry's caption again, so its text and the run are known.
    entries = RecipeEntries(recipe)
    entries.store.path(caption_spec(table["key"][0])).unlink()
    planned = forecast(recipe, tables, log=quiet)
    assert planned.captions is not None
    assert (planned.captions.to_make, planned.pending_captions) == (1, 0)
    assert planned.training is not None
    assert planned.training.action.run == run


def test_plan_counts_only_a_person_s_caption_before_the_model_s_is_written(
    captioned: Captioned, tiny_sd: Path
) -> None:
    (captioned.images / "a.txt").write_text("a red rose", encoding="utf-8")
    values = {"as": "column", "shuffle": {"variants": 4, "keep": 0}}
    recipe = captioned.recipe(**values)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"base": str(tiny_sd)})})
    planned = forecast(recipe, Tables(recipe.output_dir), log=quiet)
    assert (planned.samples, planned.pending_captions) == (3, 3)
    assert planned.text.reasons["caption not written yet"] == ["photos/b.png", "photos/c.png"]
    assert "photos/a.png" in planned.text.reasons["new caption"]
    assert planned.training is not None
    assert planned.training.action.run == ""


def test_C17_an_image_a_prompt_and_an_edit_caption_exactly_what_they_touch(
    captioned: Captioned,
) -> None:
    drawings = captioned.folder / "drawings"
    drawings.mkdir()
    for seed in (11, 12):
        picture(seed).save(drawings / f"{seed}.png")

    def recipe(prompt: str) -> Recipe:
        values = captioned.recipe().model_dump(mode="json")
        [photos] = values["datasets"]
        drawn = {**photos, "name": "drawings", "path": str(drawings)}
        drawn["captions"] = {**photos["captions"], "prompt": prompt}
        return Recipe.model_validate_json(json.dumps({**values, "datasets": [photos, drawn]}))

    def captioned_again(prompt: str) -> tuple[dict[str, list[str]], int, list[str]]:
        """Return what plan announces, what the job writes, and which images have a caption of the model."""
        now, tables = recipe(prompt), Tables(recipe(prompt).output_dir)
        raw = captioned.raw(now)
        forecast = forecast_captions(RecipeEntries(now), tables, raw)
        assert forecast is not None
        launch = InProcessLaunch()
        result = caption_images(now, raw, tables, launch=launch, log=quiet)
        tables.write(ASSET, result.table)
        reasons = {reason: sorted(names) for reason, names in forecast[0].reasons.items()}
        return reasons, result.report["encoded"], result.table["sample_id"].to_list()

    photos = ["photos/a.png", "photos/b.png", "photos/c.png"]
    drawn = ["drawings/11.png", "drawings/12.png"]
    assert captioned_again("Describe it.") == ({"new image": [*drawn, *photos]}, 5, [*drawn, *photos])
    picture(9).save(captioned.images / "b.png")
    assert captioned_again("Describe it.") == ({"image changed": ["photos/b.png"]}, 1, [*drawn, *photos])
    assert captioned_again("What is it?") == ({"prompt changed": drawn}, 2, [*drawn, *photos])
    edit_captions(recipe("What is it?"), "photos/c.png", ["a lily"], quiet)
    assert captioned_again("What is it?") == ({}, 0, [*drawn, *photos[:2]])


def test_explain_and_gc_know_the_caption(captioned: Captioned) -> None:
    recipe = captioned.recipe()
    tables = Tables(recipe.output_dir)
    tables.write("raw_images", captioned.raw(recipe))
    table, _, _ = captioned.run()
    explained = {each.stage: each.facts for each in explain(recipe, tables, "photos/a.png")}
    assert explained["captions"]["caption"] == table["caption"][0]
    assert explained["captions entry"]["state"] == "valid"
    assert explained["captions entry"]["made of size"] == [30, 40]
    assert [each.to_list() for each in needed_keys(recipe, log=quiet)] == [table["key"].to_list()]
