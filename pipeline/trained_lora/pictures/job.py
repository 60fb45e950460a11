"""The job of one `latentline sample`, which the command writes and the launched process reads.

<folder>/step-00000500-strength-0.5-prompt-01.png     one picture; its text chunks state how it was drawn
<folder>/sheet.jpg                                    all pictures with steps, strengths and prompts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.cache.store import EntrySpec
from pipeline.recipe import Recipe
from pipeline.storage.atomic import write_text
from pipeline.trained_lora.job import recipe_from_json
from pipeline.trained_lora.previews import number_text
from pipeline.trained_lora.prompts import (
    Prompt,
    entry_from_json,
    entry_to_json,
    prompts_from_json,
    prompts_to_json,
)

SHEET_FILE = "sheet.jpg"


@dataclass(frozen=True)
class LoraChoice:
    """A LoRA to draw with, in any layout of `export.lora_files`.

    `step` is the number of training steps after which it was saved; None if the file was given by its path.
    """

    file: Path
    step: int | None = None

    @property
    def label(self) -> str:
        """Name on the sheet: "step 1,500", or the file's name."""
        return self.file.name if self.step is None else f"step {self.step:,}"

    @property
    def stem(self) -> str:
        """Beginning of the names of its pictures."""
        return "lora" if self.step is None else f"step-{self.step:08d}"


@dataclass(frozen=True)
class Cell:
    """One picture of the grid of LoRAs, strengths and prompts; `number` is the prompt's index, from 0."""

    lora: LoraChoice
    strength: float
    number: int
    path: Path


@dataclass(frozen=True)
class DrawingJob:
    """Everything that the launched process needs.

    Attributes:
        recipe: Recipe with which the LoRA was trained, with `accelerate.num_processes` 1.
        empty_text: Entry of the empty caption, for guidance.
        prompts: Prompts with the size of their pictures. Their entries need not exist.
        loras: LoRAs of one run, or a single file.
        strengths: Factors of the LoRA's effect; 0 draws without it. Each is multiplied by the prompt's
            `lora_scale`.
        seed: Seed of the first noise of pictures with prompts without a seed.
        run: Run of the LoRAs; None for a file that was given by its path.
        component_folders: Folders of model components that replace those in `base`, by role.
    """

    recipe: Recipe
    base: Path
    empty_text: EntrySpec
    prompts: tuple[Prompt, ...]
    loras: tuple[LoraChoice, ...]
    strengths: tuple[float, ...]
    seed: int
    folder: Path
    run: str | None = None
    component_folders: Mapping[str, Path] = field(default_factory=dict[str, Path])

    def cells(self) -> Iterator[Cell]:
        """Yield all pictures by LoRA, strength and prompt, in the order in which they are drawn."""
        # By LoRA first, so that the process loads each file once.
        for lora in self.loras:
            for strength in self.strengths:
                for number in range(len(self.prompts)):
                    name = f"{lora.stem}-strength-{number_text(strength)}-prompt-{number + 1:02d}.png"
                    yield Cell(lora, strength, number, self.folder / name)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `drawing_job_from_json`."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "base": str(self.base),
            "component_folders": {role: str(folder) for role, folder in self.component_folders.items()},
            "empty_text": entry_to_json(self.empty_text),
            "prompts": prompts_to_json(self.prompts),
            "loras": [{"file": str(lora.file), "step": lora.step} for lora in self.loras],
            "strengths": self.strengths,
            "seed": self.seed,
            "folder": str(self.folder),
            "run": self.run,
        }

    def write(self, path: Path) -> Path:
        """Write the job for `read_drawing_job`, and return the path."""
        write_text(path, json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n")
        return path


def read_drawing_job(path: Path) -> DrawingJob:
    """Read the job that `DrawingJob.write` wrote."""
    return drawing_job_from_json(json.loads(path.read_text(encoding="utf-8")))


def drawing_job_from_json(values: Mapping[str, Any]) -> DrawingJob:
    """Return the job of `DrawingJob.to_json`."""
    folders = values["component_folders"].items()
    return DrawingJob(
        recipe=recipe_from_json(values["recipe"]),
        base=Path(values["base"]),
        component_folders={role: Path(folder) for role, folder in folders},
        empty_text=entry_from_json(values["empty_text"]),
        prompts=prompts_from_json(values["prompts"]),
        loras=tuple(LoraChoice(Path(lora["file"]), lora["step"]) for lora in values["loras"]),
        strengths=tuple(values["strengths"]),
        seed=values["seed"],
        folder=Path(values["folder"]),
        run=values["run"],
    )
