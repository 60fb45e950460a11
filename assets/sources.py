"""Source assets: datasets and models, which no run writes. They connect the recipes that read them.

The sensors of the recipes observe them, and so does *Observe* in the UI. If an observation has another data
version than the previous one, Dagster marks the assets after it as unsynced.
"""

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dagster import (
    AssetKey,
    AssetObservation,
    AssetsDefinition,
    AssetSpec,
    BetaWarning,
    DagsterInstance,
    DataVersion,
    MetadataValue,
    ObserveResult,
    multi_observable_source_asset,
)

from assets.names import asset_key
from pipeline.escaping import without_secrets
from pipeline.models.diffusers_folder import INDEX_NAMES
from pipeline.recipe import Recipe, in_project, project_root
from pipeline.recipe.schema import RESERVED_NAMES
from pipeline.storage.addresses import Address, Url
from resources.failures import errors_as_failures

SOURCES_GROUP = "sources"
"""Group of all source assets."""

DATASETS_PREFIX, MODELS_PREFIX = RESERVED_NAMES
"""First part of the keys of each kind of source."""

# Undocumented: `AssetObservation` has no other field for a data version.
DATA_VERSION_TAG = "dagster/data_version"
"""Tag by which Dagster recognises the data version of an observation."""

_DATASET = "Files of a dataset, its masks or its references, which several recipes may share. Never modified."
_MODEL = "Base model or captioning model, which several recipes may share."


class SourceModel(NamedTuple):
    """A model that recipes read.

    Attributes:
        source: Folder of the project, or Hub id.
        revision: Branch, tag or commit of the Hub id.
        index_names: Files by which its snapshot on this machine is found; it has at least one of them.
    """

    source: str
    revision: str | None
    index_names: tuple[str, ...]

    @property
    def key(self) -> AssetKey:
        """Return the key of its source asset."""
        # A folder of the project and a Hub id have the same form, and a folder may be on a disk that is away.
        # The key must not depend on whether it exists.
        if self.revision is None:
            return AssetKey([MODELS_PREFIX, *_parts(in_project(self.source))])
        *owner, name = (_valid(part) for part in self.source.split("/") if part)
        pinned = f"{name}_{_valid(self.revision)}_{_digest(f'{self.source}@{self.revision}')}"
        return AssetKey([MODELS_PREFIX, *owner, pinned])

    def version(self) -> str | None:
        """Return a text that changes with its files on this machine; None if it is not on it."""
        from pipeline.models.resolve import cached_commit
        from pipeline.raw_images.scan_fingerprint import scan_fingerprint

        folder = in_project(self.source)
        if self.revision is None and folder.is_dir():
            return scan_fingerprint([folder])
        return cached_commit(self.source, self.revision, index_names=self.index_names)


def watched_addresses(recipe: Recipe) -> list[Address]:
    """Return every folder and manifest that shows changes of the datasets and their side inputs."""
    addresses = [
        path
        for dataset in recipe.datasets
        for path in (
            (recipe.packed[dataset.name],) if dataset.name in recipe.packed else (dataset.root, dataset.path)
        )
    ]
    side_inputs = [each.settings.path for dataset in recipe.datasets for each in dataset.side_inputs]
    return list(dict.fromkeys([*addresses, *(path for path in side_inputs if path is not None)]))


def example_images(recipe: Recipe) -> list[Address]:
    """Return the images that captioning models get as examples, which may be outside of the datasets."""
    examples = [each for dataset in recipe.datasets for each in dataset.captions.examples]
    return list(dict.fromkeys(in_project(each.image) for each in examples if each.image is not None))


def dataset_key(address: Address) -> AssetKey:
    """Return the key of the source asset of a folder, a manifest or an address."""
    return AssetKey([DATASETS_PREFIX, *_parts(address)])


def dataset_keys(recipe: Recipe) -> list[AssetKey]:
    """Return the keys of the source assets that the recipe's raw_images reads."""
    return list(dict.fromkeys(dataset_key(address) for address in watched_addresses(recipe)))


def base_model(recipe: Recipe) -> SourceModel:
    """Return the recipe's base model."""
    return SourceModel(recipe.model.base, recipe.model.revision, INDEX_NAMES)


def captioning_models(recipe: Recipe) -> list[SourceModel]:
    """Return the distinct models that caption images of the recipe."""
    settings = [each.captions for each in recipe.datasets if each.captions.from_ == "model"]
    return list(
        dict.fromkeys(
            # The files of a tagger are these two: model.onnx and selected_tags.csv.
            SourceModel(each.model, each.revision, ("config.json" if each.tagger is None else "model.onnx",))
            for each in settings
            if each.model is not None
        )
    )


