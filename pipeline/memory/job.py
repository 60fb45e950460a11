"""Files between the command and the process that forecasts memory: the job, and its result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.memory.gpus import HIGHEST, LOWEST
from pipeline.recipe import CaptionSettings, Recipe
from pipeline.storage.atomic import write_text
from pipeline.trained_lora.job import recipe_from_json

RESULT_FILE = "memory.json"
"""Name of the result, which is written next to the job."""


@dataclass(frozen=True)
class CaptionerJob:
    """A captioning model to forecast.

    Attributes:
        captions: Settings of its captions.
        folder: Folder of the model, which may contain no weights.
        dtype: Dtype in which it runs, never "auto".
        examples: See `pipeline.captions.examples.examples_of`.
    """

    captions: CaptionSettings
    folder: Path
    dtype: str
    examples: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class MemoryJob:
    """A recipe to forecast.

    Attributes:
        recipe: Recipe with absolute paths.
        model_folder: Folder of the base model, which may contain configuration files only.
        component_folders: Folders of the components that replace the model's own, by role.
        card_bytes: Memory of the GPU to compare with; None for the GPU of this machine, if there is one.
        card: Name of that GPU in `gpus.GPUS`; None if only its memory is known, or for this machine's.
        captioners: Vision-language models that caption images; taggers run on the CPU.
    """

    recipe: Recipe
    model_folder: Path
    component_folders: Mapping[str, Path]
    card_bytes: int | None
    captioners: Sequence[CaptionerJob] = ()
    card: str | None = None


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of one stage. The attributes are keys of `latentline plan --json`.

    Attributes:
        stage: "write captions" for recipes with a vision-language model that captions images, "encode
            latents", "encode text", "train", or "draw previews" for recipes with previews.
        device_bytes: Peak bytes on one GPU.
        host_bytes: Peak bytes of one process on the host.
        note: What the stage does if it does not fit, what `offload: auto` resolves to, and that the GPU of
            this machine has no bf16.
    """

    stage: str
    device_bytes: int
    host_bytes: int
    note: str = ""


@dataclass(frozen=True)
class Change:
    """Changes of the recipe that make training fit. The attributes are keys of `latentline plan --json`.

    Attributes:
        settings: Changed settings with their new values.
        device_bytes: Peak bytes on one GPU with all of them.
        fits: Whether that fits; False if no combination does.
    """

    settings: tuple[str, ...]
    device_bytes: int
    fits: bool


@dataclass(frozen=True)
class ComputedTimes:
    """Computed times on one GPU. The attributes are keys of `latentline plan --json`.

    Times that were measured or published are between `lowest` and `highest` times the computed ones.

    Attributes:
        gpu: Name of the GPU in `gpus.GPUS`.
        height_px: Height of the images, which have the size of the recipe's largest bucket.
        width_px: Width of the images.
        latent_s: Seconds to encode the latent of one image.
        step_s: Seconds of a training step with all its micro-batches; None if it is not computed.
        not_counted: The recipe's setting because of which `step_s` is None; empty otherwise.
    """

    gpu: str
    height_px: int
    width_px: int
    latent_s: float
    step_s: float | None
    not_counted: str = ""
    lowest: float = LOWEST
    highest: float = HIGHEST


@dataclass(frozen=True)
class MemoryForecast:
    """Memory and times of a recipe. The attributes are keys of `latentline plan --json`.

    Attributes:
        stages: Peak memory of each stage, in the order of a job.
        card: Name of the GPU, or None if there is none to compare with.
        usable_bytes: Part of the GPU's memory that tensors can use.
        change: Cheapest changes that make training fit; None if it fits, or without a GPU.
        machine_bytes: Memory of this machine, or of the container that the forecast ran in.
        times: Computed times; None for a GPU that is not in `gpus.GPUS`, or without one.
    """

    stages: tuple[StageMemory, ...]
    card: str | None
    card_bytes: int | None
    usable_bytes: int | None
    change: Change | None
    machine_bytes: int
    times: ComputedTimes | None = None


def write_job(job: MemoryJob, path: Path) -> None:
    """Write a job for `read_job`."""
    values: dict[str, Any] = {
        "recipe": job.recipe.model_dump(mode="json"),
        "model_folder": str(job.model_folder),
        "component_folders": {role: str(folder) for role, folder in job.component_folders.items()},
        "card_bytes": job.card_bytes,
        "card": job.card,
        "captioners": [
            {
                "captions": each.captions.model_dump_json(),
                "folder": str(each.folder),
                "dtype": each.dtype,
                "examples": list(each.examples),
            }
            for each in job.captioners
        ],
    }
    write_text(path, json.dumps(values))


def read_job(path: Path) -> MemoryJob:
    """Return the job written by `write_job`."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return MemoryJob(
        recipe_from_json(values["recipe"]),
        Path(values["model_folder"]),
        {role: Path(folder) for role, folder in values["component_folders"].items()},
        values["card_bytes"],
        [
            CaptionerJob(
                CaptionSettings.model_validate_json(each["captions"]),
                Path(each["folder"]),
                each["dtype"],
                each["examples"],
            )
            for each in values["captioners"]
        ],
        values["card"],
    )


def write_result(forecast: MemoryForecast, job_file: Path) -> None:
    """Write the result of a job for `read_result`."""
    write_text(job_file.with_name(RESULT_FILE), json.dumps(asdict(forecast)))


def read_result(job_file: Path) -> MemoryForecast:
    """Return the result of a job."""
    values = json.loads(job_file.with_name(RESULT_FILE).read_text(encoding="utf-8"))
    stages = tuple(StageMemory(**stage) for stage in values.pop("stages"))
    change = values.pop("change")
    if change is not None:
        change = Change(tuple(change["settings"]), change["device_bytes"], change["fits"])
    times = values.pop("times")
    if times is not None:
        times = ComputedTimes(**times)
    return MemoryForecast(stages=stages, change=change, times=times, **values)
