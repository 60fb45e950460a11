"""What the UI marks as stale, asked as the UI asks: by data versions and code versions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import AssetKey, AssetSelection, DagsterInstance, RepositoryDefinition, materialize
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from assets.definitions import build_definitions
from pipeline.recipe import load_recipe

CACHED = ("raw_images", "validated_dataset", "aspect_buckets", "vae_latents", "text_embeddings")


class History:
    """Materializations of one workspace, and what follows from them."""

    def __init__(self, workspace, instance: DagsterInstance) -> None:
        self.workspace = workspace
        self.instance = instance

    def repository(self) -> RepositoryDefinition:
        return build_definitions([load_recipe(self.workspace.file)]).get_repository_def()

    def make(self, *assets: str) -> None:
        """Materialize only these, with the checks."""
        keys = [AssetKey(["small", name]) for name in assets]
        chosen = AssetSelection.assets(*keys)
        definitions = [*self.repository().asset_graph.assets_defs]
        assert materialize(definitions, selection=chosen, instance=self.instance).success

    def stale(self) -> dict[str, list[str]]:
        """The assets that are marked, and the reasons."""
        graph = self.repository().asset_graph
        asked = CachingStaleStatusResolver(self.instance, graph, LoadingContextForTest(self.instance))
        keys = {name: AssetKey(["small", name]) for name in CACHED}
        return {
            name: [cause.reason for cause in asked.get_stale_causes(key)]
            for name, key in keys.items()
            if asked.get_status(key) != StaleStatus.FRESH
        }


@pytest.fixture
def history(cached) -> Iterator[History]:
    with DagsterInstance.ephemeral() as instance:
        made = History(cached, instance)
        made.make(*CACHED)
        assert made.stale() == {}
        yield made


def test_making_the_same_again_leaves_everything_downstream_fresh(history: History) -> None:
    history.make("raw_images")
    assert history.stale() == {}
    touched = history.workspace.data / "photo0.png"
    touched.write_bytes(touched.read_bytes())
    history.make("raw_images", "validated_dataset")
    assert history.stale() == {}, "another time stamp is no other content"


def test_another_caption_makes_stale_what_is_made_of_it(history: History) -> None:
    (history.workspace.data / "photo0.txt").write_text("a photograph of a dog", encoding="utf-8")
    history.make("raw_images", "validated_dataset")
    assert set(history.stale()) == {"aspect_buckets", "text_embeddings"}
    history.make("aspect_buckets")
    assert set(history.stale()) == {"text_embeddings"}, "buckets know nothing of captions, nor do latents"


def test_another_setting_makes_stale_what_it_decides(history: History) -> None:
    history.workspace.recipe(latents={"dtype": "float32"})
    assert history.stale() == {"vae_latents": ["has a new code version"]}


def test_other_pixels_make_stale_what_is_made_of_them(history: History) -> None:
    data: Path = history.workspace.data
    shutil.copy(data / "photo1.png", data / "photo0.png")
    history.make("raw_images")
    assert {"validated_dataset"} <= set(history.stale()) <= set(CACHED) - {"raw_images"}
