"""The step of a stage: what it reads and writes, its code version, and the order of its work."""

import hashlib
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
from assets.definition_metadata import TABLE_FORMAT, asset_tags, definition_metadata
from assets.location import Location
from assets.names import asset_key
from pipeline.log import Log
from pipeline.recipe import Recipe
from pipeline.storage.addresses import Url
from pipeline.storage.needed_columns import ALL_INPUTS
from pipeline.storage.table_columns import OPTIONAL_ASSETS
from pipeline.versions import (
    CAPTIONER_VERSION,
    CAPTIONS_VERSION,
    DIAGNOSIS_VERSION,
    FEATURES_VERSION,
    LOOK_VERSION,
    PICTURES_VERSION,
    PREPROCESSING_VERSION,
    TRAINING_VERSION,
)
from resources.failures import errors_as_failures
from resources.run_worker import end_with_code_server, has_machine, record_machine
from resources.step_log import run_log
from resources.step_names import step_name
from resources.tables import ASSET, RECIPE

if TYPE_CHECKING:
    from pipeline.reporting.findings import CheckContext, Finding

_RECIPE_FIELDS: dict[str, dict[str, Any]] = {
    "raw_images": {"datasets": True, "checks": {"max_image_pixels", "max_file_bytes"}},
    "validated_dataset": {
        "datasets": True,
        "checks": {"max_image_pixels", "max_file_bytes", "max_decode_bytes", "near_duplicate_bits"},
    },
    "aspect_buckets": {"buckets": True, "model": True},
    "vae_latents": {"latents": True, "model": True},
    # The prompts of previews are encoded too, and default previews use the empty caption.
    "text_embeddings": {"text": True, "model": True, "training": {"sample_prompts", "sample_every"}},
    "trained_lora": {
        **dict.fromkeys(("training", "accelerate", "text", "model", "datasets"), True),
        "buckets": {"underfilled"},
    },
    "captions": {"datasets": True, "latents": {"background"}, "checks": {"max_file_bytes"}},
    "diagnosis": {"diagnosis": True, "model": True, "accelerate": {"mixed_precision"}},
    "evaluation": {"evaluation": True},
    "sweep": {
        **dict.fromkeys(("sweep", "evaluation", "training", "accelerate", "text", "model", "datasets"), True),
        "buckets": True,
        "latents": True,
    },
}
"""Recipe sections, or keys of a section, that decide each asset's content in addition to its inputs."""

_READS_SHARDS = ("captions", "validated_dataset", "vae_latents", "text_embeddings")
"""Assets other than raw_images that read images or captions, which may be in shards."""

_WITHOUT_CONTEXT = ("aspect_buckets", "vae_latents", "text_embeddings")
"""Assets that read the base model, but never its context LoRA."""

_NOT_SCANNED: dict[str, Any] = {
    **dict.fromkeys(("limit", "duplicates", "validation_fraction"), True),
    **dict.fromkeys(("repeats", "weight", "role", "slider", "loss_weight"), True),
    **dict.fromkeys(("resolution", "resolutions", "flip", "caption_dropout"), True),
    "captions": {
        "model",
        "revision",
        "prompt",
        "max_tokens",
        "resolution",
        "dtype",
        "quantize",
        "examples",
        "tagger",
    },
}
"""Keys of datasets that later stages use, and that do not decide which files raw_images lists."""

ALGORITHM_VERSIONS: dict[str, tuple[object, ...]] = {
    "validated_dataset": (PREPROCESSING_VERSION, LOOK_VERSION, CAPTIONS_VERSION),
    "vae_latents": (PREPROCESSING_VERSION,),
    "trained_lora": (TRAINING_VERSION,),
    "captions": (CAPTIONER_VERSION, PREPROCESSING_VERSION),
    "diagnosis": (DIAGNOSIS_VERSION,),
    "evaluation": (PICTURES_VERSION, FEATURES_VERSION),
    "sweep": (TRAINING_VERSION, PICTURES_VERSION, FEATURES_VERSION),
}
"""Versions of the algorithms that decide each asset's content."""

_DATASET_FIELDS = {
    "aspect_buckets": {"resolution", "resolutions"},
    "vae_latents": {"flip"},
    "text_embeddings": {"caption_dropout"},
}
"""Keys of datasets that decide an asset in place of its own section."""

_SEEN_BY_TEXT_ENCODER: tuple[dict[str, Any], tuple[object, ...]] = (
    {"latents": {"background"}},
    (PREPROCESSING_VERSION,),
)
"""Further recipe fields and versions that decide text_embeddings if a text encoder may see references."""


_LAST_OF_A_JOB = {"vae_latents", "text_embeddings", "trained_lora", *OPTIONAL_ASSETS} - {"captions"}
"""Stages after which the page is written; after the first ones, more stages follow within seconds."""


def stage_asset(  # noqa: PLR0913 - arguments of Dagster's decorator
    recipe: Recipe,
    asset: str,
    location: Location,
    *,
    description: str,
    kinds: set[str],
    inputs: Mapping[str, str] = MappingProxyType({}),
    deps: Sequence[AssetKey] = (),
    launches: bool = False,
    pool: str | None = None,
) -> Callable[[Callable[..., Any]], AssetsDefinition]:
    """Return the `multi_asset` decorator for a stage: the asset `<recipe>/<asset>` and all of its checks.

    Args:
        recipe: The recipe.
        asset: Name of the stage.
        location: The code location.
        description: Text in the UI.
        kinds: Kinds in the UI; all assets are tables too.
        inputs: Tables that the function reads, by the names of its parameters.
        deps: Assets before this one that it does not read as tables.
        launches: Whether the function uses the launcher.
        pool: Pool in which the step needs a place before it starts.
    """
    spec = AssetSpec(
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


def code_version(recipe: Recipe, asset: str) -> str:
    """Return 12 hex digits over the recipe fields and algorithm versions that decide the asset's content."""
    fields, versions = _RECIPE_FIELDS[asset], ALGORITHM_VERSIONS.get(asset, ())
    # The base model, which is not read here, decides whether its text encoder sees references. So every
    # recipe with references counts.
    if asset == "text_embeddings" and _has_references(recipe):
        more_fields, more_versions = _SEEN_BY_TEXT_ENCODER
        fields, versions = fields | more_fields, versions + more_versions
    # Absent in recipes without such a key, so that their assets stay in sync.
    own = _DATASET_FIELDS.get(asset, set[str]())
    if any(getattr(each, key) not in (None, ()) for each in recipe.datasets for key in own):
        fields = {**fields, "datasets": {"__all__": own}}
    unused: dict[str, Any] = {"datasets": {"__all__": _NOT_SCANNED}} if asset == "raw_images" else {}
    if recipe.model.context_lora is None or asset in _WITHOUT_CONTEXT:
        unused = {**unused, "model": {"context_lora"}}
    settings = recipe.model_dump_json(include=fields, exclude=unused) + repr(versions)
    return hashlib.sha256(settings.encode("utf-8")).hexdigest()[:12]


def _has_references(recipe: Recipe) -> bool:
    return any(each.references for each in (*recipe.datasets, *recipe.training.sample_prompts))


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
