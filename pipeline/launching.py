"""How GPU work is started: the command line of `accelerate launch`, and a plain way to run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipeline.errors import LaunchError

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

CPU_THREADS_PER_PROCESS = 2
"""Fixed, because the number of threads decides the last bits of a convolution on the CPU."""

OUTPUT_TAIL_LINES = 20


class Launch(Protocol):
    """Runs one entry module under accelerate to its end."""

    def __call__(self, module: str, order: Path) -> None:
        """Run `python -m <module> <order>` on every process that the recipe asks for.

        Args:
            module: An entry module, such as `pipeline.entrypoints.encode`.
            order: A JSON file that tells the module what to do; results come back as files beside it.

        Raises:
            LaunchError: A process exited with another status than 0; the text quotes the end of its output.
        """
        ...


def launch_command(settings: AccelerateSettings, module: str, order: Path) -> list[str]:
    """The argument list of `accelerate launch` for one machine, every default spelled out.

    Spelled out, because otherwise accelerate reads the user's own configuration file, which is no part of the
    recipe.
    """
    command = [sys.executable, "-m", "pipeline.entrypoints.launch"]
    command += ["--num_processes", str(settings.num_processes), "--num_machines", "1"]
    command += ["--mixed_precision", settings.mixed_precision, "--dynamo_backend", "no"]
    command += ["--num_cpu_threads_per_process", str(CPU_THREADS_PER_PROCESS)]
    return [*command, "-m", module, str(order)]


class LocalLaunch:
    """A `Launch` outside of Dagster: one subprocess, waited for, its output kept for the error."""

    def __init__(self, settings: AccelerateSettings) -> None:
        """Launch with the recipe's `accelerate` settings."""
        self._settings = settings

    def __call__(self, module: str, order: Path) -> None:
        """As `Launch`."""
        command = launch_command(self._settings, module, order)
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
        )
        if done.returncode != 0:
            raise launch_error(module, done.returncode, (done.stdout + done.stderr).splitlines())


def launch_error(module: str, status: int, output: list[str]) -> LaunchError:
    """The error for a launched module that exited with `status`, quoting the end of what it printed."""
    tail = "\n".join(output[-OUTPUT_TAIL_LINES:]) or "(nothing was printed)"
    fix = f"the last lines it printed were:\n{tail}"
    return LaunchError(
        f"{module} ended with exit status {status}", where=f"accelerate launch -m {module}", fix=fix
    )
