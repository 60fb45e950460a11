"""The results of an asset's checks, from real runs of a step."""

from __future__ import annotations

from pathlib import Path

from dagster import (
    AssetCheckSeverity,
    AssetKey,
    AssetSelection,
    ExecuteInProcessResult,
    TableMetadataValue,
    materialize,
)
from PIL import Image

from assets.definitions import build_definitions
from assets.names import GPU_POOL
from assets.recipe_graph import recipe_assets
from pipeline.recipe import Recipe, recipe_from_mapping


def recipe(
    folder: Path,
    cache_dir: str = "cache",
    datasets: tuple[str, ...] = ("data",),
    base: Path | str = "models/none",
) -> Recipe:
    for name in datasets:
        (folder / name).mkdir(exist_ok=True)
    values = {
        "datasets": [{"name": name, "path": folder / name} for name in datasets],
        "cache_dir": folder / cache_dir,
        "output_dir": folder / "out",
        "model": {"base": base},
    }
    return recipe_from_mapping("flowers", values)


def run(recipe: Recipe, selection: AssetSelection) -> ExecuteInProcessResult:
    resources = build_definitions([recipe]).resources
    assert resources is not None
    return materialize(
        recipe_assets(recipe, pool=GPU_POOL),
        selection=selection,
        resources=resources,
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
    assert not (tmp_path / "out").exists()


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
    failed = {each.check_name: each for each in result.get_asset_check_evaluations() if not each.passed}
    assert set(failed) == {"images_found", "oddities"}

    gate, warning = failed["images_found"], failed["oddities"]
    assert gate.severity == AssetCheckSeverity.ERROR
    assert warning.severity == AssetCheckSeverity.WARN
    for evaluation, cell in ((gate, "empty"), (warning, "data/photo.jpg")):
        table = evaluation.metadata["rows"]
        assert isinstance(table, TableMetadataValue)
        assert [cell in record.data.values() for record in table.records] == [True], table.records
        assert evaluation.metadata["num_rows"].value == 1
        assert evaluation.metadata["fix"].value
