"""The IO manager of the tables: outputs become Parquet files, inputs are read from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dagster import InputContext, IOManager, OutputContext

from resources.failures import failures_stated

if TYPE_CHECKING:
    import polars as pl

    from pipeline.storage.tables import Tables


COLUMNS = "columns"
"""Key of an input's metadata: names of the columns that are read of its table."""


class TableIOManager(IOManager):
    """Tables below each recipe's `output_dir/tables`, replaced atomically, checked against their schemas.

    Asset keys are `<recipe>/<asset>`; the first part chooses the folder. No run may configure it: where a
    table lies is the recipe's to say.
    """

    def __init__(self, output_dirs: Mapping[str, Path]) -> None:
        """Take `output_dir` by recipe name."""
        self._output_dirs = output_dirs

    def handle_output(self, context: OutputContext, obj: pl.DataFrame) -> None:
        """Replace the asset's table; fails as `failures_stated` when it is not what the schema says."""
        with failures_stated():
            tables, asset = self._tables(context.asset_key.path)
            context.add_output_metadata({"table": str(tables.write(asset, obj)), "rows": obj.height})

    def load_input(self, context: InputContext) -> pl.DataFrame:
        """The upstream asset's table as last written, or those columns of it that the input's metadata names.

        Fails as `failures_stated` when there is none.
        """
        with failures_stated():
            tables, asset = self._tables(context.asset_key.path)
            return tables.read(asset, context.definition_metadata.get(COLUMNS))

    def _tables(self, key: object) -> tuple[Tables, str]:
        from pipeline.storage.tables import Tables

        recipe, asset = list(key)  # pyright: ignore[reportArgumentType] - a sequence of two names
        return Tables(self._output_dirs[recipe]), asset
