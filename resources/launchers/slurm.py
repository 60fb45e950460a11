"""Encoding and training as jobs of Slurm.

An encoding is a job array with one task per shard, a training one job with one task per machine. The command
`sbatch --wait` ends with the job. Project, environment and scratch folder are at the same path on all nodes.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster import AssetExecutionContext
from pydantic import Field

from pipeline.errors import LaunchError
from pipeline.processes.launch import ERROR_FILE_VARIABLE, OUTPUT_TAIL_LINES, launch_error
from pipeline.recipe.deployment import load_deployment
from resources.launchers.local import Observer
from resources.launchers.output import ForwardedOutput, uninterrupted
from resources.launchers.remote import Encoding, RemoteLauncher, remote_environment

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

POLL_S = 0.5

SUBMITTED = "Submitted batch job"
"""Beginning of the line that `sbatch` prints when Slurm has accepted the job."""

WITHOUT_SLURM = (
    "run the steps on a machine that has Slurm's commands and may submit jobs, or use another launcher in "
    "the deployment file"
)


class SlurmLauncher(RemoteLauncher):
    """Starts encoding as a job array and training as a job of several nodes."""

    options: list[str] = Field(
        default_factory=list, description="Options of `sbatch` for each job, such as --partition=gpu."
    )

    def encode(self, encoding: Encoding) -> Sequence[str]:
        """See `RemoteLauncher.encode`; the order names the number of shards, and Slurm the index of each."""
        order, num_shards = encoding.order, encoding.num_shards
        folder = _job_folder(order.order_id)
        job = _Job(
            name=f"latentline-{order.order_id}",
            options=[*self.options, f"--array=0-{num_shards - 1}", f"--output={folder}/%a.txt"],
            command=[sys.executable, "-m", "pipeline.cli", "encode", str(order.address)],
            outputs=[ForwardedOutput(folder / f"{index}.txt") for index in range(num_shards)],
            submission=ForwardedOutput(folder / "sbatch.txt"),
        )

        environment = remote_environment(encoding.settings)
        status = job.run(encoding.context, environment, grace_s=self.grace_s)
        last_output = job.last_output()
        if status == 0:
            shutil.rmtree(folder)
        return last_output

    def train(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        order: Path,
        observer: Observer | None,
    ) -> None:
        """See `RemoteLauncher.train`; `srun` starts one task on each node."""
        # The folder of a failed attempt stays, so that each attempt needs another one.
        folder = _job_folder(f"{order.parent.name}-{uuid.uuid4().hex[:8]}")
        command = ["srun", sys.executable, "-m", "pipeline.cli", "train", str(order)]
        output, error_file = ForwardedOutput(folder / "output.txt"), folder / "error.json"
        job = _Job(
            name=f"latentline-{folder.name}",
            options=[
                *self.options,
                f"--nodes={self.machines}",
                "--ntasks-per-node=1",
                f"--output={output.file}",
            ],
            command=command,
            outputs=[output],
            submission=ForwardedOutput(folder / "sbatch.txt"),
        )

        environment = remote_environment(settings) | {ERROR_FILE_VARIABLE: str(error_file)}
        observe = None if observer is None else observer(order)
        status = job.run(context, environment, grace_s=self.grace_s, observe=observe)
        if status != 0:
            raise launch_error("latentline train", status, output=output.lines(), error_file=error_file)
        shutil.rmtree(folder)


@dataclass
class _Job:
    """A job of Slurm.

    Attributes:
        name: Unique name, by which the job is cancelled.
        options: Options of `sbatch`; of equal ones, the last one counts.
        command: Command of each task.
        outputs: Output of the tasks.
        submission: Output of `sbatch`.
    """

    name: str
    options: Sequence[str]
    command: Sequence[str]
    outputs: Sequence[ForwardedOutput]
    submission: ForwardedOutput

    def run(
        self,
        context: AssetExecutionContext,
        environment: Mapping[str, str],
        *,
        grace_s: float,
        observe: Callable[[bool], object] | None = None,
    ) -> int:
        """Submit the job, wait for its end, and return the highest exit status of its tasks.

        An interruption of the wait (Dagster's stop, SIGINT, SIGTERM, an error) first cancels the job.

        Raises:
            LaunchError: There is no Slurm, or it rejects the job.
        """
        sbatch = ["sbatch", "--wait", *self.options, f"--job-name={self.name}"]
        sbatch += ["--wrap", shlex.join(self.command)]
        context.log.info(f"submitting the Slurm job {self.name}")
        with self.submission.file.open("wb") as file:
            try:
                process = subprocess.Popen(
                    sbatch, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
            except FileNotFoundError as err:
                what = "sbatch does not exist on this machine"
                raise LaunchError(what, where="launcher: slurm", fix=WITHOUT_SLURM) from err

        try:
            while process.poll() is None:
                self._forward()
                if observe is not None:
                    observe(False)
                time.sleep(POLL_S)
        except BaseException as err:
            with uninterrupted():
                context.log.info(f"cancelling the Slurm job {self.name} ({type(err).__name__})")
                _cancel(self.name, process, grace_s)
                self._forward(final=True)
            raise

        self._forward(final=True)
        if observe is not None:
            observe(True)
        if process.returncode != 0 and not any(SUBMITTED in line for line in self.submission.lines()):
            raise LaunchError(
                f"Slurm rejected the job {self.name}",
                where="\n".join([shlex.join(sbatch), *self.submission.lines()]),
                fix="correct the cause that Slurm's output names, often an option in launcher.options of the "
                "deployment file",
            )
        return process.returncode

    def last_output(self) -> list[str]:
        """Return the last lines of `sbatch` and of each task."""
        lines = self.submission.lines()
        for output in self.outputs:
            lines += [f"{output.file.stem}: {line}" for line in output.lines() if line.strip()][-3:]
        return lines[-OUTPUT_TAIL_LINES:]

    def _forward(self, *, final: bool = False) -> None:
        for output in (self.submission, *self.outputs):
            output.forward(final=final)


def _cancel(name: str, process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Cancel a job, and wait until `sbatch --wait` notices its end.

    Slurm sends SIGTERM, upon which a training writes a checkpoint, and SIGKILL after its own `KillWait`.
    """
    subprocess.run(["scancel", f"--name={name}"], check=False)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _job_folder(name: str) -> Path:
    """Return a new folder for the output of a job, on the disk that all nodes share."""
    folder = load_deployment().scratch / "slurm" / name
    folder.mkdir(parents=True)
    return folder
