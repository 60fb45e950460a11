"""Encoding as an Indexed Job, with real workers at a substitute for the API server."""

import shutil
from typing import Any

import pytest
from dagster import AssetExecutionContext, DagsterInstance, asset, materialize

from pipeline.errors import LaunchError
from pipeline.recipe import AccelerateSettings
from pipeline.vae_latents.stage import cache_latents
from resources.launchers.local import AccelerateLauncher
from tests.pipeline.cache_case import cache, entry_bytes

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from resources.launchers.kubernetes import KubernetesLauncher
from tests.kubernetes_api import Server, api

__all__ = ["api", "cache", "entry_bytes"]  # fixtures


def in_step(launcher: Any, project: Any) -> tuple[Any, list[str]]:
    """Encode in a step; return the report or the error, and the messages in Dagster's log."""
    outcomes: list[Any] = []

    @asset
    def step(context: AssetExecutionContext, launcher: AccelerateLauncher) -> None:
        launch = launcher.bind(context, AccelerateSettings())
        buckets, tables = project.buckets(), project.tables
        try:
            outcomes.append(cache_latents(project.recipe, buckets, tables, launch=launch, log=str).report)
        except Exception as err:
            outcomes.append(err)

    with DagsterInstance.ephemeral() as instance:
        result = materialize([step], resources={"launcher": launcher}, instance=instance)
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    return outcomes[0], messages


def test_a_manifest_that_the_server_rejects_is_an_error_with_its_message(cache: Any, api: Server) -> None:
    error, _ = in_step(KubernetesLauncher(image="x", pod={"nodeSelectr": {}}), cache)
    assert isinstance(error, LaunchError)
    assert "nodeSelectr" in error.what
    assert "launcher.pod" in error.fix
    assert api.jobs == {}


@pytest.mark.slow
def test_two_pods_write_the_bytes_of_a_local_run_and_the_job_is_deleted(
    cache: Any, api: Server, entry_bytes: Any, in_process_launch: Any
) -> None:
    cache_latents(cache.recipe, cache.buckets(), cache.tables, launch=in_process_launch, log=str)
    expected = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    shutil.rmtree(cache.recipe.output_dir)

    report, messages = in_step(KubernetesLauncher(image="x", workers=2), cache)
    assert report["encoded"] == 5
    assert entry_bytes() == expected
    assert "created the Kubernetes job default/latentline-" in "\n".join(messages)
    assert api.deleted == [f"jobs/{name}" for name in api.jobs]


def test_the_log_of_a_failed_pod_is_quoted(cache: Any, api: Server) -> None:
    api.image_is_broken = True
    error, _ = in_step(KubernetesLauncher(image="x", workers=1), cache)
    assert isinstance(error, LaunchError)
    assert "0/1" in error.what
    assert "-0-" in error.where
    assert ": no module pipeline in this image" in error.where
    assert api.deleted == [f"jobs/{name}" for name in api.jobs]
