"""The asset of a stage: what it declares to Dagster, and the order of the work in its step."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetIn,
    AssetKey,
    AssetsDefinition,
    AssetSpec,
    MaterializeResult,
    multi_asset,
)

from assets.checks import check_results, check_specs, path_conflict, path_isolation_results
from assets.code_version import code_version
from assets.definition_metadata import TABLE_FORMAT, asset_tags, definition_metadata
from assets.location import Location
from assets.names import asset_key
from pipeline.log import Log
from pipeline.recipe import Recipe
from pipeline.storage.addresses import Url
from pipeline.storage.needed_columns import ALL_INPUTS
from pipeline.storage.table_columns import OPTIONAL_ASSETS
from resources.failures import errors_as_failures
from resources.run_worker import end_with_code_server, has_machine, record_machine
from resources.step_log import run_log
from resources.step_names import step_name
from resources.tables import ASSET, RECIPE

if TYPE_CHECKING:
    from pipeline.reporting.findings import CheckContext, Finding

_READS_SHARDS = ("captions", "validated_dataset", "vae_latents", "text_embeddings", "evaluation")
"""Assets other than raw_images that read images or captions, which may be in shards."""

_LAST_OF_A_JOB = {"vae_latents", "text_embeddings", "trained_lora", *OPTIONAL_ASSETS} - {"captions"}
"""Stages after which the page is written; after the first ones, more stages follow within seconds."""


def stage_spec(
    recipe: Recipe, asset: str, description: str, *, kinds: set[str], deps: Sequence[AssetKey] = ()
) -> AssetSpec:
    """Return what the UI shows of the asset `<recipe>/<asset>`.

    Args:
        recipe: The recipe.
        asset: Name of the stage.
        description: What the asset is.
        kinds: Kinds in the UI, besides the format of all tables.
        deps: Assets before this one whose tables it does not read.
    """
    return AssetSpec(
        asset_key(recipe, asset),
        deps=[*(asset_key(recipe, each) for each in ALL_INPUTS[asset]), *deps],
        description=description,
        # A run may select the asset's checks without the asset, which `@asset` does not support.
        skippable=True,
        group_name=recipe.name,
        code_version=code_version(recipe, asset),
        kinds={*kinds, TABLE_FORMAT},
        metadata={RECIPE: recipe.name, ASSET: asset, **definition_metadata(recipe, asset)},
        tags=asset_tags(recipe),  # pyright: ignore[reportArgumentType] - a frozen model is hashable
        owners=recipe.owners,
    )


def stage_asset(
    recipe: Recipe,
    location: Location,
    spec: AssetSpec,
    *,
    inputs: Mapping[str, str] = MappingProxyType({}),
    launches: bool = False,
    pool: str | None = None,
) -> Callable[[Callable[..., Any]], AssetsDefinition]:
    """Return the `multi_asset` decorator for a stage: its asset and all of its checks.

    Args:
        recipe: The recipe.
        location: The code location.
        spec: The asset, as `stage_spec` returns it.
        inputs: Tables that the function reads, by the names of its parameters.
        launches: Whether the function uses the launcher.
        pool: Pool in which the step needs a place before it starts.
    """
    asset = str(spec.metadata[ASSET])
    return multi_asset(
        name=step_name(recipe.name, asset),
        # For the IO manager, which reads only the columns that this step needs. Dagster refuses metadata of
        # an `AssetIn` that is also a dependency of an `AssetSpec`, and `specs` require the dependency.
        op_tags={ASSET: asset},
        specs=[spec.with_io_manager_key(location.tables)],
        ins={name: AssetIn(asset_key(recipe, table)) for name, table in inputs.items()},
        check_specs=check_specs(recipe, asset),
        can_subset=True,
        required_resource_keys={location.launcher} if launches else set(),
        pool=pool,
    )


def run_step(
    context: AssetExecutionContext,
    recipe: Recipe,
    asset: str,
    materialize: Callable[[], MaterializeResult[Any]],
    run_checks: Callable[["CheckContext"], Sequence["Finding"]],
) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
    """Materialize `asset` and run its checks, as far as they are selected.

    Raises:
        Failure: A path is not isolated, the stage has failed, or a gate has closed.
    """
    from pipeline.outputs.folder import outputs_of
    from pipeline.outputs.stage_files import stage_files

    # The executor of the recipes' jobs has done both, but a step may have a process of its own, and a project
    # with components executes hand-selected assets with its own executor.
    end_with_code_server()
    if not has_machine(context.run):
        record_machine(context.instance, context.run.run_id)
    log, is_selected = run_log(context), bool(context.selected_asset_keys)
    with errors_as_failures(recipe=recipe.name, retries=True, log=log):
        # Before anything is written, such as the files that are fetched from an address.
        conflict = path_conflict(context.run.run_id, recipe)  # pyright: ignore[reportArgumentType] - a frozen model is hashable
        if conflict is not None:
            yield from path_isolation_results(context, conflict)
            raise conflict
        with (
            stage_files(outputs_of(recipe, log), asset, checks_only=not is_selected, log=log),
            _page_written(recipe, asset, log=log),
        ):
            if is_selected:
                if recipe.packed and asset in _READS_SHARDS:
                    _unpack(recipe, asset, log)
                yield materialize()
            # Not earlier: the UI would name the materialization of the run before as the target of the check.
            yield from path_isolation_results(context, None)
            yield from check_results(context, recipe, asset, run_checks)


def _unpack(recipe: Recipe, asset: str, log: Log) -> None:
    from pipeline.raw_images.shards import unpack_shards

    # raw_images has unpacked them, but perhaps on another machine.
    unpack_shards(recipe, log=log, only_new=asset != "validated_dataset")


@contextmanager
def _page_written(recipe: Recipe, asset: str, *, log: Log) -> Generator[None]:
    """Write `reports/index.html` after a stage with which a job may end, and after one that fails."""
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        # A working copy of outputs at an address has the files of this stage alone.
        is_last = has_failed or asset in _LAST_OF_A_JOB
        if is_last and not isinstance(recipe.output_address, Url):
            _write_page(recipe, log)


def _write_page(recipe: Recipe, log: Log) -> None:
    from pipeline.page.static import page_path, write_page

    try:
        write_page(recipe)
    # A page that cannot be written must not fail the training.
    except Exception as err:
        log(f"warning: {page_path(recipe.output_dir)} was not written: {type(err).__name__}: {err}")
