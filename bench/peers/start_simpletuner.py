"""Start SimpleTuner's train.py so that it also trains without an accelerator: `CHECKOUT`.

Runs with the Python of the checkout. SimpleTuner pins the memory of each latent that it reads from its cache,
which torch refuses without an accelerator. There, pinning does nothing; nothing else changes.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch


def _unpinned(tensor: Any, *_: Any) -> Any:
    return tensor


def main() -> None:
    """Make pinning do nothing if there is no accelerator, and run the script as `python train.py` does."""
    script = Path(sys.argv.pop(1), "simpletuner", "train.py")
    if not torch.accelerator.is_available():
        tensor: Any = torch.Tensor
        tensor.pin_memory = _unpinned
    sys.path[0], sys.argv[0] = str(script.parent), str(script)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
