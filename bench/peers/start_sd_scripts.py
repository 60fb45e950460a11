"""Start sd-scripts' train_network.py with the UNet size of a base model: `BASE ARGUMENTS...`.

Runs with the Python and in the folder of the checkout. sd-scripts builds the UNet from constants that only
fit Stable Diffusion 1.5 and 2; nothing else changes.
"""

from __future__ import annotations

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Set the constants, and run the script as `python train_network.py` does."""
    base = sys.argv.pop(1)
    sys.path[0] = str(Path.cwd())
    channels = json.loads(Path(base, "unet", "config.json").read_text(encoding="utf-8"))["block_out_channels"]
    unet: Any = import_module("library.original_unet")
    unet.BLOCK_OUT_CHANNELS = tuple(channels)
    unet.TIMESTEP_INPUT_DIM, unet.TIME_EMBED_DIM = channels[0], 4 * channels[0]
    sys.argv[0] = "train_network.py"
    runpy.run_path("train_network.py", run_name="__main__")


if __name__ == "__main__":
    main()
