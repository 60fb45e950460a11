"""`accelerate launch` in a process that ends with its parent and stops its workers.

The chain is Dagster's step, this process, and one worker per rank. When one ends, the following ones end too:

    the step is killed      the kernel sends this process a SIGTERM, and the thread of `watch_parent` notices
    this process is killed  the kernel sends each worker a SIGTERM (`end_with_parent` in `reporter`)
    SIGTERM to this one     is forwarded to the workers, which write a checkpoint; their status becomes ours
"""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from types import FrameType

from pipeline.processes.guard import end_now, end_with_parent, watch_parent
from pipeline.processes.tree import ProcessTree

ORPHAN_GRACE_S = 4.0
"""Seconds that workers have for a checkpoint when the step that started them is gone."""


def launch() -> int:
    """Run accelerate's launcher with this process's arguments, and return the first failed worker's status.

    A worker that was ended by a signal counts as 128 plus the signal's number, as in a shell.
    """
    tree = ProcessTree(os.getpid())
    watch_parent(on_death=partial(tree.stop_below, grace_s=ORPHAN_GRACE_S))
    end_with_parent()
    signal.signal(signal.SIGTERM, _forward)

    # These imports take seconds, in which the parent may die: the guards above come first.
    import torch
    from accelerate.commands.launch import main
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"  # otherwise several processes would require NCCL
    try:
        main()
    except subprocess.CalledProcessError as err:
        return err.returncode if err.returncode > 0 else 128 - err.returncode
    except SignalException as err:
        return 128 + err.sigval
    except ChildFailedError as err:
        _, first = err.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0


def _forward(number: int, _frame: FrameType | None) -> None:
    for process in ProcessTree(os.getpid()).members():
        if process.pid != os.getpid():
            process.send_signal(number)


if __name__ == "__main__":
    end_now(launch())
