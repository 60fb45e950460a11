"""A training in pods: what is refused, and the errors of pods that do not start or fail."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetExecutionContext,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    asset,
    materialize,
)

from pipeline.errors import LaunchError, ModelError
from pipeline.recipe import AccelerateSettings
from resources.local_launcher import AccelerateLauncher

pytest.importorskip("kubernetes", reason="needs the extra [k8s]")

from kubernetes import client

from launchers.kubernetes import KubernetesLauncher
from launchers.kubernetes_client import KubernetesClient
from launchers.kubernetes_training import pod_error
from tests.launchers.kubernetes_api import Server, api, stop_during_creation
from tests.launchers.steps import in_step

__all__ = ["api"]  # fixture

TRAINING = "pipeline.trained_lora.worker"


def launcher_of(folder: Path, **settings: Any) -> KubernetesLauncher:
    pod = {
        "volumes": [{"name": "shared", "hostPath": {"path": str(folder)}}],
        "containers": [{"volumeMounts": [{"name": "shared", "mountPath": str(folder)}]}],
    }
    return KubernetesLauncher(**{"image": "x", "machines": 2, "pod": pod, **settings})


def messages_of(launcher: KubernetesLauncher, job_file: Path) -> list[str]:
    """Train in a step, which must succeed; return the messages in Dagster's log."""
    errors, messages = _train(launcher, job_file)
    assert errors == []
    return messages


def error_of(launcher: KubernetesLauncher, job_file: Path) -> tuple[Exception, list[str]]:
    """Train in a step, which must fail; return its error and the messages in Dagster's log."""
    (error,), messages = _train(launcher, job_file)
    return error, messages


def _train(launcher: KubernetesLauncher, job_file: Path) -> tuple[list[Exception], list[str]]:
    errors: list[Exception] = []

    @asset
    def step(context: AssetExecutionContext, launcher: AccelerateLauncher) -> None:
        try:
            launcher.bind(context, AccelerateSettings(num_processes=2))(TRAINING, job_file)
        except Exception as err:
            errors.append(err)

    with DagsterInstance.ephemeral() as instance:
        result = materialize([step], resources={"launcher": launcher}, instance=instance)
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    return errors, messages


