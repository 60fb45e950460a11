"""Dagster's standard metadata, tags and owners in the definitions of assets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetKey,
    AssetSelection,
    CodeReferencesMetadataValue,
    DagsterInstance,
    LocalFileCodeReference,
    RepositoryDefinition,
    TableColumnDep,
    materialize,
)
from PIL import Image

from assets.definitions import build_definitions
from pipeline.escaping import markdown_text
from pipeline.recipe import Recipe, load_recipe
from pipeline.storage.needed_columns import DERIVED_COLUMNS, STAGE_INPUTS, needed_columns
from pipeline.storage.table_columns import PICTURE_COLUMNS
from pipeline.storage.tables import ASSETS, SCHEMAS, Tables, pandera_schema
from tests.small_recipe import small_recipe

SIDE_INPUTS: dict[str, Any] = {
    "datasets": [
        {"name": "photos", "path": "/data/after", "references": [{"path": "/data/before"}]},
        {"name": "masked", "path": "/data/images", "mask": {"path": "/data/masks"}},
    ]
}


def repository(*recipes: Recipe) -> RepositoryDefinition:
    return build_definitions(recipes).get_repository_def()


def metadata_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    graph = repository(recipe).asset_graph
    return {
        asset: dict(graph.get(AssetKey([recipe.name, asset])).metadata)
        for asset in (*ASSETS, *recipe.optional_assets)
    }


def test_the_columns_of_an_asset_are_the_ones_of_its_pandera_schema(tmp_path: Path) -> None:
    plain = metadata_of(small_recipe(tmp_path))
    full = metadata_of(small_recipe(tmp_path, **SIDE_INPUTS))
    for asset in ASSETS:
        expected = {
            name: (str(column.dtype), markdown_text(column.description), column.nullable)
            for name, column in pandera_schema(asset).columns.items()
        }
        declared = {
            column.name: (column.type, column.description, column.constraints.nullable)
            for column in full[asset]["dagster/column_schema"].columns
        }
        assert declared == expected
        assert list(declared) == list(expected)
        without = {column.name for column in plain[asset]["dagster/column_schema"].columns}
        assert without - {"decoding", *PICTURE_COLUMNS} == set(SCHEMAS[asset]), (
            "a recipe without side inputs has no columns of them"
        )


def test_the_ui_shows_all_of_a_description_as_markdown(tmp_path: Path) -> None:
    columns = metadata_of(small_recipe(tmp_path))["aspect_buckets"]["dagster/column_schema"].columns
    (bucket,) = (column for column in columns if column.name == "bucket")
    assert bucket.description == "Target size as `<height>x<width>`.", "<height> alone would be a tag"


def lineage(metadata: dict[str, dict[str, Any]], asset: str, column: str) -> set[str]:
    """Return the sources of a column as `<asset>.<column>`."""
    deps: list[TableColumnDep] = metadata[asset]["dagster/column_lineage"].deps_by_column.get(column, [])
    return {f"{dep.asset_key.path[-1]}.{dep.column_name}" for dep in deps}


def test_the_lineage_of_columns_leads_to_columns_that_the_stage_reads(tmp_path: Path) -> None:
    metadata = metadata_of(small_recipe(tmp_path, **SIDE_INPUTS))
    assert "dagster/column_lineage" not in metadata["raw_images"]
    for asset in ASSETS[1:]:
        columns = {column.name for column in metadata[asset]["dagster/column_schema"].columns}
        deps_by_column = metadata[asset]["dagster/column_lineage"].deps_by_column
        assert set(deps_by_column) <= columns
        assert set(DERIVED_COLUMNS[asset]) <= columns
        for name in deps_by_column:
            for source in lineage(metadata, asset, name):
                table, _, column = source.partition(".")
                assert table in STAGE_INPUTS[asset]
                read = needed_columns(asset, table) or [
                    each.name for each in metadata[table]["dagster/column_schema"].columns
                ]
                assert column in read

    assert lineage(metadata, "aspect_buckets", "bucket") == {
        "validated_dataset.height",
        "validated_dataset.width",
    }
    assert lineage(metadata, "text_embeddings", "sample_id") == {"validated_dataset.sample_id"}
    assert lineage(metadata, "trained_lora", "latent_keys") == {"vae_latents.key"}
    assert lineage(metadata, "trained_lora", "text_keys") == {"text_embeddings.key"}
    assert lineage(metadata, "trained_lora", "sample_id") == {
        "vae_latents.sample_id",
        "text_embeddings.sample_id",
    }
    assert lineage(metadata, "vae_latents", "dtype") == set(), "the recipe decides it"


def test_every_source_of_a_derived_column_is_read(tmp_path: Path) -> None:
    """A misspelled source would be left out without a word."""
    first, second = SIDE_INPUTS["datasets"]
    first = {**first, "captions": {"from": "model", "model": "owner/captioner"}}
    metadata = metadata_of(small_recipe(tmp_path, datasets=[first, second]))
    for asset, derived in DERIVED_COLUMNS.items():
        for column, sources in derived.items():
            found = {source.partition(".")[2] for source in lineage(metadata, asset, column)}
            assert found == {source.rpartition(".")[2] for source in sources}, f"{asset}.{column}"


def test_the_code_reference_of_an_asset_leads_to_its_section_of_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "flowers.yaml"
    file.write_text(
        "# a recipe\ndatasets: [{name: photos, path: data}]\noutput_dir: out\nmodel: {base: owner/name}\n\n"
        "'training':\n  steps: 5\n# latents: {}\n  \n",
        encoding="utf-8",
    )
    metadata = metadata_of(load_recipe(file))
    lines: dict[str, int | None] = {}
    for asset in ASSETS:
        references = metadata[asset]["dagster/code_references"]
        assert isinstance(references, CodeReferencesMetadataValue)
        (reference,) = references.code_references
        assert isinstance(reference, LocalFileCodeReference)
        assert reference.file_path == str(file)
        lines[asset] = reference.line_number
    assert lines == {**dict.fromkeys(ASSETS, 1), "raw_images": 2, "validated_dataset": 2, "trained_lora": 6}


def test_the_address_of_a_table_is_a_uri(tmp_path: Path) -> None:
    local = metadata_of(small_recipe(tmp_path, output_dir=tmp_path / "my out"))["raw_images"]
    assert local["dagster/uri"] == f"{(tmp_path / 'my out').as_uri()}/tables/raw_images.parquet"
    assert "my%20out" in local["dagster/uri"]
    assert (local["dagster/table_name"], local["dagster/storage_kind"]) == ("flowers.raw_images", "parquet")
    remote = metadata_of(small_recipe(tmp_path, output_dir="memory://bucket/out"))["raw_images"]
    assert remote["dagster/uri"] == "memory://bucket/out/tables/raw_images.parquet"


def test_assets_are_found_by_base_model_family_dataset_and_owner(tmp_path: Path, tiny_sd: Path) -> None:
    datasets = [{"name": name, "path": f"/data/{name}"} for name in ("photos", "x" * 80)]
    hub = small_recipe(
        tmp_path,
        "hub",
        datasets=datasets,
        model={"base": "owner/name-1.0"},
        owners=["team:art", "a@example.com"],
    )
    local = small_recipe(tmp_path, "local", model={"base": tiny_sd}, output_dir=tmp_path / "local")
    graph = repository(hub, local).asset_graph
    for asset in ASSETS:
        node = graph.get(AssetKey(["hub", asset]))
        tags = {name: value for name, value in node.tags.items() if not name.startswith("dagster/kind/")}
        assert tags == {
            "latentline/base_model": "owner_name-1.0",
            "dataset/photos": "",
            f"dataset/{'x' * 63}": "",
        }
        assert list(node.owners) == ["team:art", "a@example.com"]
        assert (
            graph.get(AssetKey(["local", asset])).tags["latentline/family"] == "Stable_Diffusion_1.x_and_2.x"
        )
        assert list(graph.get(AssetKey(["local", asset])).owners) == []


def test_a_materialization_has_the_number_of_rows_and_no_column_that_is_not_declared(
    tmp_path: Path, tiny_sd: Path
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("rose", "lily"):
        Image.new("RGB", (64, 48), "red").save(tmp_path / "data" / f"{name}.png")
        (tmp_path / "data" / f"{name}.txt").write_text(f"a {name}", encoding="utf-8")
    recipe = small_recipe(tmp_path, model={"base": tiny_sd}, buckets={"resolution": 64, "step": 8})
    graph = repository(recipe).asset_graph
    names = ["raw_images", "validated_dataset", "aspect_buckets"]
    selection = AssetSelection.assets(*(AssetKey(["flowers", name]) for name in names)).without_checks()
    with DagsterInstance.ephemeral() as instance:
        assert materialize([*graph.assets_defs], selection=selection, instance=instance).success
        for name in names:
            event = instance.get_latest_materialization_event(AssetKey(["flowers", name]))
            assert event is not None
            assert event.asset_materialization is not None
            metadata = event.asset_materialization.metadata
            table = Tables(recipe.output_dir).read(name)
            assert metadata["dagster/row_count"].value == table.height > 0
            schema = graph.get(AssetKey(["flowers", name])).metadata["dagster/column_schema"]
            assert set(table.columns) <= {column.name for column in schema.columns}


@pytest.mark.parametrize("owner", ["art", "team:", "a@b", "@example.com"])
def test_an_owner_that_dagster_would_reject_is_a_mistake_in_the_recipe(tmp_path: Path, owner: str) -> None:
    with pytest.raises(Exception, match="an owner must be an email address or a team"):
        small_recipe(tmp_path, owners=[owner])
