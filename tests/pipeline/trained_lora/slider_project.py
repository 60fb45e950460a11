"""A project whose images are pairs of a slider."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import polars as pl

from tests.pipeline.trained_lora.project import write_tables

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

SLIDER: dict[str, dict[str, Any]] = {"bright": {"slider": 1}, "dark": {"slider": -1}}


def slider_project(make_project: Callable[..., Project], **settings: Any) -> Project:
    """Return a project with the datasets `bright` and `dark`, whose images are pairs if their number is even.

    `settings` are arguments of `make_project`. Their datasets are changes of these two, or further ones.
    """
    datasets = {name: dict(values) for name, values in SLIDER.items()}
    for name, values in settings.pop("datasets", {}).items():
        datasets[name] = {**datasets.get(name, {}), **values}
    project = make_project(datasets=datasets, **settings)

    # `make_project` numbers the images across datasets.
    number = pl.col("path").str.extract(r"-(\d+)\.", 1).cast(pl.Int64) // len(datasets)
    path = pl.format("{}-{}.jpg", pl.col("path").str.extract(r"^(\w+)-"), number)
    named = {"path": path, "sample_id": pl.format("{}/{}", "dataset", path)}
    project.latents = project.latents.with_columns(**named).sort("sample_id", "bucket")
    project.text = project.text.with_columns(**named).sort("sample_id", "variant")
    write_tables(project)
    return project
