"""`python -m tests.pipeline.models.worker.offload.shared_process <folder> <rank> <size>`.

One of `size` processes, two of which are on each machine. It holds two parts in shared memory, and writes
what it reads and how the parts are mapped.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from pipeline.models.worker.offload.host_memory import training_memory
from tests.pipeline.models.worker.offload.mappings import open_files, shared_mappings

SIZES = (5_000_000, 4096)


def main(folder: Path, rank: int, size: int) -> None:
    store = distributed.FileStore(str(folder / "store"), size)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    random = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, 255, (size,), dtype=torch.uint8, generator=random) for size in SIZES]
    memory = training_memory(torch.device("cpu"))
    held = [memory.hold(part) for part in parts]
    equal = [torch.equal(one, other) for one, other in zip(held, parts, strict=True)]

    # Both processes have read all bytes, and neither has ended.
    distributed.barrier()
    result = {"equal": equal, "mapped": shared_mappings(), "open": open_files()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
