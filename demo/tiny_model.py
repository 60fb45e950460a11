"""A tiny Stable Diffusion with random weights, for complete jobs of some seconds during development.

    python -m demo.tiny_model models/tiny-sd

It is created offline, and its pictures are noise.
"""

import sys
from pathlib import Path


def write_tiny_model(folder: Path) -> bool:
    """Create the model unless the folder contains one.

    Returns:
        True if this call created it.
    """
    if (folder / "model_index.json").exists():
        return False
    from pipeline.models.worker.loading import keep_quiet

    keep_quiet()
    from demo.tiny_models import make_tiny

    make_tiny(folder)
    return True


if __name__ == "__main__":
    target = Path(sys.argv[1])
    state = "created" if write_tiny_model(target) else "exists"
    print(
        f"demo model: {target} {state} (Stable Diffusion classes, random weights, so its pictures are noise)"
    )
