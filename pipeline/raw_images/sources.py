"""Open the sources of a recipe's datasets and side inputs with the limits of the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.raw_images.commits import at_scanned_commits
from pipeline.storage.remote_source import RemoteSource, source_at
from pipeline.storage.source import LocalSource

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe


def source_of(settings: DatasetSettings, *, max_file_bytes: int) -> LocalSource | RemoteSource:
    """Return the source of a dataset's files.

    Raises:
        DatasetError: Its URL cannot be opened.
    """
    source = source_at(
        settings.root,
        max_file_bytes=max_file_bytes,
        follow_links=settings.follow_links,
        key=f"datasets[].{settings.root_key}",
    )
    return _inside_for_manifest(settings, source)


def sources_of(recipe: Recipe) -> dict[str, LocalSource | RemoteSource]:
    """Return the source of each dataset, at the commit of the last scan, by the dataset's name."""
    limit, datasets = recipe.checks.max_file_bytes, at_scanned_commits(recipe).datasets
    return {settings.name: source_of(settings, max_file_bytes=limit) for settings in datasets}


def side_input_sources_of(recipe: Recipe, kind: str) -> dict[str, list[LocalSource | RemoteSource]]:
    """Return the sources of one kind of side input by the name of the dataset, in the order of the recipe.

    Datasets without such side inputs are absent. `kind` is a key of `SIDE_INPUT_KEYS`.
    """
    limit = recipe.checks.max_file_bytes
    sources: dict[str, list[LocalSource | RemoteSource]] = {}
    for settings in at_scanned_commits(recipe).datasets:
        for section in settings.side_inputs:
            if section.kind == kind:
                key, folder = settings.folder_of(section)
                opened = source_at(folder, max_file_bytes=limit, key=key)
                if section.settings.path is None:
                    opened = _inside_for_manifest(settings, opened)
                sources.setdefault(settings.name, []).append(opened)
    return sources


def _inside_for_manifest(
    settings: DatasetSettings, source: LocalSource | RemoteSource
) -> LocalSource | RemoteSource:
    # The author of a manifest may not be the person who runs the job; see `walk_manifest`.
    if settings.is_manifest and isinstance(source, LocalSource):
        source.links_out = ()
    return source
