"""The demo's base model: a tiny Stable Diffusion with random weights, made offline.

python -m demo.tiny_model models/tiny-sd
"""

import sys
from pathlib import Path


def write_tiny_model(folder: Path) -> bool:
    """Make the model, unless the folder holds a whole one already.

    Returns:
        True if it was made now.
    """
    if (folder / "model_index.json").exists():
        return False
    from demo.tiny_models import make_tiny
    from pipeline.models.worker.loading import keep_quiet

    keep_quiet()
    make_tiny(folder)
    return True


if __name__ == "__main__":
    target = Path(sys.argv[1])
    made = "made" if write_tiny_model(target) else "there already"
    print(
        f"demo model: {target} {made} (Stable Diffusion classes, random weights: it draws noise, by design)"
    )
