"""The table IO manager: it writes an asset's output as a Parquet file and reads inputs from such files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dagster import AssetKey, InputContext, IOManager, OutputContext

from resources.failures import errors_as_failures

if TYPE_CHECKING:
    import polars as pl

    from pipeline.storage.mirror import Mirror
    from pipeline.storage.tables import Tables


COLUMNS = "columns"
"""Key of an input's metadata: the names of the columns to read."""


_NO_MIRRORS: Mapping[str, Callable[[], Mirror]] = {}


class TableIOManager(IOManager):
    """Tables below each recipe's `output_dir/tables`, replaced atomically and checked against their schemas.

    The first part of an asset key `<recipe>/<asset>` selects the output folder. Run configuration cannot
    change it, because the recipe decides where its tables are. If the output folder is at an address, a table
    is pulled before it is read; the step that wrote it pushes it with its other results.
    """

    def __init__(
        self, output_dirs: Mapping[str, Path], mirrors: Mapping[str, Callable[[], Mirror]] = _NO_MIRRORS
    ) -> None:
        """Use these output folders, by recipe name.

        Args:
            output_dirs: Local folders, or working copies of folders at an address.
            mirrors: Functions that return the mirrors of the working copies.
        """
        self._output_dirs = output_dirs
        self._mirrors = mirrors

    def handle_output(self, context: OutputContext, obj: pl.DataFrame) -> None:
        """Replace the asset's table.

        Raises:
            Failure: The table does not match its schema, or cannot be written.
        """
        with errors_as_failures():
            tables, asset = self._locate(context.asset_key)
            context.add_output_metadata({"table": str(tables.write(asset, obj)), "rows": obj.height})

    def load_input(self, context: InputContext) -> pl.DataFrame:
        """Return the upstream asset's table, or only the columns that the input's metadata lists.

        Raises:
            Failure: The table is missing or cannot be read.
        """
        with errors_as_failures():
            tables, asset = self._locate(context.asset_key)
            if mirror := self._mirrors.get(context.asset_key.path[0]):
                mirror().pull(f"tables/{asset}.parquet")
            return tables.read(asset, context.definition_metadata.get(COLUMNS))

    def _locate(self, key: AssetKey) -> tuple[Tables, str]:
        from pipeline.storage.tables import Tables

        recipe, asset = key.path
        return Tables(self._output_dirs[recipe]), asset
