"""`latentline encode`: encode one shard of an encoding on any machine, as schedulers start it."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import click

from pipeline.cli.conventions import log_to_stderr
from pipeline.cli.json_output import give
from pipeline.encoding.shard import encode_shard
from pipeline.encoding.shared_encoding import Shard, SharedEncoding, parse_shard
from pipeline.errors import LaunchError
from pipeline.processes.guard import watch_parent
from pipeline.storage.addresses import absolute

INDEX_VARIABLES = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")
"""Variables that hold the index of a task in Slurm's job arrays and Kubernetes' indexed jobs."""

_FOREIGN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "DAGSTER_PIPES_CONTEXT")


class _ShardType(click.ParamType[Shard]):
    name = "i/N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Shard:
        try:
            return value if isinstance(value, Shard) else parse_shard(str(value))
        except ValueError as err:
            self.fail(f"{err}.", param, ctx)


@click.command(short_help="Encode one shard of a job; for schedulers and launchers.")
@click.argument("encoding")
@click.option(
    "--shard",
    type=_ShardType(),
    help="Shard to encode, counted from 0, so that 0/8 is the first of 8 and 7/8 the last. By default, I is "
    f"the task's index from the scheduler ({' or '.join(INDEX_VARIABLES)}) and N is the encoding's number of "
    "shards. Without such a variable, the complete encoding is encoded.",
)
def command(encoding: str, shard: Shard | None) -> None:
    """Encode one shard of the images or captions that a job needs, on any machine that can access the cache.

    A job that encodes on other machines writes an encoding into its cache: the list of what is missing,
    divided into shards. Its launcher then starts this command once per shard, for example as tasks of a Slurm
    array. ENCODING is the folder or address of the encoding.

    Entries that exist are skipped, so a shard can be started again at any time. An image that cannot be
    encoded does not fail the shard: it is recorded, and the job rejects it. The exit status is 0 only if the
    shard is complete.
    """
    # A scheduler's stop ends the encoding process too, and its last results are still copied.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    watch_parent()

    # One process encodes, whatever the scheduler's rank is, and it writes to the log of this command.
    for name in _FOREIGN_VARIABLES:
        os.environ.pop(name, None)
    shared = SharedEncoding(absolute(encoding, Path.cwd()))
    shard = shard or shard_of_environment(shared)
    encode_shard(shared, shard, log=log_to_stderr)
    give({"encoding": shared.address, **asdict(shard)})


def shard_of_environment(encoding: SharedEncoding) -> Shard:
    """Return the shard that the scheduler's variable names, or the complete encoding without one."""
    name = next((name for name in INDEX_VARIABLES if os.environ.get(name)), None)
    if name is None:
        return Shard(0, 1)
    # Not Slurm's own count of tasks, which is smaller if only some of them start again.
    num_shards = encoding.settings()["num_shards"]
    try:
        return parse_shard(f"{os.environ[name]}/{num_shards}")
    except ValueError as err:
        raise LaunchError(
            f"{name} must be a number from 0 to {num_shards - 1}, got {os.environ[name]}",
            where=str(encoding.address),
            fix=f"start the tasks 0 to {num_shards - 1}, or pass --shard",
        ) from err
