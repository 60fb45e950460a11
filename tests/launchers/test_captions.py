"""Captions of pods, which have the cache, the images and the model's folder in common with the step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.captions.stage import caption_images
from pipeline.storage.tables import Tables
from tests.in_process_worker import InProcessLaunch
from tests.launchers.steps import in_step
from tests.pipeline.captions.conftest import Captioned, captioned, captioner

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from launchers.kubernetes import KubernetesLauncher
from tests.launchers.kubernetes_api import Server, api

__all__ = ["api", "captioned", "captioner"]  # fixtures


@pytest.mark.clusters
def test_two_pods_write_the_captions_of_a_local_run(captioned: Captioned, api: Server) -> None:
    recipe = captioned.recipe()
    raw, tables = captioned.raw(recipe), Tables(recipe.output_dir)

    def caption(launch: Any) -> Any:
        return caption_images(recipe, raw, tables, launch=launch, log=lambda _: None)

    expected = caption(InProcessLaunch()).table.select("sample_id", "key", "caption", "num_tokens")
    assert isinstance(recipe.cache_dir, Path)
    shutil.rmtree(recipe.cache_dir)

    results: list[Any] = []
    launcher = KubernetesLauncher(image="x", workers=2)
    messages, error = in_step(launcher, lambda launch: results.append(caption(launch)))
    assert error is None
    assert "3 entries for 2 workers" in "\n".join(messages)
    assert results[0].report["encoded"] == 3
    assert results[0].table.select(*expected.columns).equals(expected)
    assert api.deleted == list(api.jobs)
