"""Encoding as an Indexed Job, with real workers at a substitute for the API server."""

import shutil
import threading
import time
from typing import Any

import pytest
from dagster import DagsterExecutionInterruptedError

from pipeline.errors import LaunchError
from pipeline.vae_latents.stage import cache_latents
from tests.launchers.steps import encode, in_step

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from launchers.kubernetes import KubernetesLauncher
from tests.launchers.kubernetes_api import Server, api, stop_during_creation

__all__ = ["api"]  # fixtures


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


def test_a_job_whose_creation_was_not_answered_is_followed_and_deleted(cache: Any, api: Server) -> None:
    api.image_is_broken, api.num_lost_answers = True, 1
    messages, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert "0/1" in str(error)
    (name,) = api.jobs
    assert f"created the Kubernetes job default/{name}" in messages
    assert api.deleted == [f"jobs/{name}"]


def test_R12_a_stop_while_the_job_is_created_deletes_it(cache: Any, api: Server) -> None:
    api.pending, api.after = {0}, stop_during_creation
    _, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert isinstance(error, DagsterExecutionInterruptedError)
    (name,) = api.jobs
    assert api.deleted == [f"jobs/{name}"]


def test_a_deletion_that_fails_is_a_warning_and_the_error_of_the_encoding_stays(
    cache: Any, api: Server
) -> None:
    api.image_is_broken, api.forbidden = True, {"DELETE"}
    messages, error = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    assert "0/1" in str(error)
    (name,) = api.jobs
    (warning,) = [message for message in messages if "could not be deleted" in message]
    assert warning.endswith(f"delete it: kubectl --namespace default delete job {name}")


def test_pods_that_do_not_start_are_logged_with_their_reason(cache: Any, api: Server) -> None:
    api.pending = {0}

    def start_pods() -> None:
        while not any(request.startswith("GET") and "/pods" in request for request in api.requests):
            time.sleep(0.05)
        api.image_is_broken, api.pending = True, set()

    starter = threading.Thread(target=start_pods)
    starter.start()
    messages, _ = in_step(KubernetesLauncher(image="x"), lambda launch: encode(cache, launch))
    starter.join()
    (name,) = api.jobs
    assert any(message.startswith(f"1 pod of {name} waiting: ErrImagePull") for message in messages)


def test_the_log_of_a_failed_pod_is_quoted(cache: Any, api: Server) -> None:
    api.image_is_broken = True
    launcher = KubernetesLauncher(image="x", workers=1)
    _, error = in_step(launcher, lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert "0/1" in error.what
    assert "-0-" in error.where
    assert ": no module pipeline in this image" in error.where
    assert api.deleted == [f"jobs/{name}" for name in api.jobs]
