"""`accelerate launch` for several processes, in a process that ends with its parent and stops its workers.

The chain is Dagster's step, this process, and one worker per rank. When one ends, the following ones end too:

    the step is killed      the kernel sends this process a SIGTERM, and the thread of `watch_parent` notices
    this process is killed  the kernel sends each worker a SIGTERM (`end_with_parent` in `reporter`)
    SIGTERM to this one     torch's launcher forwards it to the workers, which write a checkpoint; before it
                            has started them, this process ends
"""

from __future__ import annotations

import os
from functools import partial

from pipeline.errors import LaunchError
from pipeline.processes.guard import ORPHAN_GRACE_S, end_now, end_with_parent, watch_parent
from pipeline.processes.machines import Machines, machines_of_this_process
from pipeline.processes.pipes import write_error
from pipeline.processes.tree import ProcessTree


def launch() -> int:
    """Run accelerate's launcher with this process's arguments, and return the first failed worker's status.

    A worker that was ended by a signal counts as 128 plus the signal's number, as in a shell.
    """
    tree = ProcessTree(os.getpid())
    watch_parent(on_death=partial(tree.stop_below, grace_s=ORPHAN_GRACE_S))
    end_with_parent()
    machines = machines_of_this_process()

    # These imports take seconds, in which the parent may die: the guards above come first.
    import torch
    from accelerate.commands.launch import main
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"  # otherwise several processes would require NCCL
    try:
        main()
    except SignalException as err:
        return 128 + err.sigval
    except ChildFailedError as err:
        # The workers that fail later are usually victims of the first one.
        _, first = err.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except (DistError, ConnectionError) as err:
        if machines.number == 1:
            raise
        write_error(_not_connected(machines, err))
        return 1
    return 0


def _not_connected(machines: Machines, err: Exception) -> LaunchError:
    reason = str(err).strip().partition("\n")[0]

    # accelerate tests the port before torch opens it, and raises ConnectionError.
    if "EADDRINUSE" in reason or isinstance(err, ConnectionError):
        return LaunchError(
            f"port {machines.port} of this machine is in use: {reason}",
            where=f"--master {machines.address}",
            fix="wait until an earlier training has ended, or choose another port on every machine",
        )
    missing = "not all other machines connected" if machines.rank == 0 else "machine 0 could not be reached"
    return LaunchError(
        f"{missing} within {machines.wait_s} s: {reason}",
        where=f"machine {machines.rank} of {machines.number}, --master {machines.address}",
        fix="start latentline train on every machine, with the same --machines and --master and its own "
        "--rank; the port must be open between them",
    )


if __name__ == "__main__":
    end_now(launch())
