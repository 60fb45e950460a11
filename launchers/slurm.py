"""Encoding as a job array of Slurm, and training as a job of several nodes.

`.ci/clusters` tests it with Debian's Slurm 22.05.8 and two nodes on one machine, see
tests/launchers/slurm_cluster.py. Not tested: GPUs, several machines, accounting with sacct.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster import AssetExecutionContext
from pydantic import Field

from launchers.remote import RemoteLauncher
from launchers.slurm_job import answer, job_error, job_id_in, read_job_end
from pipeline.encoding.shared_encoding import SharedEncoding
from pipeline.errors import LaunchError
from pipeline.processes.launch import (
    ERROR_FILE_VARIABLE,
    OUTPUT_TAIL_LINES,
    PARENT_VARIABLE,
    describe_status,
    launch_environment,
)
from pipeline.processes.machines import Machines
from pipeline.processes.thread_stop import pause
from resources.local_launcher import Observer
from resources.process_output import ForwardedOutput, uninterrupted
from resources.step_log import StepLog, step_log

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

POLL_S = 0.5

KILL_WAIT_S = 30.0
"""Slurm's default of the time between SIGTERM and SIGKILL for a cancelled job (`KillWait`)."""

QUEUE_S = 30.0
"""Seconds between two requests for the reason why a job is pending."""

HELD_BY_USER = "JobHeldUser"
HELD_BY_ADMINISTRATOR = "JobHeldAdmin"
"""Slurm's reasons for a job that waits until its user, or only an administrator, releases it."""

# For the threads that read the next batches, and for the threads that write checkpoints and logs.
LOADER_CPUS = 2
"""CPUs of each training process in addition to `accelerate.cpu_threads`."""

CPU_OPTIONS = ("-c", "--cpus-per-task", "--cpus-per-gpu", "--exclusive")
"""Options of `sbatch` with which a user chooses the CPUs of a node."""

_TRAINING_STEP = (
    # If the processes of one node end, all other processes have a minute to end by themselves: machine 0 may
    # be writing a checkpoint.
    "srun --kill-on-bad-exit=0 --wait=60 "
    # Since Slurm 22.05, srun does not take this option over from sbatch.
    "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} "
)


class SlurmLauncher(RemoteLauncher):
    """Starts encoding as a job array and training as a job of several nodes."""

    options: list[str] = Field(
        default_factory=list, description="Options of `sbatch` for each job, such as --partition=gpu."
    )
    scratch: str = Field(description="Folder on a disk that all nodes share, for the output of jobs.")

    def encode(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        encoding: SharedEncoding,
        num_shards: int,
    ) -> Sequence[str]:
        """See `RemoteLauncher.encode`."""
        folder = self._job_folder(encoding.encoding_id)
        job = _Job(
            name=f"latentline-{encoding.encoding_id}",
            options=[*self.options, f"--array=0-{num_shards - 1}", f"--output={_in_pattern(folder)}/%a.txt"],
            # Without --shard: the command reads its index from Slurm's variable.
            script=shlex.join([sys.executable, "-m", "pipeline.cli", "encode", str(encoding.address)]),
            outputs=[ForwardedOutput(folder / f"{index}.txt") for index in range(num_shards)],
            submission=ForwardedOutput(folder / "sbatch.txt"),
        )

        status = job.run(context, settings, grace_s=self.grace_s)
        last_output = job.last_output()
        if status == 0:
            shutil.rmtree(folder)
        return last_output

    def train(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        job_file: Path,
        observer: Observer | None,
    ) -> None:
        """See `RemoteLauncher.train`; `srun` starts one task on each node."""
        cpus = self.cpu_options(settings)
        # The folder of a failed attempt stays, so that each attempt needs another one.
        folder = self._job_folder(f"{job_file.parent.name}-{uuid.uuid4().hex[:8]}")
        command = [sys.executable, "-m", "pipeline.cli", "train", str(job_file)]
        command += ["--grace", f"{self.grace_s:g}"]
        output = ForwardedOutput(folder / "output.txt")
        nodes = [f"--nodes={self.machines}", "--ntasks-per-node=1"]
        job = _Job(
            name=f"latentline-{folder.name}",
            # Of equal options, Slurm uses the last one.
            options=[*cpus, *self.options, *nodes, f"--output={_in_pattern(output.file)}"],
            script=_TRAINING_STEP + shlex.join(command),
            outputs=[output],
            submission=ForwardedOutput(folder / "sbatch.txt"),
        )

        observe = None if observer is None else observer(job_file)
        status = job.run(context, settings, grace_s=self.grace_s, observe=observe)
        if status != 0:
            job_id = job_id_in(job.submission.lines())
            assert job_id is not None, "a job without id was rejected, which is another error"
            raise job_error(read_job_end(job_id, status), job.name, output.lines())
        shutil.rmtree(folder)

    def cpu_options(self, settings: AccelerateSettings) -> list[str]:
        """Return the option for the CPUs of a node of a training; none if `options` choose them.

        Raises:
            LaunchError: The processes cannot be divided among the machines.
        """
        num_processes = Machines(self.machines).num_processes_here(settings)
        if any(option.partition("=")[0] in CPU_OPTIONS or option[:2] == "-c" for option in self.options):
            return []
        return [f"--cpus-per-task={num_processes * (settings.cpu_threads + LOADER_CPUS)}"]

    def _job_folder(self, name: str) -> Path:
        folder = Path(self.scratch, "slurm", name)
        folder.mkdir(parents=True)
        return folder


