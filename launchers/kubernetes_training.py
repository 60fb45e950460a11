"""A training in pods: created, followed until its end, explained if it fails, and deleted in any case."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dagster import AssetExecutionContext

from launchers.kubernetes_client import (
    CONTAINER,
    DELETION_PATIENCE_S,
    KubernetesClient,
    condition_of,
    not_deleted,
    pod_index,
)
from launchers.kubernetes_log import FollowedLog
from launchers.kubernetes_manifests import TrainingPods
from launchers.remote import RESUME
from pipeline.errors import LaunchError
from pipeline.processes.launch import OUTPUT_TAIL_LINES, describe_status, error_in_output
from resources.process_output import uninterrupted
from resources.step_log import StepLog

POLL_S = 1.0

LAST_LINES_S = 10.0
"""Longest wait for the rest of the log of a pod that has ended."""

_NUM_LAST_LINES = 3 * OUTPUT_TAIL_LINES
"""Number of lines of a failed pod's log in which its error is looked for."""

_STOPPED_STATUS = 143
"""Exit status of a pod that Kubernetes stopped, for example because another one had failed."""


class PodTraining:
    """A training in the pods of an Indexed Job."""

    def __init__(
        self, kubernetes: KubernetesClient, context: AssetExecutionContext, training: TrainingPods
    ) -> None:
        """Create nothing.

        Args:
            kubernetes: Client of the namespace.
            context: Context of the step that waits; its log receives the output of pod 0.
            training: Pods of the training.
        """
        self._kubernetes, self._training = kubernetes, training
        self._log = StepLog(context)
        self._place = f"namespace {kubernetes.namespace}, job {training.name}"
        self._job: Any = None
        self._first_log: FollowedLog | None = None
        self._shown_state: str | None = None

    def run(self, observe: Callable[[bool], object]) -> None:
        """Create the job and its service, wait for the end of all pods, and delete both.

        An interruption of the wait (Dagster's stop, SIGINT, SIGTERM, an error) deletes them too, upon which
        the training writes a checkpoint.

        Args:
            observe: Called with False while the pods run, and once with True after they have ended.

        Raises:
            LaunchError: The cluster rejects the objects, a pod does not start, or a pod failed.
        """
        try:
            job = self._create()
            self._log.info(f"created the Kubernetes job {self._kubernetes.namespace}/{self._training.name}")
            self._kubernetes.create_service(self._training.service(job.metadata.uid))
            has_failed = self._wait(observe)
            self._finish_log()
            observe(True)
            if has_failed:
                raise self._failure()
        except BaseException as err:
            with uninterrupted():
                if self._job is not None:
                    self._delete_or_warn(because=type(err).__name__)
            raise
        with uninterrupted():
            self._delete_or_warn()

    def _create(self) -> Any:
        """Create the job; replace one that an earlier attempt left behind.

        Raises:
            LaunchError: The job of an earlier attempt is still running.
        """
        name = self._training.name
        if (job := self._try_to_create()) is not None:
            return job

        earlier = self._kubernetes.read_job(name)
        if earlier is None or condition_of(earlier, "Complete", "Failed") is not None:
            self._log.info(f"deleting the ended Kubernetes job {name} of an earlier attempt")
            self._delete()
            if (job := self._try_to_create()) is not None:
                return job
        raise LaunchError(
            f"the Kubernetes job {name} of an earlier attempt at this run still exists",
            where=self._place,
            fix="wait until it has ended and start the job again, or stop it: "
            f"kubectl --namespace {self._kubernetes.namespace} delete job {name}",
        )

    def _try_to_create(self) -> Any:
        """Create the job and return it; None if one of the same name exists.

        A signal waits for the server's answer, which states whether there is a job to delete.
        """
        with uninterrupted():
            self._job = self._kubernetes.create_job(self._training.job())
        return self._job

    def _wait(self, observe: Callable[[bool], object]) -> bool:
        """Wait until the job has ended, and return whether it failed."""
        name = self._training.name
        start_end_s = time.monotonic() + self._training.wait_s
        have_started = False
        while True:
            job = self._kubernetes.read_job(name)
            if job is None:
                what = f"the Kubernetes job {name} was deleted while it was running"
                raise LaunchError(what, where=self._place, fix=RESUME)
            if condition_of(job, "Complete", "Failed") is not None:
                return condition_of(job, "Failed") is not None

            pods = self._kubernetes.pods_of(name)
            self._show_log(pods)
            if not have_started:
                waiting = self._waiting(pods)
                have_started = not waiting
                if waiting and time.monotonic() > start_end_s:
                    raise self._late(waiting)
            observe(False)
            time.sleep(POLL_S)

    def _waiting(self, pods: Sequence[Any]) -> list[str]:
        """Return what each pod waits for that has not started, and log changes."""
        number = self._training.number
        found = {pod_index(pod): pod for pod in pods}
        waiting = [
            f"{self._training.name}-{index}: {reason}"
            for index in range(number)
            if (reason := reason_to_wait(found.get(index))) is not None
        ]
        if (state := "; ".join(waiting)) != self._shown_state:
            self._shown_state = state
            self._log.info(
                f"{number - len(waiting)} of {number} pods have started" + (f"; {state}" if state else "")
            )
        return waiting

    def _late(self, waiting: Sequence[str]) -> LaunchError:
        number = self._training.number
        return LaunchError(
            f"only {number - len(waiting)} of {number} pods have started within {self._training.wait_s} s",
            where="\n".join([self._place, *waiting]),
            fix="free or add nodes with the requested resources, or correct launcher.image and launcher.pod; "
            "launcher.wait_s in the deployment file sets how long a step waits",
        )

    def _show_log(self, pods: Sequence[Any]) -> None:
        """Log the new lines of pod 0, from its start on."""
        if self._first_log is None:
            first = next((pod for pod in pods if pod_index(pod) == 0), None)
            if first is None or reason_to_wait(first) is not None:
                return
            self._first_log = FollowedLog(self._kubernetes, first.metadata.name)
        for line in self._first_log.new_lines():
            self._log.info(line)

    def _finish_log(self) -> None:
        """Log the remaining lines of pod 0, which may have started and ended since the last look."""
        if self._first_log is None:
            self._show_log(self._kubernetes.pods_of(self._training.name))
        if self._first_log is not None:
            self._first_log.finish(LAST_LINES_S)
            self._show_log(())

    def _failure(self) -> LaunchError:
        """Return the error of the pod that failed first."""
        pods = [pod for pod in self._kubernetes.pods_of(self._training.name) if pod.status.phase == "Failed"]
        if not pods:
            # The pods of a lost node are deleted.
            job = self._kubernetes.read_job(self._training.name)
            condition = None if job is None else condition_of(job, "Failed")
            reason = "" if condition is None else f": {condition.reason}, {condition.message}"
            what = f"the Kubernetes job {self._training.name} failed{reason}"
            return LaunchError(what, where=self._place, fix=RESUME)
        pod = min(pods, key=_cause_first)
        return pod_error(pod, self._kubernetes.last_lines(pod, _NUM_LAST_LINES), place=self._place)

    def _delete_or_warn(self, *, because: str = "") -> None:
        """Delete job and service; a failure must not hide the error or the result of the training."""
        try:
            self._delete(because=because)
        except LaunchError as err:
            self._log.warning(not_deleted(self._kubernetes.namespace, self._training.name, err))

    def _delete(self, *, because: str = "") -> None:
        """Delete job and service, and wait until the pods have ended, which may write a checkpoint.

        Args:
            because: Kind of the error that ended the wait for the pods, or nothing.
        """
        name, seconds = self._training.name, self._training.termination_s
        self._kubernetes.delete_job(name)
        if because:
            self._log.info(
                f"deleting the Kubernetes job {name} ({because}); its pods have {seconds} s to end"
            )

        end_s = time.monotonic() + seconds + LAST_LINES_S
        while self._kubernetes.read_job(name, patience_s=DELETION_PATIENCE_S) is not None:
            if time.monotonic() > end_s:
                self._log.warning(
                    f"the Kubernetes job {name} still exists, although it was deleted {seconds} s ago"
                )
                break
            self._show_log(())
            time.sleep(POLL_S)

        # Until then, the pods find each other through the service.
        self._kubernetes.delete_service(name)
        if self._first_log is not None:
            self._first_log.finish(LAST_LINES_S)
            self._show_log(())


