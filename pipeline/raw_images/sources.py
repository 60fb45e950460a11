"""Open the sources of a recipe's datasets, masks and references with the limits of the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.storage.remote_source import RemoteSource, source_at
from pipeline.storage.source import LocalSource

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe
    from pipeline.storage.addresses import Address


def source_of(settings: DatasetSettings, *, max_file_bytes: int) -> LocalSource | RemoteSource:
    """Return the source of a dataset's files.

    Raises:
        DatasetError: Its URL cannot be opened.
    """
    return source_at(settings.root, max_file_bytes=max_file_bytes, follow_links=settings.follow_links)


def sources_of(recipe: Recipe) -> dict[str, LocalSource | RemoteSource]:
    """Return the source of each dataset by the dataset's name.

    Raises:
        DatasetError: A URL cannot be opened.
    """
    limit = recipe.checks.max_file_bytes
    return {settings.name: source_of(settings, max_file_bytes=limit) for settings in recipe.datasets}


def mask_root(settings: DatasetSettings) -> Address:
    """Return the folder that the paths of a dataset's masks are relative to."""
    assert settings.mask is not None
    return settings.root if settings.mask.path is None else settings.mask.path


def mask_sources_of(recipe: Recipe) -> dict[str, LocalSource | RemoteSource]:
    """Return the source of the masks of each dataset that has masks, by the dataset's name.

    Raises:
        DatasetError: A URL cannot be opened.
    """
    limit = recipe.checks.max_file_bytes
    return {
        settings.name: source_at(mask_root(settings), max_file_bytes=limit)
        for settings in recipe.datasets
        if settings.mask is not None
    }


def reference_sources_of(recipe: Recipe) -> dict[str, list[LocalSource | RemoteSource]]:
    """Return the source of each reference, in order, of each dataset that has references, by its name.

    Raises:
        DatasetError: A URL cannot be opened.
    """
    limit = recipe.checks.max_file_bytes
    return {
        settings.name: [source_at(root, max_file_bytes=limit) for root in settings.reference_roots]
        for settings in recipe.datasets
        if settings.references
    }
