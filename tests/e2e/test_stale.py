"""The assets that the UI marks as stale, by data versions and code versions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import AssetKey, AssetSelection, DagsterInstance, RepositoryDefinition
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from tests.e2e.workspace import Workspace

CACHED = ("raw_images", "validated_dataset", "aspect_buckets", "vae_latents", "text_embeddings")


class History:
    """Materializations of one workspace, and the stale assets that follow."""

    def __init__(self, workspace: Workspace, instance: DagsterInstance) -> None:
        self.workspace = workspace
        self.instance = instance

    def repository(self) -> RepositoryDefinition:
        return self.workspace.definitions().get_repository_def()

    def materialize(self, *assets: str) -> None:
        """Materialize only these assets, with their checks."""
        keys = [AssetKey(["small", name]) for name in assets]
        assert self.workspace.select(AssetSelection.assets(*keys), self.instance).success

    def stale(self) -> dict[str, list[str]]:
        """Return the reasons for each stale asset."""
        graph = self.repository().asset_graph
        resolver = CachingStaleStatusResolver(self.instance, graph, LoadingContextForTest(self.instance))
        keys = {name: AssetKey(["small", name]) for name in CACHED}
        return {
            name: [cause.reason for cause in resolver.get_stale_causes(key)]
            for name, key in keys.items()
            if resolver.get_status(key) != StaleStatus.FRESH
        }


@pytest.fixture
def history(cached) -> Iterator[History]:
    with DagsterInstance.ephemeral() as instance:
        history = History(cached, instance)
        history.materialize(*CACHED)
        assert history.stale() == {}
        yield history


def test_a_changed_setting_or_caption_makes_the_assets_it_decides_stale(history: History) -> None:
    history.workspace.recipe(latents={"dtype": "float32"})
    assert history.stale() == {"vae_latents": ["has a new code version"]}
    history.workspace.recipe()

    (history.workspace.data / "photo0.txt").write_text("a photograph of a dog", encoding="utf-8")
    history.materialize("raw_images", "validated_dataset")
    assert set(history.stale()) == {"aspect_buckets", "text_embeddings"}
    history.materialize("aspect_buckets")
    assert set(history.stale()) == {"text_embeddings"}, "buckets and latents do not depend on captions"


@pytest.mark.slow
def test_changed_pixels_make_downstream_assets_stale(history: History) -> None:
    data: Path = history.workspace.data
    shutil.copy(data / "photo1.png", data / "photo0.png")
    history.materialize("raw_images")
    assert {"validated_dataset"} <= set(history.stale()) <= set(CACHED) - {"raw_images"}
