"""The previews of a run: their files, the sheet with all of them, and the pictures before and after training.

samples/step-<step>-<prompt number>.png     one preview; its text chunk `PROMPT_KEY` holds the prompt,
                                            chunks in `SETTING_KEYS` its settings other than the default
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import counted
from pipeline.reporting.grids import CELL_PX, evenly_spaced, fitted, picture_grid
from pipeline.reporting.pictures import jpeg

if TYPE_CHECKING:
    from PIL import Image

PROMPT_KEY = "prompt"
"""Key of the PNG text chunk with the prompt of a preview."""

SETTING_KEYS = (
    "negative_prompt",
    "height",
    "width",
    "steps",
    "guidance_scale",
    "seed",
    "lora_scale",
    "references",
)
"""Keys of the PNG text chunks with settings, in the order in which headings state them."""

MAX_PROMPTS = 60
"""Maximum number of columns of the sheet."""

MAX_STEPS = 24
"""Maximum number of rows of the sheet."""

MAX_CELLS = 480
"""Maximum number of pictures on the sheet; with many prompts, it shows fewer steps."""

MIN_STEPS = 4
"""Number of rows that the sheet has with any number of prompts."""

MAX_SHEET_BYTES = 8_000_000
"""Maximum size of the sheet."""

BEFORE_AFTER_PX = 512
"""Edge of a picture in the comparison of before and after."""

MAX_BEFORE_AFTER_BYTES = 1_000_000
"""Maximum size of the comparison of before and after."""


@dataclass(frozen=True, order=True)
class Preview:
    """One preview on disk, ordered by step and prompt.

    Attributes:
        step: Number of training steps before the preview was drawn.
        number: Index of its prompt in the recipe, from 0.
        heading: Its prompt, and its settings that differ from the defaults.
    """

    step: int
    number: int
    heading: str
    path: Path

    def open(self) -> Image.Image:
        """Read the picture in RGB.

        Raises:
            OSError: The file cannot be read.
        """
        from PIL import Image

        with Image.open(self.path) as picture:
            return picture.convert("RGB")


def preview_heading(prompt: str, settings: Mapping[str, str]) -> str:
    """Return a prompt with its settings, such as "a cat (negative prompt: blurry, steps: 30)"."""
    stated = [f"{key.replace('_', ' ')}: {settings[key]}" for key in SETTING_KEYS if key in settings]
    return f"{prompt or '(empty prompt)'} ({', '.join(stated)})" if stated else prompt


def number_text(number: float) -> str:
    """Return the shortest text of a number: "1" or "0.75"."""
    return repr(number).removesuffix(".0")


def preview_file(folder: Path, step: int, number: int) -> Path:
    """Return the path of a preview in the run's folder of previews."""
    return folder / f"step-{step:08d}-{number:02d}.png"


def read_previews(folder: Path, *, last_step: int | None = None) -> list[Preview]:
    """Return the readable previews in `folder`, which may be missing, ordered by step and prompt.

    With `last_step`, previews of later steps are omitted. A run that was shortened has such previews.
    """
    from PIL import Image

    previews: list[Preview] = []
    for path in folder.glob("step-*-*.png"):
        _, step, number = path.stem.split("-")
        if last_step is not None and int(step) > last_step:
            continue

        # An unreadable preview must not fail a run that is trained (FAILURES R09).
        with suppress(OSError), Image.open(path) as picture:
            prompt = str(picture.info.get(PROMPT_KEY, f"prompt {int(number) + 1}"))
            settings = {key: str(picture.info[key]) for key in SETTING_KEYS if key in picture.info}
            previews.append(Preview(int(step), int(number), preview_heading(prompt, settings), path))
    return sorted(previews)


def preview_sheet(previews: Sequence[Preview]) -> bytes:
    """Return a JPEG with a column for each prompt and a row for each step, or no bytes without previews."""
    # A prompt or setting that was changed during the run has a column for each version.
    columns = sorted({(each.number, each.heading) for each in previews})
    steps = sorted({each.step for each in previews})
    if not previews:
        return b""

    shown_columns = columns[:MAX_PROMPTS]
    most_steps = min(MAX_STEPS, max(MIN_STEPS, MAX_CELLS // len(shown_columns)))

    # The first and the last step of a long run are always among the rows.
    shown_steps = [steps[index] for index in evenly_spaced(len(steps), most_steps)]
    by_cell = {(each.step, each.number, each.heading): each for each in previews}

    rows: list[tuple[str, list[Image.Image | None]]] = []
    for step in shown_steps:
        cells = [by_cell.get((step, *column)) for column in shown_columns]

        # Hundreds of full pictures would not fit into memory, so each is reduced as soon as it is read.
        pictures = [None if cell is None else fitted(cell.open(), CELL_PX) for cell in cells]
        rows.append((f"step {step:,}", pictures))

    counts = [
        counted(len(steps), "step")
        if len(shown_steps) == len(steps)
        else f"{len(shown_steps)} of {len(steps):,} steps",
        counted(len(columns), "prompt")
        if len(shown_columns) == len(columns)
        else f"{len(shown_columns)} of {len(columns):,} prompts",
    ]
    headings = [text or "(empty prompt)" for _, text in shown_columns]
    grid = picture_grid(rows, headings, title=f"Previews: {', '.join(counts)}")
    return jpeg(grid, MAX_SHEET_BYTES)


def before_after(previews: Sequence[Preview]) -> bytes:
    """Return a JPEG with the first prompt before the first step and after the last one, side by side.

    No bytes if the run has no previews of step 0 and of a later step.
    """
    # Reversed, so that the first prompt of each step is the one that remains.
    by_step = {each.step: each for each in reversed(previews)}
    if 0 not in by_step or len(by_step) == 1:
        return b""

    before, after = by_step[0], by_step[max(by_step)]
    headings = ["before training (step 0)", f"after {counted(after.step, 'step')}"]
    row = ("", [before.open(), after.open()])
    grid = picture_grid([row], headings, title=after.heading, cell_px=BEFORE_AFTER_PX)
    return jpeg(grid, MAX_BEFORE_AFTER_BYTES)
