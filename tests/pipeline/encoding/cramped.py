"""An encoding process whose memory really runs out: ORDER, and the bytes it may ask for beyond a start-up.

The limit is the kernel's, on the address space, so that allocations fail as they do on a full machine.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

from pipeline.vae_latents.worker import encoder as latent_encoder
from tests.worker_runs import run

SETTLED_PX = 256
"""What a first pass of this edge makes torch load and allocate is no part of the allowance."""


class Said:
    def info(self, text: str) -> None:
        sys.stdout.write(text + "\n")

    def progress(self, done: int, total: int, text: str) -> None:
        sys.stdout.write(f"{done}/{total} {text}\n")


def main(order: Path, allowance: int) -> None:
    loaded = latent_encoder.LatentEncoder.__init__

    def limited(self: latent_encoder.LatentEncoder, *arguments: object) -> None:
        loaded(self, *arguments)  # type: ignore[arg-type]
        batches = self._batches
        batches._family.vae.posterior(batches._vae, torch.zeros((1, 3, SETTLED_PX, SETTLED_PX)))
        now = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (now + allowance, resource.RLIM_INFINITY))

    latent_encoder.LatentEncoder.__init__ = limited  # type: ignore[method-assign]
    run(order, Said(), rank=0, num_ranks=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
