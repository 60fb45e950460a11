"""Read the datasets of a recipe that are on the Hugging Face Hub at one commit in all stages.

The scan looks the commits up and stores them in its report. Later stages read the same commits, so a push
while a job runs cannot mix two versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.reporting.reports import read_report
from pipeline.storage.addresses import Address, Url
from pipeline.storage.hub_revision import at_commit
from pipeline.storage.remote_source import unreadable_error

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe

COMMITS = "commits"
"""Key of the report of raw_images: addresses at a commit by the address in the recipe."""


def current_commits(recipe: Recipe) -> dict[str, str]:
    """Return the address at its current commit of each address of the datasets on the Hub.

    Raises:
        DatasetError: A repository cannot be read.
    """
    known: dict[str, str] = {}
    commits: dict[str, str] = {}
    for address in dict.fromkeys(each for dataset in recipe.datasets for each in _addresses(dataset)):
        try:
            pinned = at_commit(address, known)
        except Exception as err:
            raise unreadable_error(address, err) from err
        if pinned != address:
            commits[str(address)] = str(pinned)
    return commits


def at_scanned_commits(recipe: Recipe) -> Recipe:
    """Return the recipe with its datasets on the Hub at the commits of the last scan."""
    if not any(_is_on_hub(each) for dataset in recipe.datasets for each in _addresses(dataset)):
        return recipe
    report = read_report(recipe.output_dir, "raw_images") or {}
    return with_commits(recipe, report.get(COMMITS, {}))


def with_commits(recipe: Recipe, commits: Mapping[str, str]) -> Recipe:
    """Return the recipe with the addresses that `current_commits` has returned."""
    if not commits:
        return recipe
    return recipe.model_copy(update={"datasets": tuple(_pinned(each, commits) for each in recipe.datasets)})


def _addresses(dataset: DatasetSettings) -> list[Address]:
    others = [dataset.images, *(each.settings.path for each in dataset.side_inputs)]
    return [dataset.path, *(each for each in others if each is not None)]


def _is_on_hub(address: Address) -> bool:
    return isinstance(address, Url) and Url(address.links[-1]).protocol == "hf"


def _pinned(dataset: DatasetSettings, commits: Mapping[str, str]) -> DatasetSettings:
    def moved(section: Any, *keys: str) -> Any:
        values = {key: commits.get(str(getattr(section, key))) for key in keys}
        return section.model_copy(update={key: Url(value) for key, value in values.items() if value})

    side_inputs = {
        "mask": dataset.mask and moved(dataset.mask, "path"),
        "references": tuple(moved(each, "path") for each in dataset.references),
    }
    return moved(dataset, "path", "images").model_copy(update=side_inputs)