def _in_pattern(path: Path) -> str:
    """Return a path for the option --output, without patterns such as %j, which Slurm would replace.

    Raises:
        LaunchError: The path contains a backslash, with which Slurm does not replace the %a of a task.
    """
    if "\\" in str(path):
        raise LaunchError(
            "the folder for the output of Slurm's jobs must not contain a backslash",
            where=str(path),
            fix="set scratch in the deployment file to a folder without one",
        )
    return str(path).replace("%", "%%")


@dataclass
class _Job:
    # Unique: a job is cancelled by its name, because its id is unknown until Slurm has accepted it.
    name: str
    options: Sequence[str]
    script: str
    outputs: Sequence[ForwardedOutput]
    submission: ForwardedOutput

    def run(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        *,
        grace_s: float,
        observe: Callable[[bool], object] | None = None,
    ) -> int:
        """Submit the job, wait for its end, and return the highest exit status of its tasks."""
        sbatch = ["sbatch", "--wait", *self.options, f"--job-name={self.name}"]
        sbatch += ["--wrap", self.script]
        log = step_log(context)
        log.info(f"submitting the Slurm job {self.name}")
        process = self._start(sbatch, settings)
        queue = _QueueLog(self, log)

        try:
            while process.poll() is None:
                self._forward()
                queue.update()
                if observe is not None:
                    observe(False)
                pause(POLL_S)

            # The job of a killed sbatch continues. Raised here, so that it is cancelled below.
            if process.returncode < 0:
                raise LaunchError(
                    f"sbatch, which waits for the Slurm job {self.name}, ended "
                    f"{describe_status(process.returncode)}",
                    where=f"machine {platform.node()}",
                    fix="start the job again; finished work is kept",
                )
        # Also Dagster's stop, SIGINT and SIGTERM: no job may outlive its step.
        except BaseException as err:
            with uninterrupted():
                problem = self._cancel(process, grace_s)
                self._forward(final=True)

                # After the cancellation, because a line of the log waits for Dagster's database. In the
                # block, because a second Ctrl-C must not lose it.
                if problem is None:
                    log.info(f"cancelled the Slurm job {self.name} ({type(err).__name__})")
                else:
                    log.warning(
                        f"the Slurm job {self.name} may still be running ({problem}); cancel it: "
                        f"scancel --name={self.name}"
                    )
            raise

        self._forward(final=True)
        if observe is not None:
            observe(True)
        if process.returncode != 0 and job_id_in(self.submission.lines()) is None:
            raise LaunchError(
                f"Slurm rejected the job {self.name}",
                where="\n".join([shlex.join(sbatch), *self.submission.lines()]),
                fix="correct the cause that Slurm's output names, often an option in launcher.options of the "
                "deployment file",
            )
        return process.returncode

    def _start(self, sbatch: Sequence[str], settings: AccelerateSettings) -> subprocess.Popen[bytes]:
        environment = launch_environment(settings, Path())

        # Slurm passes the variables on to tasks, which would not find this parent and end at once.
        for name in (PARENT_VARIABLE, ERROR_FILE_VARIABLE):
            del environment[name]

        with self.submission.file.open("wb") as file:
            # A session of its own: Ctrl-C at a terminal reaches only this process, which cancels the job.
            try:
                return subprocess.Popen(
                    sbatch, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
            except FileNotFoundError as err:
                raise LaunchError(
                    "sbatch does not exist on this machine",
                    where="launcher: slurm",
                    fix="run the steps on a machine that has Slurm's commands and may submit jobs, or use "
                    "another launcher in the deployment file",
                ) from err

    def _cancel(self, process: subprocess.Popen[bytes], grace_s: float) -> str | None:
        """Cancel the job, wait until it has ended, and return why it may still be running, or None."""
        # Slurm sends SIGTERM, upon which a training writes a checkpoint, and SIGKILL after its `KillWait`.
        end_s = time.monotonic() + max(grace_s, KILL_WAIT_S)
        is_cancelled, refusal = False, None
        while True:
            # Slurm's controller may be busy or restart. A job that it has not accepted yet starts later, even
            # if scancel succeeds.
            if not is_cancelled:
                is_known = self._is_known(process)
                refusal, _ = answer("scancel", f"--name={self.name}")
                is_cancelled = is_known and refusal is None
                refusal = refusal if is_known else refusal or "sbatch has not answered yet"
            problem = self._why_running(process, refusal)
            if problem is None or time.monotonic() > end_s:
                break
            time.sleep(POLL_S)

        # `sbatch --wait` may notice the end of a job half a minute late.
        process.kill()
        process.wait()
        return problem

    def _is_known(self, process: subprocess.Popen[bytes]) -> bool:
        # An sbatch that has ended submits no job any more.
        return process.poll() is not None or job_id_in(self.submission.lines()) is not None

    def _why_running(self, process: subprocess.Popen[bytes], refusal: str | None) -> str | None:
        """Return why a job may still be running, or None; `refusal` is why `scancel` had no effect."""
        # `sbatch --wait` may end while Slurm still waits for the job's processes.
        failure, listed = answer("squeue", "--noheader", f"--name={self.name}")
        if listed:
            return refusal or "squeue still lists it"

        # An sbatch that was killed proves nothing about its job.
        status = process.poll()
        has_ended = status is not None and status >= 0
        return None if has_ended else refusal or failure

    def last_output(self) -> list[str]:
        lines = self.submission.lines()
        for output in self.outputs:
            lines += [f"{output.file.stem}: {line}" for line in output.lines() if line.strip()][-3:]
        return lines[-OUTPUT_TAIL_LINES:]

    def _forward(self, *, final: bool = False) -> None:
        for output in (self.submission, *self.outputs):
            output.forward(final=final)


class _QueueLog:
    """Logs why a job is pending, until the first of its tasks has started."""

    def __init__(self, job: _Job, log: StepLog) -> None:
        self._job, self._log = job, log
        self._next_request_s = time.monotonic() + QUEUE_S
        self._shown = ""
        self._has_started = False

    def update(self) -> None:
        if self._has_started:
            return

        # Slurm creates the file of a task's output when the task starts.
        self._has_started = any(output.file.exists() for output in self._job.outputs)
        if self._has_started:
            if self._shown:
                self._log.info(f"the Slurm job {self._job.name} has started")
            return
        if time.monotonic() < self._next_request_s:
            return

        # A request that fails is made again later.
        _, reasons = answer("squeue", "--noheader", f"--name={self._job.name}", "--states=PENDING", "-o%r")
        reason = reasons.partition("\n")[0].strip()
        if reason not in ("", "None", self._shown):
            self._log.info(f"the Slurm job {self._job.name} is pending: {reason}{self._fix(reason)}")
            self._shown = reason
        self._next_request_s = time.monotonic() + QUEUE_S

    def _fix(self, reason: str) -> str:
        if reason == HELD_BY_ADMINISTRATOR:
            return "; ask an administrator of the cluster to release it"
        job_id = job_id_in(self._job.submission.lines())
        is_held = reason == HELD_BY_USER and job_id is not None
        return f"; release it: scontrol release {job_id}" if is_held else ""
