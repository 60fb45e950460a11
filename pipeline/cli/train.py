"""`latentline train`: the processes of one machine, of a training on several machines."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from pipeline.cli.conventions import echo, log_to_stderr
from pipeline.errors import TrainingError, counted
from pipeline.processes.machines import WAIT_S, Machines
from pipeline.processes.schedulers import MachineOptions, find_machines

GRACE_S = 20.0
"""Seconds between a stop signal and the kill of processes; a training writes its checkpoint in this time."""


@click.command(short_help="Train on this machine, as one of several.")
@click.argument("order", type=click.Path(path_type=Path))
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
def command(order: Path, machines: int | None, rank: int | None, master: str | None, wait_s: int) -> None:
    """Run this machine's processes of the training that ORDER describes, until the training ends.

    ORDER is the file order.json in the folder of a run, or that folder. A scheduler starts this command once
    per machine. Without options, the number of machines, the rank of this one and the address of machine 0
    come from the variables of torchrun (NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT) or Slurm.

    Machine 0 writes the run's folder. The others need only order.json and inputs.parquet from it, the base
    model, and the cache.

    The exit status is 0 after the last step, 1 after an error, and 130 or 143 if the training was stopped by
    Ctrl-C or SIGTERM. Start the command again on all machines to resume.
    """
    chosen = find_machines(MachineOptions(machines, rank, master, wait_s), os.environ)
    _train(_order_file(order), chosen)


def _order_file(order: Path) -> Path:
    """Return the absolute path of the job file that the user named.

    Raises:
        TrainingError: It does not exist, or its training inputs do not.
    """
    from pipeline.trained_lora.job import INPUTS_FILE, JOB_FILE

    file = (order / JOB_FILE if order.is_dir() else order).absolute()
    for path in (file, file.with_name(INPUTS_FILE)):
        if not path.is_file():
            raise TrainingError(
                f"{path.name} does not exist on this machine",
                where=str(path.parent),
                fix=f"pass the path of {JOB_FILE} in a run's folder; if the machines share no disk, copy "
                f"{JOB_FILE} and {INPUTS_FILE} to this one",
            )
    return file


def _train(order: Path, machines: Machines) -> None:
    from pipeline.processes.foreground import run_in_foreground
    from pipeline.processes.launch import TRAINING_MODULE, launch_command, launch_environment, launch_error
    from pipeline.trained_lora.job import read_recipe_and_prompts

    recipe, _ = read_recipe_and_prompts(order)
    settings = recipe.accelerate
    launch = launch_command(settings, TRAINING_MODULE, order, machines)
    num_processes = machines.num_processes_here(settings)
    where = f", meeting at {machines.address}" if machines.number > 1 else ""
    processes = counted(num_processes, "process", "processes")
    echo(f"machine {machines.rank} of {machines.number} (ranks from 0): {processes}{where}", err=True)

    with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
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
