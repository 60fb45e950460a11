"""A dataset of images and their reference images, for complete jobs with editing models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tests.e2e.workspace import Workspace

NUM_PAIRS = 12


def write_pairs(root: Path) -> Workspace:
    """Write 12 pairs of image and reference, of which 4 are landscape, without model and recipe."""
    workspace = Workspace(root, root / "model")
    workspace.data.mkdir()
    (root / "before").mkdir()
    for index in range(NUM_PAIRS):
        coarse = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        width = 96 if index % 3 == 0 else 64
        image = Image.fromarray(coarse).resize((width, 64), Image.Resampling.BICUBIC)
        image.save(workspace.data / f"{index}.png")
        (workspace.data / f"{index}.txt").write_text("make it dark\n", encoding="utf-8")
        image.resize((width + 16, 80)).save(root / "before" / f"{index}.webp", lossless=True)
    return workspace


def closed_gates(workspace: Workspace, asset: str) -> dict[str, str]:
    checks = workspace.report(f"{asset}_checks")["checks"]
    return {check["name"]: check["summary"] for check in checks if check["closed"]}


def preview_references(run_folder: Path) -> set[str]:
    """Return the references that the previews of the only prompt state."""
    found: set[str] = set()
    for path in run_folder.rglob("*.png"):
        with Image.open(path) as image:
            if image.info.get("prompt") == "make it dark":
                found.add(image.info["references"])
    return found
