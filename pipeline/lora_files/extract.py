"""Extracting a LoRA from two models: a fine-tuned one and the one that it was made from.

The work needs torch, so a launched process does it; see `pipeline.lora_files.worker.extract`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.errors import LoraFileError
from pipeline.lora_files.layers import Dtype
from pipeline.models.convert.reference import resolve_reference
from pipeline.processes.launch import LocalLaunch
from pipeline.recipe import AccelerateSettings
from pipeline.storage.atomic import allow_readers, sync_file, sync_folder, temp_path_for, write_text

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.processes.launch import Launch

ENTRY_MODULE = "pipeline.lora_files.worker"

RESULT_FILE = "result.json"
"""Written next to the job file by the process."""

_DENOISERS = ("unet", "transformer")

Targets = Literal["attention", "blocks"]


@dataclass(frozen=True)
class Extraction:
    """Settings of an extraction.

    Attributes:
        rank: Rank of each layer.
        targets: Layers of the LoRA, as `training.lora.targets` of a recipe.
        conv_rank: Rank of convolutions; None leaves them out.
        dtype: Dtype of the files.
    """

    rank: int
    targets: Targets = "blocks"
    conv_rank: int | None = None
    dtype: Dtype = "float32"


@dataclass(frozen=True)
class ExtractionJob:
    """What the process extracts.

    Attributes:
        base: Diffusers folder of the model that `tuned` was made from.
        tuned: Diffusers folder of the fine-tuned model.
        folder: Existing folder for the files.
        name: First part of the names of kohya's and ComfyUI's files.
    """

    base: Path
    tuned: Path
    folder: Path
    name: str
    settings: Extraction


@dataclass(frozen=True)
class Extracted:
    """The result of an extraction.

    Attributes:
        num_layers: Number of layers of the LoRA.
        energy: Part of the squared difference of these layers that the LoRA has.
        least: The layer with the smallest such part, and this part.
        outside: Part of the squared difference of the entire denoiser that is in other layers.
        largest_outside: The other weight that differs most; empty if none differs.
    """

    num_layers: int
    energy: float
    least: tuple[str, float]
    outside: float
    largest_outside: str


def extract(
    base: str, tuned: str, folder: Path, settings: Extraction, *, launch: Launch | None = None
) -> Extracted:
    """Write a LoRA that turns `base` into `tuned` into a new folder, in three layouts.

    Args:
        base: Diffusers folder or Hub id of the original model.
        tuned: Diffusers folder or Hub id of the fine-tuned model.
        folder: The new folder; it appears when it is complete.
        settings: Size and layers of the LoRA.
        launch: Starts the process; None starts it on this machine.

    Raises:
        ModelError: A model is missing.
        LoraFileError: The folder exists, or the models do not fit each other.
    """
    if folder.exists():
        fix = "choose another name, or delete it"
        raise LoraFileError("the new folder exists already", where=str(folder), fix=fix)
    families = [_family(model, where) for model, where in ((base, "BASE"), (tuned, "TUNED"))]
    if families[0].spec.name != families[1].spec.name:
        raise LoraFileError(
            f"the models must be of one family, got {families[0].spec.name} and {families[1].spec.name}",
            where=f"{base}\n{tuned}",
            fix="pass the model that the other one was made from as BASE",
        )

    building = temp_path_for(folder)
    building.mkdir(parents=True)
    try:
        before, after = (family.model.path for family in families)
        job = ExtractionJob(before, after, building.resolve(), folder.name, settings)
        result = _launched(job, launch or LocalLaunch(AccelerateSettings()))
        for path in building.iterdir():
            allow_readers(path)
            sync_file(path)
        building.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return result


def read_job(path: Path) -> ExtractionJob:
    """Return the job of the process."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    base, tuned, folder = (Path(fields[name]) for name in ("base", "tuned", "folder"))
    return ExtractionJob(base, tuned, folder, fields["name"], Extraction(**fields["settings"]))


def _family(model: str, where: str) -> Family:
    return resolve_reference(model, _DENOISERS, where=where)


def _launched(job: ExtractionJob, launch: Launch) -> Extracted:
    with tempfile.TemporaryDirectory(prefix="latentline-") as scratch:
        job_file = Path(scratch) / "job.json"
        write_text(job_file, json.dumps(asdict(job), default=str))
        launch(ENTRY_MODULE, job_file)
        fields = json.loads((Path(scratch) / RESULT_FILE).read_text(encoding="utf-8"))
    return Extracted(**(fields | {"least": tuple(fields["least"])}))
