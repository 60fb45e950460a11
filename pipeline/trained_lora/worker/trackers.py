"""Where a run's numbers and pictures are shown while it trains: TensorBoard, and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from pipeline.trained_lora.job import TrainingJob


class Tracker(Protocol):
    """Takes numbers and pictures of a step, counted in optimizer steps done."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Show numbers by name."""
        ...

    def pictures(self, step: int, files: Sequence[Path]) -> None:
        """Show sample pictures."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Event files in a folder that `tensorboard --logdir` reads."""

    def __init__(self, folder: Path, start: int) -> None:
        """Go on after `start` steps; what an earlier process wrote of later ones is not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=start + 1 if start else 0)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Show numbers by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def pictures(self, step: int, files: Sequence[Path]) -> None:
        """Show sample pictures."""
        for number, path in enumerate(files):
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            self._writer.add_image(f"samples/{number:02d}", pixels, step, dataformats="HWC")

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project latentline, named by recipe and run; it is gone on with when the run resumes."""

    def __init__(self, order: TrainingJob, folder: Path) -> None:
        """Log in as the package is set up to; it writes its own files below `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._package: Any = import_module("wandb")
        self._run: Any = self._package.init(
            project="latentline",
            name=f"{order.recipe.name}-{order.run}",
            id=order.run,
            resume="allow",
            dir=str(folder),
            config=order.recipe.model_dump(mode="json"),
        )

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Show numbers by name."""
        self._run.log(dict(values), step=step)

    def pictures(self, step: int, files: Sequence[Path]) -> None:
        """Show sample pictures."""
        self._run.log({"samples": [self._package.Image(str(path)) for path in files]}, step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


def open_trackers(order: TrainingJob, folder: Path, start: int) -> list[Tracker]:
    """Those that the recipe names, going on after `start` steps, their files below `folder`."""
    names = order.recipe.training.trackers
    trackers: list[Tracker] = []
    if "tensorboard" in names:
        trackers.append(TensorBoard(folder, start))
    if "wandb" in names:
        trackers.append(WeightsAndBiases(order, folder))
    return trackers