def source_assets(recipes: Sequence[Recipe]) -> list[AssetsDefinition]:
    """Return one source asset for each distinct dataset and model of the recipes."""
    addresses: dict[AssetKey, Address] = {}
    models: dict[AssetKey, SourceModel] = {}
    for recipe in recipes:
        addresses |= {dataset_key(address): address for address in watched_addresses(recipe)}
        for model in (base_model(recipe), *captioning_models(recipe)):
            models.setdefault(model.key, model)

    return [
        *(_dataset_asset(key, address) for key, address in addresses.items()),
        *(_model_asset(key, model) for key, model in models.items()),
    ]


def start_dependency(recipe: Recipe, recipes: Sequence[Recipe]) -> AssetKey | None:
    """Return the trained_lora of the recipe that has written `start_from`, or None."""
    origin = _start_recipe(recipe, recipes)
    names: list[str] = []
    each = origin
    while each is not None and each.name not in names:
        names.append(each.name)
        each = _start_recipe(each, recipes)

    # Recipes may start from each other's LoRAs in turn, but a graph has no cycles.
    if origin is None or recipe.name in names:
        return None
    return asset_key(origin, "trained_lora")


def _start_recipe(recipe: Recipe, recipes: Sequence[Recipe]) -> Recipe | None:
    start = recipe.training.lora.start_from
    if start is None:
        return None
    return next((each for each in recipes if start.is_relative_to(each.output_dir)), None)


def _dataset_asset(key: AssetKey, address: Address) -> AssetsDefinition:
    def version() -> str:
        from pipeline.raw_images.scan_fingerprint import scan_fingerprint

        return scan_fingerprint([address])

    uri = without_secrets(address) if isinstance(address, Url) else address.as_uri()
    kind = address.protocol.lower() if isinstance(address, Url) else "file"
    return _observable(key, version, description=_DATASET, kind=kind, metadata={"dagster/uri": uri})


def _model_asset(key: AssetKey, model: SourceModel) -> AssetsDefinition:
    metadata = {"source": MetadataValue.text(without_secrets(model.source))}
    return _observable(key, model.version, description=_MODEL, kind="huggingface", metadata=metadata)


def _observable(
    key: AssetKey,
    version: Callable[[], str | None],
    *,
    description: str,
    kind: str,
    metadata: Mapping[str, object],
) -> AssetsDefinition:
    name = f"observe_{hashlib.sha256(key.to_user_string().encode('utf-8')).hexdigest()[:12]}"
    spec = AssetSpec(key, description=description, group_name=SOURCES_GROUP, kinds={kind}, metadata=metadata)

    def observe() -> Iterator[ObserveResult]:
        with errors_as_failures():
            current = version()
        if current is not None:
            yield ObserveResult(asset_key=key, data_version=DataVersion(current))

    with warnings.catch_warnings():
        # Dagster calls all of its decorators for observable assets a beta.
        warnings.simplefilter("ignore", BetaWarning)
        # Only with `can_subset` may the function yield nothing, for a model that is not on this machine.
        return multi_observable_source_asset(name=name, specs=[spec], can_subset=True)(observe)


def new_observations(
    instance: DagsterInstance, versions: Mapping[AssetKey, str], last: Mapping[str, str]
) -> list[AssetObservation]:
    """Return an observation for each source with a version that differs from its latest observation.

    Args:
        instance: Has the observations.
        versions: Versions of the sources now.
        last: Versions that this sensor has seen in its last tick, by `AssetKey.to_user_string`.
    """
    observations: list[AssetObservation] = []
    for key, version in versions.items():
        # Sensors of two code locations may have different folders under one key. Each reports its own
        # changes; otherwise they would replace each other's observations without end.
        if last.get(key.to_user_string()) == version:
            continue
        # Several recipes may watch one folder, so a sensor's own cursor does not know the latest.
        latest = instance.fetch_observations(key, limit=1).records
        observed = latest[0].asset_observation if latest else None
        if observed is None or observed.tags.get(DATA_VERSION_TAG) != version:
            observations.append(AssetObservation(key, tags={DATA_VERSION_TAG: version}))
    return observations


def _parts(address: Address) -> list[str]:
    """Return the path of an address below the project, or its last name and a hash."""
    if not isinstance(address, Url):
        root = project_root()
        path = Path(address)
        if path != root and path.is_relative_to(root):
            inside = path.relative_to(root)
            *folders, name = map(_valid, inside.parts)
            # Names that differ only in other characters would have one key.
            is_exact = (*folders, name) == inside.parts
            return [*folders, name if is_exact else f"{name}_{_digest(inside.as_posix())}"]
    return [f"{_valid(address.name) or 'root'}_{_digest(str(address))}"]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:6]


def _valid(text: str) -> str:
    # Of a key, Dagster makes the name of an input, in which it replaces `.` and `-` and nothing else.
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)
