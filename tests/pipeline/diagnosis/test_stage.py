from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl
import pytest
from PIL import Image

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.diagnosis.caption_swap import MAX_DRAWS, ROUNDS, Verdict, num_passes
from pipeline.diagnosis.entries import swapped_inputs
from pipeline.diagnosis.report import SHEET_FILE, write_sheet
from pipeline.diagnosis.stage import cannot_tell, diagnose, diagnosis_table
from pipeline.encoding.workers import WORKERS
from pipeline.errors import GateClosedError, TrainingError
from pipeline.maintenance import gc, verify
from pipeline.maintenance.diagnosis_forecast import forecast_diagnosis
from pipeline.maintenance.explain import explain
from pipeline.recipe.diagnosis import DiagnosisSettings
from pipeline.reporting.pictures import THUMBNAIL_PX
from pipeline.storage.tables import Tables
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.conftest import any_precision, one_thread

if TYPE_CHECKING:
    from pipeline.reporting.reports import StageResult
    from tests.pipeline.trained_lora.project import Project

__all__ = ["any_precision", "one_thread"]

SIZES = {"64x64": 3, "32x96": 2}


def diagnosed(project: Project, launch: InProcessLaunch, *, others: int = 32) -> StageResult:
    tables = Tables(project.recipe.output_dir)
    recipe = project.recipe.model_copy(update={"diagnosis": DiagnosisSettings(others=others)})
    result = diagnose(recipe, project.latents, project.text, tables, launch=launch, log=lambda _: None)
    tables.write("diagnosis", result.table)
    return result


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    return make_project(sizes=SIZES)


def test_an_unchanged_caption_is_measured_once_and_a_changed_one_again(project: Project) -> None:
    launch = InProcessLaunch()
    first = diagnosed(project, launch)
    assert launch.modules == [WORKERS["text"], WORKERS["diagnoses"]]
    assert first.report["encoded"] == 5
    assert min(first.table["passes"].to_list()) >= num_passes(5, ROUNDS[0], 32)

    # No image has this caption, and nothing needs it any more.
    entries = RecipeEntries(project.recipe)
    entries.store.path(entries.text_spec("photograph 2 of 32x96")).unlink()
    launch = InProcessLaunch()
    again = diagnosed(project, launch)
    assert launch.modules == []
    assert (again.report["encoded"], again.report["reused"]) == (0, 5)
    assert again.table.equals(first.table)


def test_a_sharded_base_model_is_refused(project: Project) -> None:
    """Its processes would wait for each other's forward passes."""
    accelerate = project.recipe.accelerate.model_copy(update={"shard": True, "num_processes": 2})
    sharded = project.recipe.model_copy(update={"accelerate": accelerate})
    with pytest.raises(TrainingError, match="each one measures alone"):
        diagnosed(replace(project, recipe=sharded), InProcessLaunch())
    with_section = sharded.model_copy(update={"diagnosis": DiagnosisSettings()})
    assert any("diagnosis.captions" in each.what for each in with_section.violations())


def test_O10_diagnosis_alone_does_not_start_if_the_cache_fails_a_gate(project: Project) -> None:
    entries = RecipeEntries(project.recipe)
    entry = entries.store.path(entries.latent_spec(project.latents.row(0, named=True)))
    entry.write_bytes(entry.read_bytes()[:-8])
    launch = InProcessLaunch()
    with pytest.raises(GateClosedError, match="demo/vae_latents"):
        diagnosed(project, launch)
    assert launch.modules == []


def test_an_untrained_model_cannot_tell(project: Project) -> None:
    """Its output does not depend on what the caption says about the image."""
    result = diagnosed(project, InProcessLaunch())
    assert not result.report["decided"]
    assert "cannot tell" in result.report["why"]
    assert set(result.table["verdict"]) == {"cannot tell"}
    assert result.table["better_caption"].null_count() == 5
    assert result.report["worst"] == []


def test_equal_captions_leave_nothing_to_exchange(project: Project) -> None:
    alike = replace(project, text=project.text.with_columns(caption=pl.lit("photograph 0 of 64x64")))
    launch = InProcessLaunch()
    result = diagnosed(alike, launch)
    assert launch.modules == []
    assert "no image has 3 captions of other images" in result.report["why"]
    assert result.table["score"].null_count() == 5


def test_a_better_caption_is_named_only_for_a_caption_that_does_not_fit(project: Project) -> None:
    inputs = swapped_inputs(RecipeEntries(project.recipe), project.latents, project.text)
    keys = inputs["key"].to_list()
    wrong = Verdict(score=0.2, low=0.1, high=0.3, best=2, passes=10)
    right = Verdict(score=-0.2, low=-0.3, high=-0.1, best=1, passes=10)
    verdicts = {key: wrong if number == 1 else right for number, key in enumerate(keys)}
    table = diagnosis_table(inputs, verdicts)
    assert table["verdict"].to_list() == ["fits", "does not fit", "fits", "fits", "fits"]
    assert table["better_caption"].drop_nulls().to_list() == [inputs["captions"][1][2]]
    assert cannot_tell(RecipeEntries(project.recipe), table) == ""


