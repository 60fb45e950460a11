"""The checkpoint that a run resumes from, sent by rank 0 to machines that do not have it.

    rank 0             chooses the checkpoint, reads its files --- pieces ---+
    other machines     first process: writes them to a temporary folder  <---+
                       all processes: verify their hashes and load them

Only rank 0 decides, so a machine with a newer, older or different checkpoint on its disk does not matter.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, distributed

from pipeline.errors import TrainingError
from pipeline.trained_lora.run_folder import ADAPTER_FILE, MARKER, OPTIMIZER_FILE
from pipeline.trained_lora.worker.checkpoint import TrainingState, checkpoint_path, load_checkpoint

if TYPE_CHECKING:
    from accelerate import Accelerator

PIECE_BYTES = 2**24
"""Maximum number of bytes of a file that are sent at once, and held in memory for it."""

_FILES = (ADAPTER_FILE, OPTIMIZER_FILE)


def shared_checkpoint(
    accelerator: Accelerator, checkpoints: Path, run: str, *, step: int | None
) -> TrainingState | None:
    """Return the checkpoint that rank 0 has chosen, on every rank; None if it has chosen none.

    Every rank calls it. `step` is the checkpoint that rank 0 has chosen and verified, and None on other
    ranks. The folder `checkpoints` of this machine may be missing except on rank 0.

    Raises:
        TrainingError: The checkpoint did not arrive as rank 0 has read it.
    """
    marker = "" if step is None else (checkpoint_path(checkpoints, step) / MARKER).read_text(encoding="utf-8")
    chosen: list[Any] = [step, marker]
    broadcast_object_list(chosen)
    step, marker = chosen
    if step is None:
        return None

    path = checkpoint_path(checkpoints, step)

    # The marker has the hashes of the files, so equal markers stand for equal checkpoints.
    own = _load_if_equal(path, run, marker)
    has_state: list[bool] = gather_object([own is not None])
    if all(has_state):
        return own
    with ExitStack() as stack:
        # One process per machine writes the files; the machine's other processes read them.
        if _is_first_of_machine() and not all(has_state[rank] for rank in _ranks_of_machine()):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="latentline-"))
            received: Path | None = checkpoint_path(Path(folder), step)
            received.mkdir()
            (received / MARKER).write_text(marker, encoding="utf-8")
        else:
            received = None

        for name in _FILES:
            _send(accelerator, path / name, None if received is None else received / name)
        folders: list[Path | None] = gather_object([received])
        if own is None:
            received = folders[_ranks_of_machine()[0]]
            assert received is not None, (
                "the first process of each machine without the checkpoint has received it"
            )
            own = _load_received(received, run)

        # The first process of the machine deletes the folder, which its other processes have to read before.
        accelerator.wait_for_everyone()
    return own


def _load_if_equal(path: Path, run: str, marker: str) -> TrainingState | None:
    try:
        if (path / MARKER).read_text(encoding="utf-8") != marker:
            return None
        return load_checkpoint(path, run)
    except (OSError, TrainingError):
        return None


def _send(accelerator: Accelerator, source: Path, target: Path | None) -> None:
    """Send a file of rank 0 to all ranks in pieces; write it to `target` if this is not None."""
    device = accelerator.device
    is_sender = accelerator.is_main_process
    with ExitStack() as stack:
        read = stack.enter_context(source.open("rb")) if is_sender else None
        write = stack.enter_context(target.open("wb")) if target is not None else None

        # All ranks need the size, to receive as many pieces as are sent.
        size = torch.tensor([source.stat().st_size if is_sender else 0], device=device)
        distributed.broadcast(size, src=0)

        remaining = int(size.item())
        while remaining > 0:
            length = min(remaining, PIECE_BYTES)
            piece = _read_piece(read, length) if read is not None else torch.empty(length, dtype=torch.uint8)

            # NCCL sends tensors of GPUs only.
            piece = piece.to(device)
            distributed.broadcast(piece, src=0)
            if write is not None:
                write.write(piece.cpu().numpy().tobytes())
            remaining -= length


def _read_piece(file: BinaryIO, length: int) -> Tensor:
    # All ranks expect the announced size. If the file has become shorter since, its hash reveals it.
    return torch.frombuffer(bytearray(file.read(length).ljust(length, b"\0")), dtype=torch.uint8)


def _load_received(path: Path, run: str) -> TrainingState:
    try:
        return load_checkpoint(path, run)
    except TrainingError as err:
        raise TrainingError(
            f"the checkpoint that machine 0 sent arrived damaged: {err.what}",
            where=str(path),
            fix="check the disk of the temporary folder (TMPDIR), and start the same commands again",
        ) from err


def _is_first_of_machine() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def _ranks_of_machine() -> range:
    rank = distributed.get_rank()
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
