"""The table IO manager: it writes an asset's output as a Parquet file and reads inputs from such files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster import (
    AssetKey,
    InitResourceContext,
    InputContext,
    IOManager,
    IOManagerDefinition,
    MetadataValue,
    OutputContext,
    io_manager,
)

from pipeline.outputs.stage_files import table_file
from resources.failures import errors_as_failures
from resources.run_worker import end_with_code_server

if TYPE_CHECKING:
    import polars as pl

    from pipeline.outputs.folder import OutputFolder
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables


COLUMNS = "columns"
"""Key of an input's metadata: the names of the columns to read."""


class TableIOManager(IOManager):
    """Tables below each recipe's `output_dir/tables`, replaced atomically and checked against their schemas.

    The first part of an asset key `<recipe>/<asset>` selects the output folder. If it is at an address, a
    table is uploaded when it has been written, and fetched before it is read.
    """

    def __init__(self, outputs: Mapping[str, OutputFolder]) -> None:
        self._outputs = outputs

    def handle_output(self, context: OutputContext, obj: pl.DataFrame) -> None:
        """Replace the asset's table."""
        with errors_as_failures():
            tables, outputs, asset = self._locate(context.asset_key)
            path = tables.write(asset, obj)
            outputs.upload(table_file(asset))
            context.add_output_metadata(
                {"table": MetadataValue.path(path), "dagster/row_count": MetadataValue.int(obj.height)}
            )

    def load_input(self, context: InputContext) -> pl.DataFrame:
        """Return the upstream asset's table, or only the columns that the input's metadata lists."""
        with errors_as_failures():
            tables, outputs, asset = self._locate(context.asset_key)
            outputs.fetch(table_file(asset))
            return tables.read(asset, context.definition_metadata.get(COLUMNS))

    def _locate(self, key: AssetKey) -> tuple[Tables, OutputFolder, str]:
        from pipeline.storage.tables import Tables

        recipe, asset = key.path
        outputs = self._outputs[recipe]
        return Tables(outputs.folder), outputs, asset


def table_io_manager(recipes: Sequence[Recipe]) -> IOManagerDefinition:
    """Return the table IO manager of the recipes."""

    # Without configuration, because the recipe decides where its tables are.
    @io_manager(config_schema={}, description="Parquet tables below each recipe's output_dir.")
    def tables(_: InitResourceContext) -> TableIOManager:
        from pipeline.outputs.folder import outputs_of

        # Every step uses this resource. A step in a process of its own must end with the process of the run.
        end_with_code_server()
        return TableIOManager({recipe.name: outputs_of(recipe) for recipe in recipes})

    return tables
