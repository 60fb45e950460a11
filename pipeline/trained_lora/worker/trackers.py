"""TensorBoard and Weights & Biases, through accelerate's trackers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from accelerate.tracking import GeneralTracker, WandBTracker
from PIL import Image

from pipeline.trained_lora.provenance import shareable
from pipeline.trained_lora.run_folder import RunLayout

if TYPE_CHECKING:
    from accelerate import Accelerator

    from pipeline.trained_lora.job import TrainingJob


def requested_trackers(job: TrainingJob) -> list[str | GeneralTracker]:
    """Return the trackers that the recipe names, for `Accelerator(log_with=...)`."""
    names = job.recipe.training.trackers
    trackers: list[str | GeneralTracker] = []
    if "tensorboard" in names:
        trackers.append("tensorboard")
    if "wandb" in names:
        # An instance instead of a name: accelerate gives all named trackers the same project name, which is
        # the name of TensorBoard's folder.
        trackers.append(
            WandBTracker(
                "latentline",
                name=f"{job.recipe.name}-{job.run}",
                id=job.run,
                resume="allow",
                dir=str(RunLayout(job.folder).metrics.parent),
                config=shareable(job.recipe),
            )
        )
    return trackers


def start_trackers(accelerator: Accelerator, job: TrainingJob, *, start: int) -> None:
    """Start the trackers of a run that continues after `start` optimizer steps, on the main process only."""
    folder = RunLayout(job.folder).metrics.parent
    folder.mkdir(parents=True, exist_ok=True)

    # TensorBoard then hides the points that an earlier process logged after `start`, which come again.
    purge_step = start + 1 if start else 0
    accelerator.init_trackers(folder.name, init_kwargs={"tensorboard": {"purge_step": purge_step}})


def log_previews(accelerator: Accelerator, files: Sequence[Path], *, step: int) -> None:
    """Log the previews drawn after `step` optimizer steps: one TensorBoard tag per file, one W&B panel."""
    # TensorBoard's tracker takes arrays of pixels; W&B's tracker also takes paths.
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            for number, path in enumerate(files):
                with Image.open(path) as picture:
                    pixels = np.asarray(picture.convert("RGB"))
                tracker.log_images({f"samples/{number:02d}": pixels[None]}, step=step, dataformats="NHWC")
        else:
            tracker.log_images({"samples": [str(path) for path in files]}, step=step)
