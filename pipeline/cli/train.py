"""`latentline train`: the processes of one machine, of a training on several machines."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from pipeline.cli.conventions import echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.errors import counted
from pipeline.processes.cluster_variables import MachineOptions, find_machines
from pipeline.processes.guard import watch_parent
from pipeline.processes.machines import Machines
from pipeline.recipe.deployment import WAIT_S
from pipeline.storage.addresses import Address, absolute

GRACE_S = 20.0
"""Default of the seconds between a stop signal and the kill of processes."""


@click.command(short_help="Train as one of several machines.")
@click.argument("job")
@click.option("--machines", type=click.IntRange(min=1), help="Number of machines.")
@click.option("--rank", type=click.IntRange(min=0), help="Rank of this machine: 0 for machine 0, and so on.")
@click.option("--master", metavar="HOST:PORT", help="Host name or IP of machine 0, and a free port on it.")
@click.option(
    "--wait",
    "wait_s",
    type=click.IntRange(min=1),
    default=WAIT_S,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for the other machines to start.",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="Time between a stop signal and the kill of processes, in which machine 0 writes a checkpoint.",
)
def command(
    job: str, *, machines: int | None, rank: int | None, master: str | None, wait_s: int, grace_s: float
) -> None:
    """Run this machine's part of a training on several machines.

    Start the command once on each machine. Launchers do this for you; docs/several_machines.md explains how
    to do it by hand. It returns when the training ends.

    JOB is the training: the file order.json in the folder of a run, or that folder. Machine 0 must have the
    folder on a disk, because it writes checkpoints there. The other machines read only order.json and
    inputs.parquet from it, possibly from an address. All need the base model and the cache.

    Without options, the number of machines, the rank of this one and the address of machine 0 come from the
    variables of torchrun (NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT) or of Slurm.

    The exit status is 0 after the last step, 1 after an error, and 130 or 143 if the training was stopped by
    Ctrl-C or SIGTERM. To resume, start the command again on all machines.
    """
    # The end of the launcher stops the processes of the training in turn, after a checkpoint.
    watch_parent()
    chosen = find_machines(MachineOptions(machines, rank, master, wait_s=wait_s), os.environ)
    _train(absolute(job, Path.cwd()), chosen, grace_s)
    give({"job": job, "machine": chosen.rank, "machines": chosen.number})


def _train(job: Address, machines: Machines, grace_s: float) -> None:
    from pipeline.processes.foreground import run_in_foreground
    from pipeline.processes.launch import TRAINING_MODULE, launch_command, launch_environment, launch_error
    from pipeline.trained_lora.job import read_recipe_and_prompts
    from pipeline.trained_lora.joining import local_job_file, require_local_files

    with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
        file = local_job_file(job, Path(folder), rank=machines.rank)
        settings = read_recipe_and_prompts(file)[0].accelerate
        launch = launch_command(settings, TRAINING_MODULE, file, machines)
        require_local_files(file)
        _show_start(machines, machines.num_processes_here(settings))

        error_file, output_file = Path(folder) / "error.json", Path(folder) / "output.txt"
        status, signal = run_in_foreground(
            launch,
            launch_environment(settings, error_file, machines),
            output_file=output_file,
            grace_s=grace_s,
            # A process writes its error to the file before it prints it. It is raised below.
            show=lambda line: None if error_file.exists() else log_to_stderr(line),
        )
        if signal is not None:
            echo("stopped; start the command again on every machine to resume", err=True)
            sys.exit(128 + signal)
        if status != 0:
            output = output_file.read_text(encoding="utf-8", errors="replace").splitlines()
            raise launch_error(TRAINING_MODULE, status, output=output, error_file=error_file)


def _show_start(machines: Machines, num_processes: int) -> None:
    meeting_point = f", meeting at {machines.address}" if machines.number > 1 else ""
    processes = counted(num_processes, "process", "processes")
    echo(f"machine {machines.rank} of {machines.number} (ranks from 0): {processes}{meeting_point}", err=True)
