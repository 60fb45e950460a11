"""The table IO manager: it writes an asset's output as a Parquet file and reads inputs from such files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster import (
    ConfigurableIOManager,
    DagsterInvariantViolationError,
    InitResourceContext,
    InputContext,
    MetadataValue,
    OpDefinition,
    OutputContext,
    ResourceDependency,
)
from pydantic import PrivateAttr

from pipeline.escaping import without_secrets
from pipeline.outputs.stage_files import table_file
from pipeline.recipe import Recipe
from pipeline.storage.addresses import Address, Url
from pipeline.storage.needed_columns import needed_columns
from resources.failures import errors_as_failures

if TYPE_CHECKING:
    import polars as pl

    from pipeline.outputs.folder import OutputFolder
    from pipeline.storage.tables import Tables

RECIPE, ASSET = "latentline/recipe", "latentline/asset"
"""Keys of an asset's definition metadata: the names by which its table is found, whatever the asset's key is.

`ASSET` is also a tag of the asset's op, from which an input knows the columns that its reader needs.
"""


def file_metadata(address: Address, folder: Path, file: Path) -> MetadataValue[Any]:
    """Return a file below an output folder for the UI: by its address if the folder is a copy of one.

    The working copy may be on another machine, and a later run may have replaced it.
    """
    if isinstance(address, Url):
        return MetadataValue.url(without_secrets(f"{address}/{file.relative_to(folder).as_posix()}"))
    return MetadataValue.path(str(file))


class TableIOManager(ConfigurableIOManager):
    """Tables below each recipe's `output_dir/tables`, replaced atomically and checked against their schemas.

    If the folder is at an address, a table is uploaded when it has been written, and fetched before it is
    read.
    """

    # Not configuration: the recipes decide where their tables are.
    recipes: ResourceDependency[Sequence[Recipe]]
    _outputs: dict[str, Any] = PrivateAttr(default_factory=dict)

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """Open the output folders."""
        from pipeline.outputs.folder import outputs_of

        self._outputs = {recipe.name: outputs_of(recipe) for recipe in self.recipes}

    def handle_output(self, context: OutputContext, obj: "pl.DataFrame") -> None:
        """Replace the asset's table."""
        recipe, asset = _names(context)
        with errors_as_failures(recipe=recipe, retries=True):
            outputs = self._outputs[recipe]
            path = _tables(outputs).write(asset, obj)
            outputs.upload(table_file(asset))
            context.add_output_metadata(
                {
                    "table": file_metadata(outputs.address, outputs.folder, Path(path)),
                    "dagster/row_count": MetadataValue.int(obj.height),
                }
            )

    def load_input(self, context: InputContext) -> "pl.DataFrame":
        """Return the upstream asset's table; one of our assets gets only the columns that it needs."""
        op = _op(context)
        assert context.upstream_output is not None  # inputs of assets have one
        recipe, asset = _names(context.upstream_output)
        with errors_as_failures(recipe=recipe, retries=op is not None):
            outputs = self._outputs[recipe]
            outputs.fetch(table_file(asset))
            # The tag of one of our assets; None for ops of others.
            reader = None if op is None else op.tags.get(ASSET)
            return _tables(outputs).read(asset, None if reader is None else needed_columns(reader, asset))


def _names(output: OutputContext) -> tuple[str, str]:
    """Return the names of recipe and asset."""
    return str(output.definition_metadata[RECIPE]), str(output.definition_metadata[ASSET])


def _tables(outputs: "OutputFolder") -> "Tables":
    from pipeline.storage.tables import Tables

    return Tables(outputs.folder)


def _op(context: InputContext) -> OpDefinition | None:
    """Return the op that loads the input; None for `Definitions.load_asset_value`."""
    try:
        return context.op_def
    except DagsterInvariantViolationError:
        return None
