"""What plan, explain, gc and verify say about the captions of a model."""

from __future__ import annotations

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.maintenance.caption_forecast import forecast_captions
from pipeline.maintenance.explain import explain
from pipeline.maintenance.gc import needed_keys
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.stage import validate
from tests.pipeline.captions.conftest import Captioned, captioned, captioner

__all__ = ["captioned", "captioner"]


def quiet(_: str) -> None: ...


def test_plan_counts_captions_and_gives_pending_images_a_text(captioned: Captioned) -> None:
    recipe = captioned.recipe()
    tables, raw = Tables(recipe.output_dir), captioned.raw(recipe)
    entries = RecipeEntries(recipe)
    forecast = forecast_captions(entries, tables, raw)
    assert forecast is not None
    expected, written = forecast
    assert (expected.there, expected.to_make) == (0, 3)
    valid = validate(recipe, raw, tables, log=quiet, written=written, remember=False).table
    assert valid["caption"].n_unique() == 3

    table, _, _ = captioned.run()
    forecast = forecast_captions(entries, tables, raw)
    assert forecast is not None
    assert (forecast[0].there, forecast[0].to_make) == (3, 0)
    assert forecast[1]["caption"].to_list() == table["caption"].to_list()

    changed = RecipeEntries(captioned.recipe(prompt="What is this?"))
    forecast = forecast_captions(changed, tables, raw)
    assert forecast is not None
    assert list(forecast[0].reasons) == ["prompt changed"]

    for examples in ([{"caption": "a red rose"}], [{"caption": "a lily"}]):
        forecast = forecast_captions(RecipeEntries(captioned.recipe(examples=examples)), tables, raw)
        assert forecast is not None
        assert list(forecast[0].reasons) == ["examples changed"]
        captioned.run(examples=examples)


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