def pod_error(pod: Any, output: Sequence[str], *, place: str) -> LaunchError:
    """Return the error of a failed pod.

    Args:
        pod: The pod.
        output: Last lines of its log. If they contain an error of `latentline`, its parts are quoted.
        place: Namespace and job.
    """
    name = pod.metadata.name
    place = f"{place}, pod {name} on node {pod.spec.node_name or '(none)'}"
    if (error := error_in_output(output)) is not None:
        what = f"{type(error).__name__} in pod {name}: {error.what}"
        return LaunchError(what, where=f"{place}\n{error.where}", fix=f"{error.fix}; {RESUME}")

    lines = [line for line in output if line.strip()][-OUTPUT_TAIL_LINES:]
    where = "\n".join([f"{place}, last output:", *(lines or ["(none)"])])
    state = _terminated(pod)
    if pod.status.reason:
        # The node ended the pod, for example because its memory or disk was full.
        reason = ": ".join(part for part in (pod.status.reason, pod.status.message) if part)
        what = f"pod {name} was ended by Kubernetes: {reason}"
        return LaunchError(what, where=where, fix=RESUME)
    if state is not None and state.reason == "OOMKilled":
        what = f"pod {name} was killed because it needed more memory than its limit"
        fix = "raise `resources` of the container in launcher.pod, or lower batch_size; then " + RESUME
        return LaunchError(what, where=where, fix=fix)
    ending = "failed" if state is None else f"ended {describe_status(state.exit_code)}"
    return LaunchError(f"pod {name} {ending}", where=where, fix=f"correct the cause in the output; {RESUME}")


def _terminated(pod: Any) -> Any:
    """Return how the container of a pod ended, or None."""
    statuses = pod.status.container_statuses or []
    own = next((each for each in statuses if each.name == CONTAINER), None)
    return None if own is None else own.state.terminated


def _cause_first(pod: Any) -> tuple[bool, float, int]:
    """Return a key by which the pod that failed first precedes those that were stopped because of it."""
    state = _terminated(pod)
    if state is None:
        return True, 0.0, pod_index(pod)
    finished_s = state.finished_at.timestamp() if state.finished_at is not None else float("inf")
    return state.exit_code == _STOPPED_STATUS, finished_s, pod_index(pod)


def reason_to_wait(pod: Any) -> str | None:
    """Return why a pod has not started, or None if it has."""
    if pod is None:
        return "the pod does not exist yet"
    if pod.status.phase != "Pending":
        return None
    for status in pod.status.container_statuses or ():
        if status.state is not None and (waiting := status.state.waiting) is not None:
            return ": ".join(part for part in (waiting.reason, waiting.message) if part)
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return ": ".join(part for part in (condition.reason, condition.message) if part)
    return "the pod is pending"
