"""The results of an asset's checks, from real runs of a step."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dagster import (
    AssetCheckSeverity,
    AssetKey,
    AssetSelection,
    DagsterInstance,
    ExecuteInProcessResult,
    MarkdownMetadataValue,
    TableMetadataValue,
    materialize,
)
from PIL import Image

from assets.checks import check_specs
from assets.definitions import build_definitions
from assets.location import Location
from assets.names import GPU_POOL
from assets.recipe_graph import recipe_assets
from pipeline.recipe import Recipe
from pipeline.recipe.check_specs import ONLY_WITH, SPECS, specs_of
from tests.markdown import require_inactive
from tests.small_recipe import small_recipe


def recipe(
    folder: Path,
    cache_dir: str = "cache",
    datasets: tuple[str, ...] = ("data",),
    base: Path | str = "models/none",
) -> Recipe:
    for name in datasets:
        (folder / name).mkdir(exist_ok=True)
    named = [{"name": name, "path": folder / name} for name in datasets]
    return small_recipe(folder, datasets=named, cache_dir=folder / cache_dir, model={"base": base})


def run(
    recipe: Recipe, selection: AssetSelection, instance: DagsterInstance | None = None
) -> ExecuteInProcessResult:
    resources = build_definitions([recipe]).resources
    assert resources is not None
    return materialize(
        recipe_assets(recipe, Location(GPU_POOL)),
        selection=selection,
        resources=resources,
        instance=instance,
        raise_on_error=False,
    )


RAW_IMAGES = AssetKey(["flowers", "raw_images"])


def test_path_isolation_fails_before_the_asset_is_materialized(tmp_path: Path) -> None:
    result = run(recipe(tmp_path, "data/cache"), AssetSelection.assets(RAW_IMAGES))
    assert not result.success
    assert result.get_asset_materialization_events() == []
    [evaluation] = result.get_asset_check_evaluations()
    assert (evaluation.check_name, evaluation.passed) == ("path_isolation", False)
    assert evaluation.severity == AssetCheckSeverity.ERROR
    assert set(evaluation.metadata) == {"what", "where", "fix"}
    assert "`cache_dir` is inside dataset data" in str(evaluation.description)
    assert not (tmp_path / "out").exists()


def test_each_check_names_the_materialization_of_its_own_run(tmp_path: Path, tiny_sd: Path) -> None:
    flowers = recipe(tmp_path, base=tiny_sd)
    Image.new("RGB", (8, 8)).save(tmp_path / "data" / "photo.jpg")
    with DagsterInstance.ephemeral() as instance:
        results = [run(flowers, AssetSelection.assets(RAW_IMAGES), instance) for _ in range(2)]
        for result in results:
            for evaluation in result.get_asset_check_evaluations():
                target = evaluation.target_materialization_data
                assert target is not None
                assert target.run_id == result.run_id, evaluation.check_name


def test_path_isolation_fails_the_step_even_if_the_check_is_not_selected(tmp_path: Path) -> None:
    selection = AssetSelection.assets(RAW_IMAGES).without_checks()
    result = run(recipe(tmp_path, "data/cache"), selection)
    assert not result.success
    assert result.get_asset_check_evaluations() == []
    assert not (tmp_path / "out").exists()


def test_a_failed_check_has_the_severity_of_its_kind_and_a_table_of_its_rows(
    tmp_path: Path, tiny_sd: Path
) -> None:
    flowers = recipe(tmp_path, datasets=("data", "empty"), base=tiny_sd)
    Image.new("RGB", (8, 8)).save(tmp_path / "data" / "photo.jpg", "PNG")
    result = run(flowers, AssetSelection.assets(RAW_IMAGES))
    evaluations = {each.check_name: each for each in result.get_asset_check_evaluations()}
    failed = {name: each for name, each in evaluations.items() if not each.passed}
    assert set(failed) == {"images_found", "oddities"}
    assert evaluations["path_isolation"].description == "No two paths overlap."
    assert evaluations["names_distinct"].description == "1 name, distinct in any case and Unicode form"
    repeated = {"summary", "fix"} & set(evaluations["names_distinct"].metadata)
    assert repeated == set(), "the event log stores each entry of each passed check three times"
    for evaluation in failed.values():
        assert "unusual files: " in str(evaluation.description) or "no images" in str(evaluation.description)
        assert "\n\nfix: " in str(evaluation.description)

    # The error of the step names the gate, and the report lists all checks.
    assert not result.success
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    assert "dataset empty has no images" in str(failure.event_specific_data)
    report = json.loads((tmp_path / "out" / "reports" / "raw_images_checks.json").read_text("utf-8"))
    assert [each["name"] for each in report["checks"]] == [spec.name for spec in SPECS["raw_images"]]

    gate, warning = failed["images_found"], failed["oddities"]
    assert gate.severity == AssetCheckSeverity.ERROR
    assert warning.severity == AssetCheckSeverity.WARN
    for evaluation, cell in ((gate, "empty"), (warning, "data/photo.jpg")):
        table = evaluation.metadata["rows"]
        assert isinstance(table, TableMetadataValue)
        assert [cell in record.data.values() for record in table.records] == [True], table.records
        assert evaluation.metadata["num_rows"].value == 1
        assert evaluation.metadata["fix"].value


def test_I18_names_of_files_are_inactive_in_the_markdown_of_checks(tmp_path: Path, tiny_sd: Path) -> None:
    """The server of the Dagster UI executes the mutations of requests for pictures."""
    flowers = recipe(tmp_path, base=tiny_sd)
    folder = tmp_path / "data" / "![x\\]("
    folder.mkdir()
    for name in ("graphql?query=mutation{x}).jpg", r"\<img src=x>.jpg", "www.example.com.jpg", "a@b.org.jpg"):
        Image.new("RGB", (8, 8)).save(folder / name, "PNG")
    result = run(flowers, AssetSelection.assets(RAW_IMAGES))

    evaluations = {each.check_name: each for each in result.get_asset_check_evaluations()}
    oddities = evaluations["oddities"]
    for text in ("graphql", "<img", "www.example.com", "a@b.org"):
        assert text in str(oddities.description) or text in str(oddities.metadata["rows"])
    texts = [str(each.description) for each in evaluations.values()]
    for event in result.get_asset_materialization_events():
        values = event.step_materialization_data.materialization.metadata.values()
        texts += [value.value or "" for value in values if isinstance(value, MarkdownMetadataValue)]
    for text in texts:
        require_inactive(without_own_pictures(text))

    # Whoever copies a name from the metadata, or reads the run summary, gets it without escapes.
    summary = str(oddities.metadata["summary"].value)
    assert oddities.description != summary
    assert "unusual files: " in summary


def without_own_pictures(text: str) -> str:
    return re.sub(r"!\[[a-z_]+\]\(data:image/", "", text)


DATASETS_WITH_ALL = [
    {"name": "a", "path": "/data/a", "mask": {"path": "/data/m"}, "slider": 1, "validation_fraction": 0.1},
    {"name": "b", "path": "/data/b", "references": [{"path": "/data/c"}], "slider": -1},
]


def test_L1_only_checks_that_can_fail_in_the_recipe_are_declared(tmp_path: Path) -> None:
    def names(flowers: Recipe) -> set[str]:
        return {spec.name for asset in SPECS for spec in check_specs(flowers, asset)}

    everything = {spec.name for asset in SPECS for spec in specs_of(asset)}
    assert names(small_recipe(tmp_path, datasets=DATASETS_WITH_ALL)) == everything
    assert everything - names(recipe(tmp_path)) == ONLY_WITH.keys()
    mask = [{"name": "a", "path": "/data/a", "mask": {"from": "alpha"}}]
    missing = {name for name, feature in ONLY_WITH.items() if feature not in ("masks", "subjects")}
    assert everything - names(small_recipe(tmp_path, datasets=mask)) == missing


def test_each_check_is_declared_with_its_explanation_and_says_whether_it_is_a_gate(tmp_path: Path) -> None:
    flowers = small_recipe(
        tmp_path,
        datasets=DATASETS_WITH_ALL,
        checks={"gates": ["pictures_sharp"], "allow": ["captions_present"]},
    )
    other_kinds = {"pictures_sharp": "Gate", "captions_present": "Gate that checks.allow opens"}
    for asset in SPECS:
        declared = {spec.name: spec for spec in check_specs(flowers, asset)}
        for spec in specs_of(asset):
            kind = other_kinds.get(spec.name, "Gate" if spec.gate else "Warning")
            assert declared[spec.name].description == f"{kind}: {spec.explained}"
            assert declared[spec.name].metadata == {"gate": kind != "Warning"}
            assert declared[spec.name].blocking == (kind != "Warning")
        assert {spec.asset_key for spec in declared.values()} == {AssetKey(["flowers", asset])}
