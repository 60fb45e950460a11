"""Encoding as an Indexed Job, with real workers at a substitute for the API server."""

import shutil
from typing import Any

import pytest

from pipeline.errors import LaunchError
from pipeline.vae_latents.stage import cache_latents
from tests.launcher_steps import encode, in_step
from tests.pipeline.cache_case import cache, entry_bytes

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from resources.launchers.kubernetes import KubernetesLauncher
from tests.kubernetes_api import Server, api

__all__ = ["api", "cache", "entry_bytes"]  # fixtures


def test_a_manifest_that_the_server_rejects_is_an_error_with_its_message(cache: Any, api: Server) -> None:
    launcher = KubernetesLauncher(image="x", pod={"nodeSelectr": {}})
    _, error = in_step(launcher, lambda launch: encode(cache, launch))
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

    reports: list[Any] = []
    launcher = KubernetesLauncher(image="x", workers=2)
    messages, error = in_step(launcher, lambda launch: reports.append(encode(cache, launch).report))
    assert error is None
    assert [report["encoded"] for report in reports] == [5]
    assert entry_bytes() == expected
    assert "created the Kubernetes job default/latentline-" in "\n".join(messages)
    assert api.deleted == [f"jobs/{name}" for name in api.jobs]


def test_the_log_of_a_failed_pod_is_quoted(cache: Any, api: Server) -> None:
    api.image_is_broken = True
    launcher = KubernetesLauncher(image="x", workers=1)
    _, error = in_step(launcher, lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert "0/1" in error.what
    assert "-0-" in error.where
    assert ": no module pipeline in this image" in error.where
    assert api.deleted == [f"jobs/{name}" for name in api.jobs]
