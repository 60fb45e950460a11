"""`python -m tools.docs.gallery`: train the demo, and write docs/gallery.md with its pictures and scores.

It trains the demo's LoRA twice, the second time with shuffled captions, in about four minutes on two cores.
Run it by hand after a change of the demo or of its base model.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from demo.experiments import changed_demo, shuffle_captions, teach
from demo.learned import MAX_BEFORE, MAX_LOST, MIN_AFTER, SHEET_FILE, Learned
from pipeline.recipe.project import project_root

PAGE = Path("docs/gallery.md")
IMAGES = Path("docs/images")
SCORES_FILE = Path("docs/images/gallery.json")
PROVENANCE_FILE = Path("demo/base/provenance.json")

SHEETS = {"demo": "gallery_demo.png", "shuffled": "gallery_shuffled.png"}
"""File name of each training's pictures before and after."""

STEPS_SHEET = "gallery_steps.jpg"

TEMPLATE = Path(__file__).with_name("gallery_template.md")


@click.command()
def main() -> None:
    """Train the demo with its own and with shuffled captions, and write the page."""
    with tempfile.TemporaryDirectory(prefix="latentline-") as name:
        scores = {each: _train(Path(name) / each, shuffled=each == "shuffled") for each in SHEETS}
    SCORES_FILE.write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(render(), encoding="utf-8")


def _train(folder: Path, *, shuffled: bool) -> dict[str, float]:
    """Train in a new folder, copy the pictures into docs/, and return the scores."""
    folder.mkdir()
    recipe = changed_demo(folder)
    if shuffled:
        shuffle_captions(folder / "pictures")
    learned = teach(recipe)
    shutil.copy(recipe.output_dir / SHEET_FILE, IMAGES / SHEETS[folder.name])
    if not shuffled:
        shutil.copy(recipe.output_dir / "reports" / "trained_lora" / "samples.jpg", IMAGES / STEPS_SHEET)
    return asdict(learned)


def render() -> str:
    """Return the page for the stored scores and the base model's provenance."""
    root = project_root()
    scores = json.loads((root / SCORES_FILE).read_text("utf-8"))
    provenance = json.loads((root / PROVENANCE_FILE).read_text("utf-8"))
    learned, shuffled = Learned(**scores["demo"]), Learned(**scores["shuffled"])
    weights = (root / PROVENANCE_FILE).parent.rglob("*.safetensors")
    return TEMPLATE.read_text("utf-8").format(
        **asdict(learned),
        megabytes=sum(file.stat().st_size for file in weights) / 1e6,
        max_before=MAX_BEFORE,
        min_after=MIN_AFTER,
        max_lost=MAX_LOST,
        steps="0, 200 and 400",
        shuffled_concept=shuffled.concept_after,
        shuffled_known=shuffled.known_after,
        base_rows="\n".join(_base_row(row) for row in provenance["scores"]),
        vae_steps=provenance["vae"]["steps"],
        denoiser_steps=provenance["denoiser"]["steps"],
    )


def _base_row(row: Mapping[str, Any]) -> str:
    values = [f"{row[name]:.2f}" for name in ("shape", "colour", "background", "all_three", "concept")]
    return f"| {row['seed']} | {' | '.join(values)} |"


if __name__ == "__main__":
    main()