def test_processes_that_the_pods_cannot_share_are_refused_before_anything_is_created(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    error, _ = error_of(launcher_of(tmp_path, machines=3), job_file)
    assert isinstance(error, LaunchError)
    assert "divisible by the number of machines, got 2 on 3 machines" in error.what
    assert api.requests == []


def test_pods_without_the_folder_of_the_run_or_the_cache_are_refused_before_anything_is_created(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    error, _ = error_of(launcher_of(tmp_path, pod={}), job_file)
    assert isinstance(error, LaunchError)
    assert "no volume of launcher.pod contains the folder of the run" in error.what
    assert error.where == str(job_file.parent)

    error, _ = error_of(launcher_of(tmp_path / "output"), job_file)
    assert isinstance(error, LaunchError)
    assert "no volume of launcher.pod contains the cache" in error.what
    assert api.requests == []


def test_a_pod_that_does_not_start_in_time_is_an_error_with_its_reason(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    api.pending = {0, 1}
    error, messages = error_of(launcher_of(tmp_path, wait_s=1), job_file)
    assert isinstance(error, LaunchError)
    (name,) = api.jobs
    assert error.what == "only 0 of 2 pods have started within 1 s"
    assert f"{name}-0: ErrImagePull" in error.where
    assert f"{name}-1: ErrImagePull" in error.where
    assert "launcher.wait_s" in error.fix
    assert "0 of 2 pods have started; " in "\n".join(messages)
    assert sorted(api.deleted) == [f"jobs/{name}", f"services/{name}"]


def test_a_manifest_that_the_server_rejects_is_an_error_and_leaves_nothing(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    launcher = launcher_of(tmp_path)
    error, _ = error_of(launcher_of(tmp_path, pod={**launcher.pod, "nodeSelectr": {}}), job_file)
    assert isinstance(error, LaunchError)
    assert "nodeSelectr" in error.what
    assert (api.jobs, api.services) == ({}, {})


def test_a_pod_without_latentline_is_an_error_with_its_output_and_the_next_attempt_may_start(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    api.image_is_broken = True
    for _ in range(2):
        error, _ = error_of(launcher_of(tmp_path), job_file)
        assert isinstance(error, LaunchError)
        assert "ended with exit status 1" in error.what
        assert "no module pipeline in this image" in error.where
        assert "on node node-" in error.where
        assert "start the job again" in error.fix
    assert api.services == {}


def test_a_job_that_an_earlier_attempt_left_running_is_an_error_with_the_command_to_stop_it(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    launcher = launcher_of(tmp_path)
    api.pending = {0, 1}
    earlier = launcher.pods_of_training(job_file)
    KubernetesClient("default").create_job(earlier.job())
    error, _ = error_of(launcher, job_file)
    assert isinstance(error, LaunchError)
    assert f"the Kubernetes job {earlier.name} of an earlier attempt at this run still exists" in error.what
    assert error.fix.endswith(f"kubectl --namespace default delete job {earlier.name}")
    assert api.deleted == []

    # A job that has ended, which a killed step could not delete, is replaced.
    api.image_is_broken, api.pending = True, set()
    error, messages = error_of(launcher, job_file)
    while "earlier attempt" in str(error):
        error, messages = error_of(launcher, job_file)
    assert "ended with exit status 1" in str(error)
    assert "of an earlier attempt" in "\n".join(messages)


def failed_pod(**status: Any) -> Any:
    """Return a pod as the client's classes describe it."""
    metadata = client.V1ObjectMeta(name="job-1-abcde")
    spec = client.V1PodSpec(containers=[], node_name="node-7")
    return client.V1Pod(metadata=metadata, spec=spec, status=client.V1PodStatus(phase="Failed", **status))


def ended(exit_code: int, reason: str = "Error") -> list[Any]:
    state = client.V1ContainerState(
        terminated=client.V1ContainerStateTerminated(exit_code=exit_code, reason=reason)
    )
    return [
        client.V1ContainerStatus(
            name="latentline", image="x", image_id="x", ready=False, restart_count=0, state=state
        )
    ]


def test_the_error_of_a_worker_becomes_that_of_the_step_with_its_pod() -> None:
    worker = ModelError("the base model is missing", where="/models/sdxl\nmachine 1", fix="mount it")
    output = ["loading", *f"ModelError: {worker.text()}".splitlines()]
    error = pod_error(failed_pod(container_statuses=ended(1)), output, place="namespace a, job job")
    assert isinstance(error, LaunchError)
    assert error.what == "ModelError in pod job-1-abcde: the base model is missing"
    assert error.where == ("namespace a, job job, pod job-1-abcde on node node-7\n/models/sdxl\nmachine 1")
    assert error.fix == "mount it; start the job again: the run resumes from its last checkpoint"


@pytest.mark.parametrize(
    ("status", "what", "fix"),
    [
        ({"container_statuses": ended(137, "OOMKilled")}, "needed more memory than its limit", "resources"),
        ({"container_statuses": ended(137)}, "pod job-1-abcde ended by signal SIGKILL", "correct the cause"),
        ({"container_statuses": ended(3)}, "pod job-1-abcde ended with exit status 3", "correct the cause"),
        ({"reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory", "start the job again"),
        ({}, "pod job-1-abcde failed", "correct the cause"),
    ],
)
def test_a_pod_that_ended_without_an_error_is_explained_by_its_status(
    status: dict[str, Any], what: str, fix: str
) -> None:
    error = pod_error(failed_pod(**status), ["a line", ""], place="namespace a, job job")
    assert what in error.what
    assert error.where.endswith("pod job-1-abcde on node node-7, last output:\na line")
    assert fix in error.fix
    assert "the run resumes from its last checkpoint" in error.fix


def test_the_error_of_latentline_train_in_a_pod_is_that_of_the_step(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    (tmp_path / "cache").rmdir()
    error, _ = error_of(launcher_of(tmp_path), job_file)
    assert isinstance(error, LaunchError)
    assert error.what.startswith(f"TrainingError in pod {next(iter(api.jobs))}-")
    assert error.what.endswith(": the cache of the training does not exist on this machine")
    assert error.where.endswith(f"\n{tmp_path / 'cache'}")
    assert error.fix.startswith("use the same path on all machines")
    assert error.fix.endswith("the run resumes from its last checkpoint")


PROGRAM = """
import os, signal, sys, time
from pathlib import Path

def stop(number, frame):
    time.sleep(1)
    (folder / f"checkpoint-{index}").touch()
    print("stopped; a checkpoint is saved", flush=True)
    sys.exit(143)

index, folder, kind = os.environ["JOB_COMPLETION_INDEX"], Path(sys.argv[2]).parent, "KIND"
signal.signal(signal.SIGTERM, stop)
print(f"pod {index} trains: {sys.argv[3:]}", flush=True)
(folder / f"started-{index}").touch()
if kind == "error" and index == "1":
    while not (folder / "started-0").exists():
        time.sleep(0.05)
    print("StoreError: an entry is missing\\n  where: a.safetensors\\n  fix:   encode it", flush=True)
    sys.exit(1)
if kind != "done":
    time.sleep(600)
"""
"""Stands for `latentline train`: writes a checkpoint when it is stopped."""


def when_all_pods_train(job_file: Path, act: Any) -> None:
    """Call `act` in a thread when both pods train."""

    def wait() -> None:
        while len(list(job_file.parent.glob("started-*"))) < 2:
            time.sleep(0.05)
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_the_log_of_pod_0_is_in_that_of_the_step_although_the_server_fails_for_a_while(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    api.program = PROGRAM.replace("KIND", "done")
    when_all_pods_train(job_file, lambda: setattr(api, "num_failing_requests", 2))
    messages = messages_of(launcher_of(tmp_path, wait_s=70), job_file)
    (name,) = api.jobs
    first = [message for message in messages if message.startswith("pod ")]
    assert len(first) == 1
    assert first[0].startswith("pod 0 trains: ['--machines', '2', '--master', '127.0.0.1:")
    assert first[0].endswith("'--wait', '70', '--grace', '20']")
    assert "2 of 2 pods have started" in messages
    assert api.deleted == [f"jobs/{name}", f"services/{name}"]


def test_the_error_of_a_failed_pod_ends_the_step_after_the_others_wrote_their_checkpoint(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    api.program = PROGRAM.replace("KIND", "error")
    error, _ = error_of(launcher_of(tmp_path), job_file)
    assert isinstance(error, LaunchError)
    (name,) = api.jobs
    assert error.what.startswith(f"StoreError in pod {name}-1-")
    assert error.what.endswith(": an entry is missing")
    assert error.where.startswith(f"namespace default, job {name}, pod {name}-1-")
    assert error.where.endswith("on node node-1\na.safetensors")
    assert error.fix == "encode it; start the job again: the run resumes from its last checkpoint"
    assert (job_file.parent / "checkpoint-0").exists()
    assert api.deleted == [f"jobs/{name}", f"services/{name}"]


def test_a_pod_that_is_killed_is_named(job_file: Path, tmp_path: Path, api: Server) -> None:
    api.program = PROGRAM.replace("KIND", "long")
    when_all_pods_train(job_file, lambda: [pod.kill() for pod in api.pods() if pod.index == 1])
    error, _ = error_of(launcher_of(tmp_path), job_file)
    assert isinstance(error, LaunchError)
    (name,) = api.jobs
    assert error.what.startswith(f"pod {name}-1-")
    assert error.what.endswith("ended by signal SIGKILL")


def test_a_stopped_step_waits_for_the_checkpoints_of_its_pods(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    api.program = PROGRAM.replace("KIND", "long")
    when_all_pods_train(job_file, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(DagsterExecutionInterruptedError):
        messages_of(launcher_of(tmp_path), job_file)
    (name,) = api.jobs
    assert sorted(file.name for file in job_file.parent.glob("checkpoint-*")) == [
        "checkpoint-0",
        "checkpoint-1",
    ]
    assert api.pods() == []
    assert api.deleted == [f"jobs/{name}", f"services/{name}"]


@pytest.mark.parametrize("exists", [False, True])
def test_R12_a_stop_while_the_job_is_created_deletes_it_but_not_that_of_an_earlier_attempt(
    job_file: Path, tmp_path: Path, api: Server, exists: bool
) -> None:
    launcher = launcher_of(tmp_path)
    api.pending = {0, 1}
    job = launcher.pods_of_training(job_file).job()
    if exists:
        KubernetesClient("default").create_job(job)
    api.after = stop_during_creation
    with pytest.raises(DagsterExecutionInterruptedError):
        messages_of(launcher, job_file)
    (name,) = api.jobs
    assert name == job["metadata"]["name"]
    assert api.deleted == ([] if exists else [f"jobs/{name}"])


def test_a_step_that_is_stopped_without_the_event_log_deletes_its_pods(
    job_file: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, api: Server
) -> None:
    api.program = PROGRAM.replace("KIND", "long")
    when_all_pods_train(job_file, lambda: os.kill(os.getpid(), signal.SIGINT))
    _, error = in_step(
        launcher_of(tmp_path),
        lambda launch: launch(TRAINING, job_file),
        AccelerateSettings(num_processes=2),
        refusing=tmp_path_factory.mktemp("dagster"),
    )
    assert isinstance(error, DagsterExecutionInterruptedError)
    (name,) = api.jobs
    assert sorted(file.name for file in job_file.parent.glob("checkpoint-*")) == [
        "checkpoint-0",
        "checkpoint-1",
    ]
    assert api.deleted == [f"jobs/{name}", f"services/{name}"]


def test_a_job_that_someone_deletes_is_an_error_that_says_so(
    job_file: Path, tmp_path: Path, api: Server
) -> None:
    api.program = PROGRAM.replace("KIND", "long")
    when_all_pods_train(job_file, lambda: KubernetesClient("default").delete_job(next(iter(api.jobs))))
    error, _ = error_of(launcher_of(tmp_path), job_file)
    assert isinstance(error, LaunchError)
    assert error.what == f"the Kubernetes job {next(iter(api.jobs))} was deleted while it was running"
    assert "the run resumes from its last checkpoint" in error.fix
    assert api.services == {}
