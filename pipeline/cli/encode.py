"""`latentline encode`: encode one shard of an order on any machine, as schedulers start it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click

from pipeline.cli.conventions import log_to_stderr
from pipeline.encoding.shard import encode_shard
from pipeline.encoding.shared_order import Shard, SharedOrder, parse_shard
from pipeline.errors import LaunchError
from pipeline.processes.guard import watch_parent
from pipeline.storage.addresses import absolute

INDEX_VARIABLES = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")
"""Variables in which Slurm's job arrays and Kubernetes' indexed jobs state the index of a task."""

_FOREIGN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "DAGSTER_PIPES_CONTEXT")


class _ShardType(click.ParamType[Shard]):
    """Shard as `i/N`."""

    name = "i/N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Shard:
        try:
            return value if isinstance(value, Shard) else parse_shard(str(value))
        except ValueError as err:
            self.fail(f"{err}.", param, ctx)


@click.command(short_help="Encode one shard of an order; started by schedulers.")
@click.argument("order")
@click.option(
    "--shard",
    type=_ShardType(),
    help="Shard to encode, counted from 0: 0/8 to 7/8. By default, the index comes from a variable of the "
    f"scheduler ({' or '.join(INDEX_VARIABLES)}) and N from the order. Without such a variable, the complete "
    "order is encoded.",
)
def command(order: str, shard: Shard | None) -> None:
    """Encode one shard of ORDER, the folder or address of an order below a cache.

    Launchers start this command on other machines. Existing entries are skipped, so every shard may be
    started again at any time. A failed image is a result. The exit status is 0 only if the shard is complete.
    """
    # A scheduler's stop ends the encoding process too, and its last results are still copied.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    watch_parent()

    # A scheduler's rank is not that of the one encoding process, whose log is that of this command.
    for name in _FOREIGN_VARIABLES:
        os.environ.pop(name, None)
    shared = SharedOrder(absolute(order, Path.cwd()))
    shard = shard or shard_of_environment(shared)
    encode_shard(shared, shard, log=log_to_stderr)


def shard_of_environment(order: SharedOrder) -> Shard:
    """Return the shard that the scheduler's variable names, or the complete order without one.

    N is the order's number of shards. Slurm's own count of tasks is smaller if only some are started again.

    Raises:
        LaunchError: The variable is not a number below the number of shards.
        StoreError: The order cannot be read.
    """
    name = next((name for name in INDEX_VARIABLES if os.environ.get(name)), None)
    if name is None:
        return Shard(0, 1)
    num_shards = order.settings()["num_shards"]
    try:
        return parse_shard(f"{os.environ[name]}/{num_shards}")
    except ValueError as err:
        raise LaunchError(
            f"{name} must be a number from 0 to {num_shards - 1}, got {os.environ[name]}",
            where=str(order.address),
            fix=f"start the tasks 0 to {num_shards - 1}, or pass --shard",
        ) from err
