"""Declarations of the tables that assets write and read through the table IO manager."""

from dagster import AssetIn, AssetOut

from assets.code_versions import code_version
from assets.names import TABLES_RESOURCE, asset_key
from pipeline.recipe import Recipe
from pipeline.storage.needed_columns import needed_columns
from resources.tables import COLUMNS

TABLE = "result"
"""Name of the output that holds an asset's table."""

UNSYNCED = (
    "*Unsynced* means that the recipe, the code or an asset before this one has changed since it was "
    "materialized. Materialize it again: unchanged work is reused."
)
"""Explanation of Dagster's label, shown in the description of each asset."""


def table_out(recipe: Recipe, asset: str, *, description: str, kinds: set[str]) -> AssetOut:
    """Declare the table that `asset` writes.

    The output is optional, because a run may select the asset's checks without the asset.
    """
    return AssetOut(
        key=asset_key(recipe, asset),
        description=f"{description}\n\n{UNSYNCED}",
        io_manager_key=TABLES_RESOURCE,
        is_required=False,
        group_name=recipe.name,
        code_version=code_version(recipe, asset),
        kinds=kinds,
    )


def table_in(recipe: Recipe, asset: str, *, reader: str) -> AssetIn:
    """Declare that the asset `reader` reads the table of `asset`, limited to the columns that it needs."""
    columns = needed_columns(reader, asset)
    metadata = None if columns is None else {COLUMNS: list(columns)}
    return AssetIn(key=asset_key(recipe, asset), metadata=metadata)
