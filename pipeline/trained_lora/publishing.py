"""Publishing to `lora/`: one process at a time, also if several machines finish runs of one recipe.

<output_dir>/.publish.lock    lock of this machine, in the output folder or the working copy
runs/publish.lease            lease at the address, held while `lora/` is pulled, replaced and pushed
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from filelock import FileLock

from pipeline.errors import TrainingError
from pipeline.recipe.outputs import PUBLISHED_FILES
from pipeline.storage.lease import TRAINING, Lease, hold_lease
from pipeline.storage.mirror import allow
from pipeline.storage.remote_folder import RemoteFolder

if TYPE_CHECKING:
    from pipeline.storage.mirror import Mirror

PUBLISHING = "publishing a LoRA"

_LOCK = ".publish.lock"
_LEASE = "runs/publish.lease"

Log = Callable[[str], object]


@contextmanager
def publishing(mirror: Mirror, log: Log, *, guard: Callable[[], object] = allow) -> Generator[None]:
    """Wait until no other process publishes, and push what the body writes to `lora/`.

    At an address, `lora/` is pulled before the body. Otherwise, a file that is equal in an earlier LoRA and
    in this one would not replace that of a LoRA which another machine published in between.

    Args:
        mirror: Mirror of the output folder, which may be a local one.
        log: Receives a line if another machine publishes.
        guard: Called before each change of the address. An exception ends the push.

    Raises:
        StoreError: The service does not answer.
        TrainingError: Another machine took the lease over.
    """
    lock = mirror.folder / _LOCK
    mirror.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(lock, fallback_to_soft=False):
        if not mirror.is_remote:
            yield
            return
        with hold_lease_at(mirror, _LEASE, log, doing=PUBLISHING) as lease:
            mirror.pull(*PUBLISHED_FILES)
            yield
            mirror.push(*PUBLISHED_FILES, guard=lambda: (guard(), _require(lease, mirror)))


@contextmanager
def hold_lease_at(mirror: Mirror, name: str, log: Log, *, doing: str = TRAINING) -> Generator[Lease]:
    """Hold the lease `name` of an output folder at an address for the body.

    Raises:
        StoreError: The service does not answer.
    """
    # A folder of its own: on some services, requests through one connection wait for each other, and a
    # heartbeat must not wait for a large upload.
    folder = RemoteFolder(mirror.remote.url, key="output_dir")
    lease = Lease(folder, name, copy_id=mirror.copy_id, log=log, doing=doing)
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_lease(lease))
        except OSError as err:
            raise mirror.error(f"the output folder cannot be used: {err}", name) from err
        yield lease


def _require(lease: Lease, mirror: Mirror) -> None:
    try:
        is_held = lease.is_held()
    except OSError as err:
        what = f"the output folder cannot be read: {err}"
        raise mirror.error(what, _LEASE, is_upload=True) from err
    if not is_held:
        raise TrainingError(
            "another machine publishes a LoRA, because this one did not answer for too long",
            where=mirror.where(_LEASE),
            fix="start the command again; it waits for the other machine, and then publishes",
        )
