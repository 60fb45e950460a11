"""Generator of docs/quick_starts.md, one section per large family of base models.

Run `python -m tools.docs.quick_starts_page` to write the page. Its settings are those of the example recipes,
and its memory and times those of docs/hardware.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.recipe import load_recipe
from pipeline.recipe.project import project_root
from pipeline.storage.atomic import write_text

EXAMPLES = Path("configs/examples")


@dataclass(frozen=True)
class QuickStart:
    """A section of the page.

    Attributes:
        title: Its heading.
        example: Name of the example recipe.
        rows: Rows of the table of cards in docs/hardware.md.
        measured: Start of rows in its table of an H100; empty if the model was not measured.
    """

    title: str
    example: str
    rows: tuple[str, ...]
    measured: str = ""


QUICK_STARTS = (
    QuickStart("Stable Diffusion XL", "flowers_sdxl", ("SDXL",), "SDXL"),
    QuickStart("Stable Diffusion 3.5", "flowers_sd35", ("SD3.5 medium",)),
    QuickStart("FLUX.1 dev", "flowers_flux_dev", ("FLUX.1 dev",), "FLUX.1 dev"),
    QuickStart("FLUX.1 Kontext, which edits images", "edits_flux_kontext", ()),
    QuickStart("FLUX.2 klein", "flowers_flux2_klein", ("FLUX.2 klein base 4B",)),
    QuickStart("FLUX.2 dev", "flowers_flux2_dev", ("FLUX.2 dev",)),
    QuickStart("Qwen-Image", "flowers_qwen_image", ("Qwen-Image",)),
    QuickStart("Z-Image", "flowers_z_image", ("Z-Image",)),
    QuickStart("Chroma", "flowers_chroma", ("Chroma1",)),
)

_TOP = """\
# Quick starts

One section for each large family of base models: the example recipe, what it needs, and the commands. The
dataset is a folder `data/flowers` of images with a text file next to each, as in
[getting_started.md](getting_started.md#3-the-dataset). Memory is a forecast, and times were measured on one
H100, see [hardware.md](hardware.md). The measured steps do not accumulate, but a step of an example
accumulates four batches of one image. `configs/examples/` has recipes for the other models.

`python -m tools.docs.quick_starts_page` generates this page from the example recipes and from hardware.md.
"""


def page_path() -> Path:
    """Return the path of the page."""
    return project_root() / "docs" / "quick_starts.md"


def page_text() -> str:
    """Return the page in Markdown."""
    hardware = (project_root() / "docs" / "hardware.md").read_text(encoding="utf-8")
    return "\n".join([_TOP, *(_section(each, hardware) for each in QUICK_STARTS)]).rstrip() + "\n"


def _section(start: QuickStart, hardware: str) -> str:
    file = project_root() / EXAMPLES / f"{start.example}.yaml"
    recipe, name = load_recipe(file), start.example.partition("_")[0]
    training = recipe.training
    batch = training.batch_size * training.gradient_accumulation
    lines = [
        f"## {start.title}",
        "",
        *_comment(file),
        "",
        "| | |",
        "|---|---|",
        f"| base model | `{recipe.model.base}` |",
        f"| resolution | {recipe.buckets.resolution} px |",
        f"| training | {training.num_steps:,} steps of {batch} images, rank {training.lora.rank}, "
        f"learning rate {training.learning_rate:g} |",
        *_cards(start, hardware),
        *_times(start, hardware),
        "",
        f"    cp {EXAMPLES}/{start.example}.yaml configs/{name}.yaml",
        f"    latentline plan {name}",
        f"    latentline run {name}",
        "",
    ]
    return "\n".join(lines)


def _comment(file: Path) -> list[str]:
    """Return the comment at the top of an example, without the lines that all examples have."""
    comment = re.findall(
        r"^# ?(.*)$", file.read_text(encoding="utf-8").partition("datasets:")[0], re.MULTILINE
    )
    return [line for line in comment if line and not line.startswith("yaml-language-server")]


def _cards(start: QuickStart, hardware: str) -> list[str]:
    table = hardware.partition("<!-- cards: begin -->")[2].partition("<!-- cards: end -->")[0]
    heading, *rows = [_cells(line) for line in table.splitlines() if line.startswith("| ")]
    by_model = {cells[0]: dict(zip(heading[2:], cells[2:], strict=True)) for cells in rows}
    texts = [
        ", ".join(f"{card}: {setting}" for card, setting in by_model[model].items() if setting != "-")
        for model in start.rows
    ]
    return [f"| fits | {text} |" for text in texts]


def _times(start: QuickStart, hardware: str) -> list[str]:
    if not start.measured:
        return []
    table = hardware.partition("## Measured on an H100")[2].partition("\n- ")[0]
    rows = [_cells(line) for line in table.splitlines() if line.startswith(f"| {start.measured}")]
    texts = [f"{seconds} s per step ({training})" for training, _, _, seconds, _ in rows]
    return [f"| on an H100 | {'; '.join(texts)} |"]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


if __name__ == "__main__":
    write_text(page_path(), page_text())
