"""How GPU work is started: the command line of `accelerate launch`, and a plain way to run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import pipeline.errors
from pipeline.errors import LatentlineError, LaunchError

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

CPU_THREADS_PER_PROCESS = 2
"""Unless `accelerate.cpu_threads` says otherwise; not the machine's number of cores, because the number of
threads decides the last bits of a convolution on the CPU."""

OUTPUT_TAIL_LINES = 20

ERROR_FILE_VARIABLE = "LATENTLINE_ERROR_FILE"
"""Names the file in which a launched process leaves the `LatentlineError` that it ended with."""

ALONE = ("pipeline.vae_latents.worker", "pipeline.text_embeddings.worker", "pipeline.models.convert.worker")
"""Entry modules that ask accelerate for nothing but their rank. One such process is started as it is: the
launcher would import torch first, for as long as an image takes to be encoded with all that goes before."""

THREADS_VARIABLE = "LATENTLINE_CPU_THREADS"
"""Holds `accelerate.cpu_threads`."""

PARENT_VARIABLE = "LATENTLINE_PARENT_PID"
"""Holds the id of the process that a launched process must not outlive."""


Meanwhile: TypeAlias = Callable[[], object]


class Launch(Protocol):
    """Runs one entry module under accelerate to its end."""

    def __call__(self, module: str, order: Path, meanwhile: Meanwhile | None = None) -> None:
        """Run `python -m <module> <order>` on every process that the recipe asks for.

        Args:
            module: An entry module, such as `pipeline.vae_latents.worker`.
            order: A JSON file that tells the module what to do; results come back as files beside it.
            meanwhile: Called here as soon as the processes have been started, whose imports take seconds.

        Raises:
            Exception: What `meanwhile` raised; the processes have ended by then.
            LatentlineError: The one that the module ended with, as it was raised there.
            LaunchError: A process exited with another status than 0 for any other reason; the text quotes the
                end of its output.
        """
        ...


def launch_command(settings: AccelerateSettings, module: str, order: Path) -> list[str]:
    """The argument list of `accelerate launch` for one machine, every default spelled out; see also `ALONE`.

    A configuration file of our own is named, because otherwise accelerate reads the user's, which is no part
    of the recipe. Whether there is a GPU is found out by the launched process, which has torch.
    """
    if settings.num_processes == 1 and module in ALONE:
        return [sys.executable, "-m", module, str(order)]
    command = [sys.executable, "-m", "pipeline.processes.worker.accelerate_launch"]
    command += ["--config_file", str(Path(__file__).parent / "accelerate.yaml")]
    command += ["--num_processes", str(settings.num_processes), "--num_machines", "1"]
    command += ["--main_process_port", "0"]  # 0: any free one, so that two launches never meet
    command += ["--mixed_precision", settings.mixed_precision, "--dynamo_backend", "no"]
    command += ["--num_cpu_threads_per_process", str(settings.cpu_threads)]
    command += ["--multi_gpu"] if settings.num_processes > 1 else []
    return [*command, "-m", module, str(order)]


def launch_environment(settings: AccelerateSettings, error_file: Path) -> dict[str, str]:
    """The environment of a launched process: ours, with the project importable from any working directory."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root,
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        # Threads of one process that spin while they wait for each other starve as soon as another process
        # wants a core: 12 VAE passes on 2 cores beside two busy threads took 11 to 26 s, and 0.8 s so.
        # To let them spin a little (GOMP_SPINCOUNT=20000) gains a fifth on an idle machine, and takes twice
        # the CPU time and four times as long beside two busy threads.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "OMP_NUM_THREADS": str(settings.cpu_threads),  # as accelerate's launcher has it
        THREADS_VARIABLE: str(settings.cpu_threads),
        "TOKENIZERS_PARALLELISM": "false",  # silences a warning about forks; captions are encoded one by one
        ERROR_FILE_VARIABLE: str(error_file),
        PARENT_VARIABLE: str(os.getpid()),
    }


def cpu_threads() -> int:
    """How many threads a launched process computes with on the CPU."""
    return int(os.environ.get(THREADS_VARIABLE, CPU_THREADS_PER_PROCESS))


class LocalLaunch:
    """A `Launch` outside of Dagster: one subprocess, waited for, its output kept for the error."""

    def __init__(self, settings: AccelerateSettings) -> None:
        """Launch with the recipe's `accelerate` settings."""
        self._settings = settings

    def __call__(self, module: str, order: Path, meanwhile: Meanwhile | None = None) -> None:
        """As `Launch`."""
        with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
            error_file, output_file = Path(folder) / "error.json", Path(folder) / "output.txt"
            with output_file.open("wb") as file:
                process = subprocess.Popen(
                    launch_command(self._settings, module, order),
                    env=launch_environment(self._settings, error_file),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            try:
                if meanwhile is not None:
                    meanwhile()
                status = process.wait()
            except BaseException:
                process.kill()
                process.wait()
                raise
            if status != 0:
                output = output_file.read_text(encoding="utf-8", errors="replace").splitlines()
                raise launch_error(module, status, output=output, error_file=error_file)


def launch_error(module: str, status: int, *, output: list[str], error_file: Path) -> LatentlineError:
    """What a launch that ended with `status` is reported as.

    Args:
        module: The entry module.
        status: Exit status, or minus the number of the signal that ended the process.
        output: Lines that the processes printed; the last `OUTPUT_TAIL_LINES` are quoted, without the stack
            of a traceback.
        error_file: Where a launched process leaves its own error; need not exist.

    Returns:
        The error that the module itself ended with, when it left one; otherwise a `LaunchError`.
    """
    if error_file.is_file():
        parts = json.loads(error_file.read_text(encoding="utf-8"))
        kind = getattr(pipeline.errors, parts["kind"], LatentlineError)
        return kind(parts["what"], where=parts["where"], fix=parts["fix"])
    said = [line for line in output if line.strip() and not _is_frame(line)][-OUTPUT_TAIL_LINES:]
    return LaunchError(
        f"{module} ended {describe_status(status)}" + (f": {said[-1].strip()}" if said else ""),
        where="\n".join([f"the processes of {module}, which last printed", *(said or ["nothing"])]),
        fix=_advice(status),
    )


def _is_frame(line: str) -> bool:
    """Whether a line of output is the stack of a traceback, which stands whole in the output above."""
    return line.startswith(("Traceback (most recent call last)", "  File ", "    "))


def describe_status(status: int) -> str:
    """An exit status in words: "with exit status 1", "by signal SIGKILL"."""
    number = -status if status < 0 else status - 128
    try:
        return f"by signal {signal.Signals(number).name}"
    except ValueError:
        return f"with exit status {status}"


def _advice(status: int) -> str:
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return (
            "the system killed it, most often because memory ran out: free some, or, where it encoded or "
            "trained, lower batch_size or resolution"
        )
    if status in (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT):
        return "something stopped it: start the job again, it goes on where it was"
    return "mend what it says and start the job again: what is finished is kept"
