"""What the UI shows about an asset before its first run: columns, their sources, file, tags and recipe."""

import re
import warnings
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from dagster import (
    BetaWarning,
    CodeReferencesMetadataValue,
    LocalFileCodeReference,
    TableColumn,
    TableColumnConstraints,
    TableColumnDep,
    TableColumnLineage,
    TableSchema,
)

from assets.names import asset_key
from pipeline.escaping import markdown_text, without_secrets
from pipeline.models.size_multiple import local_family
from pipeline.outputs.stage_files import table_file
from pipeline.recipe import Recipe, shareable_path
from pipeline.recipe.datasets import SIDE_INPUT_KEYS
from pipeline.recipe.sections import ASSET_SECTIONS, section_line
from pipeline.storage.addresses import Url
from pipeline.storage.needed_columns import ALL_INPUTS, column_sources
from pipeline.storage.table_columns import (
    ASSET_COLUMNS,
    DECODING_COLUMNS,
    PICTURE_COLUMNS,
    SIDE_INPUT_COLUMNS,
    DeclaredColumns,
)

TABLE_FORMAT = "parquet"

_MAX_TAG_CHARACTERS = 63


def definition_metadata(recipe: Recipe, asset: str) -> dict[str, Any]:
    """Return Dagster's standard metadata of an asset's definition.

    Here and not in each materialization, because the event log would store it with every run.
    """
    lineage = _column_lineage(recipe, asset)
    return {
        "dagster/column_schema": _column_schema(asset, _side_inputs(recipe)),
        **({"dagster/column_lineage": lineage} if lineage.deps_by_column else {}),
        "dagster/uri": _table_uri(recipe, asset),
        "dagster/table_name": f"{recipe.name}.{asset}",
        "dagster/storage_kind": TABLE_FORMAT,
        "dagster/code_references": _recipe_reference(recipe, asset),
    }


# Each asset of a recipe calls it, and a local base model has several files to read.
@lru_cache(maxsize=1)
def asset_tags(recipe: Recipe) -> dict[str, str]:
    """Return the tags by which the UI finds the assets of a base model, family or dataset."""
    family = local_family(recipe)
    return {
        "latentline/base_model": _tag_value(shareable_path(recipe.model.base)),
        **({"latentline/family": _tag_value(family.spec.name)} if family is not None else {}),
        # A tag has one value, and a recipe may have several datasets.
        **{f"dataset/{dataset.name[:_MAX_TAG_CHARACTERS]}": "" for dataset in recipe.datasets},
    }


def _tag_value(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:_MAX_TAG_CHARACTERS]


def _side_inputs(recipe: Recipe) -> frozenset[str]:
    return frozenset(
        SIDE_INPUT_KEYS[section.kind] for dataset in recipe.datasets for section in dataset.side_inputs
    )


def _columns(asset: str, side_inputs: frozenset[str]) -> DeclaredColumns:
    """Return all columns that the table may have; only the images decide whether it has `decoding`."""
    optional = (SIDE_INPUT_COLUMNS[name].get(asset, {}) for name in SIDE_INPUT_COLUMNS if name in side_inputs)
    columns = dict(ASSET_COLUMNS[asset])
    if asset == "validated_dataset":
        columns |= PICTURE_COLUMNS
    for more in (*optional, DECODING_COLUMNS.get(asset, {})):
        columns |= more
    return columns


# Recipes share these objects, because building them for each one would double the time of loading many.
@cache
def _column_schema(asset: str, side_inputs: frozenset[str]) -> TableSchema:
    columns = _columns(asset, side_inputs)
    return TableSchema(
        [
            TableColumn(
                name,
                column.dtype,
                # The UI shows descriptions as Markdown, in which <height> would be a tag.
                markdown_text(column.description),
                TableColumnConstraints(nullable=column.nullable),
            )
            for name, column in columns.items()
        ]
    )


@cache
def _column_sources(asset: str, side_inputs: frozenset[str]) -> Mapping[str, list[tuple[str, str]]]:
    tables = (asset, *ALL_INPUTS[asset])
    return column_sources(asset, {table: tuple(_columns(table, side_inputs)) for table in tables})


def _column_lineage(recipe: Recipe, asset: str) -> TableColumnLineage:
    sources = _column_sources(asset, _side_inputs(recipe))
    keys = {table: asset_key(recipe, table) for table in ALL_INPUTS[asset]}
    return TableColumnLineage(
        {
            column: [TableColumnDep(keys[table], name) for table, name in pairs]
            for column, pairs in sources.items()
        }
    )


def _table_uri(recipe: Recipe, asset: str) -> str:
    output, file = recipe.registered_output, table_file(asset)
    return without_secrets(f"{output}/{file}") if isinstance(output, Url) else (output / file).as_uri()


def _recipe_reference(recipe: Recipe, asset: str) -> CodeReferencesMetadataValue:
    section = ASSET_SECTIONS[asset]
    line = section_line(recipe.source, section)
    label = f"{section} in {recipe.source.name}"
    with warnings.catch_warnings():
        # Dagster calls code references a beta, although its UI shows them.
        warnings.simplefilter("ignore", BetaWarning)
        reference = LocalFileCodeReference(file_path=str(recipe.source), line_number=line, label=label)
        return CodeReferencesMetadataValue(code_references=[reference])
