"""The lock of `lora/`: one process at a time replaces it, also if several machines finish runs of one recipe.

<output_dir>/.publish.lock    lock of this machine, in the output folder or the local folder of an address
runs/publish.lease            lease at the address, held while `lora/` is replaced
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from filelock import FileLock

from pipeline.errors import TrainingError
from pipeline.log import Log
from pipeline.outputs.folder import Guard, OutputFolder, allow
from pipeline.outputs.lease import hold_lease, still_held
from pipeline.outputs.stage_files import EXPORTED_STEP

REPLACING = "replacing lora/"

_LORA = "lora/"
_PROVENANCE = "lora/provenance.json"

_LOCK = ".publish.lock"
_LEASE = "runs/publish.lease"


@contextmanager
def hold_lora(outputs: OutputFolder, log: Log, *, guard: Guard = allow) -> Generator[None]:
    """Wait until no other process replaces `lora/`, and upload what the body writes there.

    `guard` is called before each change of the address. An exception ends the upload.

    Raises:
        StoreError: The service does not answer.
        TrainingError: Another machine took the lease over.
    """
    outputs.folder.mkdir(parents=True, exist_ok=True)

    # The system releases this lock if its holder is killed; a soft lock would outlive it.
    with FileLock(outputs.folder / _LOCK, fallback_to_soft=False):
        if not outputs.is_remote:
            yield
            return
        with hold_lease(outputs, _LEASE, log, doing=REPLACING) as lease:
            # A machine that was suspended may have lost the lease without noticing, so it is read before each
            # change.
            def require_lease() -> None:
                guard()
                if not still_held(lease, outputs, _LEASE):
                    raise _lost_error(outputs)

            outputs.fetch(EXPORTED_STEP)
            yield
            # First, as in the body: after an interruption, the next job publishes this step.
            if (outputs.folder / EXPORTED_STEP).is_file():
                outputs.upload(EXPORTED_STEP, guard=require_lease)
            else:
                outputs.remove(EXPORTED_STEP, guard=require_lease)
            if not _is_published(outputs):
                outputs.replace_folder(_LORA, guard=require_lease)


def _is_published(outputs: OutputFolder) -> bool:
    names = set(outputs.names(_LORA))
    if _PROVENANCE not in names or names != set(outputs.local_names(_LORA)):
        return False

    # The provenance lists the hashes of the other files.
    return outputs.read(_PROVENANCE) == (outputs.folder / _PROVENANCE).read_bytes()


def _lost_error(outputs: OutputFolder) -> TrainingError:
    return TrainingError(
        "another machine replaces lora/, because this one did not answer for too long",
        where=outputs.where(_LEASE),
        fix="start the command again; it waits until that machine has finished",
    )
