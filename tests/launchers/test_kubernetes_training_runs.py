"""A training in two pods: real processes of `latentline train` at a substitute for the API server."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.errors import LaunchError
from pipeline.processes.launch import TRAINING_MODULE, LocalLaunch
from pipeline.trained_lora.job import TrainingJob
from tests.launchers.steps import in_step, when_steps_are_done
from tests.pipeline.trained_lora.conftest import make_project, one_thread, tiny_bases
from tests.pipeline.trained_lora.equal_runs import assert_equal_runs
from tests.pipeline.trained_lora.runs import steps_kept

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from launchers.kubernetes import KubernetesLauncher
from tests.launchers.kubernetes_api import Server, api

__all__ = ["api", "make_project", "one_thread", "tiny_bases"]  # fixtures

STEPS = 4


def launcher_of(job: TrainingJob, **settings: Any) -> KubernetesLauncher:
    """Return a launcher of two pods, whose volume contains the project."""
    folder = str(job.recipe.output_dir.parent)
    mounts = [{"name": "project", "mountPath": folder}]
    pod = {
        "volumes": [{"name": "project", "hostPath": {"path": folder}}],
        "containers": [{"volumeMounts": mounts, "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
    }
    return KubernetesLauncher(**{"image": "x", "machines": 2, "pod": pod, "wait_s": 900, **settings})


def train_in_step(launcher: KubernetesLauncher, job: TrainingJob) -> tuple[list[str], BaseException | None]:
    """Train in a step; return the messages in Dagster's log, and the error."""
    return in_step(launcher, lambda launch: launch(TRAINING_MODULE, job.write()), job.recipe.accelerate)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_pods_train_the_lora_of_two_processes_on_one_machine(
    make_project: Callable[..., Any], api: Server
) -> None:
    project = make_project(steps=STEPS, gradient_accumulation=1)
    alone = project.changed("one_machine", num_processes=2).job()
    LocalLaunch(alone.recipe.accelerate)(TRAINING_MODULE, alone.write())

    job = project.changed("two_pods", num_processes=2).job()
    messages, error = train_in_step(launcher_of(job), job)
    assert error is None, messages
    assert_equal_runs(job, alone, STEPS)
    (name,) = api.jobs
    assert sorted(api.deleted) == [f"jobs/{name}", f"services/{name}"]
    text = "\n".join(messages)
    assert f"created the Kubernetes job default/{name}" in text
    assert "2 of 2 pods have started" in text
    assert "machine 0 of 2" in text
    assert "machine 1 of 2" not in text, "the log of pod 0 only"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_stopped_run_and_one_that_lost_a_pod_resume_to_the_same_lora(
    make_project: Callable[..., Any], api: Server
) -> None:
    steps = 60
    project = make_project(steps=steps, gradient_accumulation=1)
    alone = project.changed("one_machine", num_processes=2).job()
    LocalLaunch(alone.recipe.accelerate)(TRAINING_MODULE, alone.write())
    job = project.changed("two_pods", num_processes=2).job()

    # A stopped step deletes its job. The log of pod 0 is shown until its end, and the checkpoint is complete.
    when_steps_are_done(job, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    messages, error = train_in_step(launcher_of(job), job)
    assert error is not None, messages
    assert not isinstance(error, LaunchError), error
    (name,) = api.jobs
    assert sorted(api.deleted) == [f"jobs/{name}", f"services/{name}"]
    assert api.pods() == [], "the step waits for the end of its pods"
    stopped_step = steps_kept(job)[-1]
    assert 3 <= stopped_step < steps
    text = "\n".join(messages)
    assert "its pods have 50 s to end" in text
    assert f"after {stopped_step} of {steps} steps; a checkpoint is saved" in text

    # A lost pod ends the training; the error names a pod and how to resume.
    when_steps_are_done(
        job, stopped_step + 3, lambda: next(pod for pod in api.pods() if pod.index == 1).kill()
    )
    messages, error = train_in_step(launcher_of(job), job)
    assert isinstance(error, LaunchError), messages
    assert f"pod {name}-" in error.what
    assert "the run resumes from its last checkpoint" in error.fix
    assert f"resuming from the checkpoint of step {stopped_step}" in "\n".join(messages)

    messages, error = train_in_step(launcher_of(job), job)
    assert error is None, messages
    assert_equal_runs(job, alone, steps)
