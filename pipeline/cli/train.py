"""`latentline train`: the processes of one machine, of a training on several machines."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from pipeline.cli.conventions import echo, log_to_stderr
from pipeline.errors import counted
from pipeline.processes.guard import watch_parent
from pipeline.processes.machines import Machines
from pipeline.processes.schedulers import MachineOptions, find_machines
from pipeline.recipe.deployment import WAIT_S
from pipeline.storage.addresses import Address, absolute

GRACE_S = 20.0
"""Seconds between a stop signal and the kill of processes; a training writes its checkpoint in this time."""


@click.command(short_help="Train on this machine, as one of several.")
@click.argument("order")
@click.option("--machines", type=click.IntRange(min=1), help="Number of machines.")
@click.option("--rank", type=click.IntRange(min=0), help="Rank of this machine, from 0.")
@click.option("--master", metavar="HOST:PORT", help="Machine 0, and a free port on it.")
@click.option(
    "--wait",
    "wait_s",
    type=click.IntRange(min=1),
    default=WAIT_S,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for the other machines to start.",
)
def command(order: str, machines: int | None, rank: int | None, master: str | None, wait_s: int) -> None:
    """Run this machine's processes of the training that ORDER describes, until the training ends.

    ORDER is the file order.json in the folder of a run, or that folder. Machines other than 0 may read it
    from an address. Start the command once per machine. Without options, the number of machines, the rank of
    this one and the address of machine 0 come from the variables of torchrun (NNODES, NODE_RANK, MASTER_ADDR,
    MASTER_PORT) or Slurm.

    Machine 0 writes the run's folder. The others need only order.json and inputs.parquet from it, the base
    model, and the cache.

    The exit status is 0 after the last step, 1 after an error, and 130 or 143 if the training was stopped by
    Ctrl-C or SIGTERM. Start the command again on all machines to resume.
    """
    watch_parent()  # its end stops the training's processes in turn, after a checkpoint
    chosen = find_machines(MachineOptions(machines, rank, master, wait_s=wait_s), os.environ)
    _train(absolute(order, Path.cwd()), chosen)


def _train(order: Address, machines: Machines) -> None:
    from pipeline.processes.foreground import run_in_foreground
    from pipeline.processes.launch import TRAINING_MODULE, launch_command, launch_environment, launch_error
    from pipeline.trained_lora.job import read_recipe_and_prompts
    from pipeline.trained_lora.local_order import local_order, require_local_files

    with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
        file = local_order(order, Path(folder), rank=machines.rank)
        settings = read_recipe_and_prompts(file)[0].accelerate
        launch = launch_command(settings, TRAINING_MODULE, file, machines)
        require_local_files(file)
        _show_start(machines, machines.num_processes_here(settings))

        error_file, output_file = Path(folder) / "error.json", Path(folder) / "output.txt"
        status, signal = run_in_foreground(
            launch,
            launch_environment(settings, error_file, machines),
            output_file=output_file,
            grace_s=GRACE_S,
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