def test_a_base_model_that_prefers_other_captions_for_most_images_cannot_tell(project: Project) -> None:
    """As one does that knows none of the words; tests/demo/test_defects.py measures it."""
    inputs = swapped_inputs(RecipeEntries(project.recipe), project.latents, project.text)
    wrong = Verdict(score=0.2, low=0.1, high=0.3, best=2, passes=10)
    right = Verdict(score=-0.2, low=-0.3, high=-0.1, best=1, passes=10)
    verdicts = {key: wrong if number < 3 else right for number, key in enumerate(inputs["key"])}
    table = diagnosis_table(inputs, verdicts)
    assert "only 2 of 5 captions fit" in cannot_tell(RecipeEntries(project.recipe), table)


def test_the_sheet_shows_no_second_image_if_no_image_has_the_better_caption(project: Project) -> None:
    inputs = swapped_inputs(RecipeEntries(project.recipe), project.latents, project.text)
    wrong = Verdict(score=0.2, low=0.1, high=0.3, best=1, passes=10)
    table = diagnosis_table(inputs, dict.fromkeys(inputs["key"], wrong))
    for image in project.latents.iter_rows(named=True):
        folder = project.recipe.datasets[0].path
        (folder / image["path"]).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64)).save(folder / image["path"])
    file = project.recipe.output_dir / "reports" / "diagnosis" / SHEET_FILE
    widths: list[int] = []
    for better in ("photograph 2 of 32x96", "photograph 0 of 32x96"):
        row = table.head(1).with_columns(better_caption=pl.lit(better))
        write_sheet(project.recipe, row, table, log=lambda _: None)
        with Image.open(file) as sheet:
            widths.append(sheet.width)
    assert widths[1] - widths[0] == THUMBNAIL_PX


def test_keys_depend_on_content_and_captions_and_on_no_name(project: Project) -> None:
    entries = RecipeEntries(project.recipe)
    before = swapped_inputs(entries, project.latents, project.text)
    renamed = [
        each.with_columns(sample_id=pl.col("sample_id").str.replace("64x64-1", "renamed"))
        for each in (project.latents, project.text)
    ]
    after = swapped_inputs(entries, *renamed)
    assert set(after["key"]) == set(before["key"])

    first = project.text["caption"][0]
    edited = project.text.with_columns(
        caption=pl.when(caption=first).then(pl.lit("a cat")).otherwise("caption")
    )
    changed = swapped_inputs(entries, project.latents, edited)
    assert not set(changed["key"]) & set(before["key"])
    other = project.changed("other", quantize="int8").recipe
    assert not set(swapped_inputs(RecipeEntries(other), project.latents, project.text)["key"]) & set(
        before["key"]
    )


def test_fewer_captions_are_other_entries_if_they_are_chosen(project: Project) -> None:
    def keys(others: int) -> set[str]:
        recipe = project.recipe.model_copy(update={"diagnosis": DiagnosisSettings(others=others)})
        return set(swapped_inputs(RecipeEntries(recipe), project.latents, project.text)["key"])

    # The captions of this dataset have four or five others.
    assert keys(32) == keys(5)
    assert len(keys(4) - keys(32)) == 3
    assert not keys(3) & keys(32)

    result = diagnosed(project, InProcessLaunch(), others=3)
    assert set(result.table["key"]) == keys(3)
    least = 3 * num_passes(6, ROUNDS[0], 3) + 2 * num_passes(5, ROUNDS[0], 3)
    assert least <= result.report["passes"] <= least + 5 * (MAX_DRAWS - ROUNDS[0]) * 3


def test_the_gradient_of_a_model_that_attends_to_all_tokens(make_project: Callable[..., Project]) -> None:
    """Captions of FLUX.2 klein have different lengths, so the embedding of the own one is padded."""
    result = diagnosed(make_project(prediction="klein", sizes=SIZES), InProcessLaunch(), others=3)
    assert result.table["score"].is_finite().all()
    assert (result.report["fits"], result.report["does_not_fit"], result.report["cannot_tell"]) == (0, 0, 5)


def test_maintenance_knows_the_entries(project: Project) -> None:
    recipe = project.recipe.model_copy(update={"diagnosis": DiagnosisSettings()})
    entries, tables = RecipeEntries(recipe), Tables(recipe.output_dir)
    forecast = forecast_diagnosis(entries, tables, project.latents, project.text)
    assert forecast is not None
    assert (forecast.there, forecast.to_measure, forecast.seconds) == (0, 5, None)
    # Exchanging a word gives three of the captions a fifth other, which no image has.
    assert forecast.least_passes == 3 * num_passes(6, ROUNDS[0], 32) + 2 * num_passes(5, ROUNDS[0], 32)

    result = diagnosed(project, InProcessLaunch())
    keys = set(result.table["key"])
    assert forecast.least_passes <= result.report["passes"] <= forecast.most_passes
    after = forecast_diagnosis(entries, tables, project.latents, project.text)
    assert after is not None
    assert (after.there, after.to_measure, after.most_passes) == (5, 0, 0)

    assert keys <= {key for group in gc.needed_keys(recipe, log=lambda _: None) for key in group}
    needed = [each for each in verify.needed_entries(recipe, tables) if each.spec.kind == "diagnoses"]
    assert {each.spec.key for each in needed} == keys
    assert verify.verify(recipe, needed, log=lambda _: None) == []
    facts = [
        each.facts for each in explain(recipe, tables, "photos/64x64-0.jpg") if each.stage == "diagnosis"
    ]
    assert [each["caption"] for each in facts] == ["photograph 0 of 64x64"]
