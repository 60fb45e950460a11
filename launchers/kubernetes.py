"""Encoding as an Indexed Job of Kubernetes with one pod per shard, training as one with `machines` pods."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dagster import AssetExecutionContext
from pydantic import Field

from launchers.kubernetes_client import POLL_S, KubernetesClient, condition_of, not_deleted
from launchers.kubernetes_manifests import TrainingPods, encoding_job, require_shared_folder
from launchers.kubernetes_training import PodTraining, reason_to_wait
from launchers.remote import RemoteLauncher
from pipeline.encoding.shared_encoding import SharedEncoding
from pipeline.errors import LaunchError, counted
from pipeline.processes.launch import OUTPUT_TAIL_LINES
from pipeline.processes.machines import Machines
from pipeline.recipe.deployment import WAIT_S
from resources.local_launcher import Observer
from resources.process_output import uninterrupted
from resources.step_log import StepLog

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

_MAX_NAMED_PODS = 5


class KubernetesLauncher(RemoteLauncher):
    """Starts encoding and training as Indexed Jobs."""

    namespace: str = Field(default="default", description="Namespace in which the pods are created.")
    image: str = Field(description="Image with this version of Latentline.")
    machines: int = Field(
        default=0, ge=0, description="Number of pods of a training; 0 trains in the process of the step."
    )
    wait_s: int = Field(
        default=WAIT_S, ge=1, description="Longest wait for all pods of a training to start, in seconds."
    )
    pod: dict[str, Any] = Field(
        default_factory=dict, description="Keys merged into the specification of each pod."
    )

    def encode(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        encoding: SharedEncoding,
        num_shards: int,
    ) -> Sequence[str]:
        """See `RemoteLauncher.encode`. An interruption of the wait deletes the job and its pods.

        Raises:
            LaunchError: The cluster cannot be reached, or rejects the job.
        """
        job = encoding_job(encoding, num_shards, image=self.image, pod=self.pod)
        name = cast("str", job["metadata"]["name"])
        kubernetes, log = KubernetesClient(self.namespace), StepLog(context)

        is_created, shown = False, ""
        try:
            # A signal waits for the server's answer, which states whether there is a job to delete.
            with uninterrupted():
                is_created = kubernetes.create_job(job) is not None
            if not is_created:
                what = f"a Kubernetes job {name} exists already"
                raise LaunchError(what, where=f"namespace {self.namespace}", fix="delete it with kubectl")
            log.info(f"created the Kubernetes job {self.namespace}/{name}")

            while not _has_ended(kubernetes.read_job(name)):
                waiting = _waiting_pods(kubernetes, name)
                if waiting != shown:
                    log.info(waiting or "all pods have started")
                    shown = waiting
                time.sleep(POLL_S)
            return _last_output(kubernetes, name)
        finally:
            # A failure must not hide the error or the result of the encoding.
            with uninterrupted():
                try:
                    if is_created:
                        kubernetes.delete_job(name)
                except LaunchError as err:
                    log.warning(not_deleted(self.namespace, name, err))

    def train(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        job_file: Path,
        observer: Observer | None,
    ) -> None:
        """See `RemoteLauncher.train`; without `machines`, on the machine of the step.

        Raises:
            LaunchError: The pods cannot share the processes or the folders of the training, the cluster
                cannot be reached or rejects the job, or a pod failed.
        """
        if self.machines == 0:
            super().train(context, settings, job_file, observer)
            return

        Machines(self.machines).num_processes_here(settings)
        self._require_shared_folders(job_file)
        training = PodTraining(KubernetesClient(self.namespace), context, self.pods_of_training(job_file))
        training.run((lambda _final: None) if observer is None else observer(job_file))

    def pods_of_training(self, job_file: Path) -> TrainingPods:
        """Return the pods of a training, of which none exists yet."""
        return TrainingPods(
            job_file, self.machines, self.image, self.pod, wait_s=self.wait_s, grace_s=self.grace_s
        )

    def _require_shared_folders(self, job_file: Path) -> None:
        """Raise LaunchError if the pods cannot see the folder of the run or the cache."""
        from pipeline.trained_lora.job import read_recipe_and_prompts

        require_shared_folder(self.pod, job_file.parent, "the folder of the run", written=True)
        cache_dir = read_recipe_and_prompts(job_file)[0].cache_dir
        if isinstance(cache_dir, Path):
            require_shared_folder(self.pod, cache_dir, "the cache", written=False)


def _has_ended(job: Any) -> bool:
    return job is None or condition_of(job, "Complete", "Failed") is not None


def _waiting_pods(kubernetes: KubernetesClient, job: str) -> str:
    """Return how many pods have not started and the reason of the first one, or nothing."""
    reasons = [reason for pod in kubernetes.pods_of(job) if (reason := reason_to_wait(pod)) is not None]
    return f"{counted(len(reasons), 'pod')} of {job} waiting: {reasons[0]}" if reasons else ""


def _last_output(kubernetes: KubernetesClient, job: str) -> list[str]:
    """Return the last lines of the failed pods."""
    failed = [pod for pod in kubernetes.pods_of(job) if pod.status.phase == "Failed"]
    lines: list[str] = []
    for pod in failed[:_MAX_NAMED_PODS]:
        lines += [f"{pod.metadata.name}: {line}" for line in kubernetes.last_lines(pod, 4)]
    return lines[-OUTPUT_TAIL_LINES:]
