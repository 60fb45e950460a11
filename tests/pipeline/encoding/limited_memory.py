"""Run an encoding process under a memory limit. Usage: `limited_memory.py ORDER ALLOWANCE_BYTES`.

The allowance counts from the end of start-up. The kernel limits the address space, so allocations fail
as they do on a machine without free memory.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

from pipeline.vae_latents.worker import encoder as latent_encoder
from tests.in_process_worker import run

WARM_UP_PX = 256
"""Edge of the warm-up image. What torch loads and allocates for it does not count against the allowance."""


class StdoutListener:
    def info(self, text: str) -> None:
        sys.stdout.write(text + "\n")

    def phase(self, text: str) -> None: ...

    def progress(self, done: int, total: int, text: str, **details: str) -> None:
        sys.stdout.write(f"{done}/{total} {text}\n")


def main(encoding: Path, allowance: int) -> None:
    original_init = latent_encoder.LatentEncoder.__init__

    def limited_init(self: latent_encoder.LatentEncoder, *arguments: object) -> None:
        original_init(self, *arguments)  # type: ignore[arg-type]
        batches = self.batches
        batches.family.vae.posterior(batches.vae, torch.zeros((1, 3, WARM_UP_PX, WARM_UP_PX)))
        current_bytes = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (current_bytes + allowance, resource.RLIM_INFINITY))

    latent_encoder.LatentEncoder.__init__ = limited_init  # type: ignore[method-assign]
    run(encoding, StdoutListener(), rank=0, num_ranks=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
