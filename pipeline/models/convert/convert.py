"""Conversion of a single file into a diffusers folder.

The file's components are converted, and missing ones are copied from the reference model. The folder appears
under its final name only when it is complete and Latentline can read it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ModelError
from pipeline.models.convert.contents import Contents, Part
from pipeline.models.convert.job import ComponentJob, ConversionJob, write_job
from pipeline.models.convert.reference import (
    is_component,
    local_component_files,
    present_roles,
    resolve_reference,
)
from pipeline.models.convert.schedule import Schedule, choose_schedule, recorded_schedule
from pipeline.models.diffusers_folder import index_file, read_json
from pipeline.models.families import detect
from pipeline.processes.launch import LocalLaunch
from pipeline.recipe import AccelerateSettings
from pipeline.storage.atomic import sync_file, sync_folder, temp_path_for, write_text

if TYPE_CHECKING:
    from pipeline.models.families import BetaPrediction, Family
    from pipeline.processes.launch import Launch

ENTRY_MODULE = "pipeline.models.convert.worker"

_VAE_PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
_SCHEDULE_FILE = "scheduler_config.json"


@dataclass(frozen=True)
class Choices:
    """Options of a conversion.

    Attributes:
        reference: Folder or Hub id of the model that the file was made from; None for the usual one.
        parts_only: True to write only the components in the file, for `model.components`.
        prediction: Prediction of the denoiser; None for the one in the file or the reference.
        zero_snr: Whether the noise schedule ends with pure noise; None as for `prediction`.
    """

    reference: str | None = None
    parts_only: bool = False
    prediction: BetaPrediction | None = None
    zero_snr: bool | None = None


@dataclass(frozen=True)
class Plan:
    """A conversion with all inputs on this machine.

    Attributes:
        folder: Folder to write.
        building: Temporary name of the folder until it is complete.
        reference: Reference model as named by the user.
        family: Family of the reference model.
        schedule: Noise schedule of the folder; None for flow matching, which uses the reference's.
        copied: Components copied from the reference model.
    """

    contents: Contents
    folder: Path
    building: Path
    reference: str
    family: Family
    schedule: Schedule | None
    copied: tuple[str, ...]
    parts_only: bool

    @property
    def parts(self) -> dict[str, Part]:
        """Components in the file by role, the denoiser first."""
        return {self.family.spec.denoiser_name: self.contents.denoiser, **self.contents.parts}

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes to write."""
        files = [
            path for role in self.copied for path in local_component_files(self.family.model.component(role))
        ]
        return self.contents.header.file.stat().st_size + sum(path.stat().st_size for path in files)


def plan_conversion(contents: Contents, folder: Path, choices: Choices) -> Plan:
    """Return the plan of a conversion, after downloading missing files of the reference model.

    Raises:
        ModelError: The folder exists, or the file was not made from the reference model.
        FamilyError: The family of the reference model is not supported.
    """
    if folder.exists() or folder.is_symlink():
        fix = "name a new folder, or remove the existing one"
        raise ModelError("the folder exists already and is never overwritten", where=str(folder), fix=fix)

    reference = choices.reference or contents.reference
    family = resolve_reference(reference, ())
    if family.spec.name != contents.layout.family:
        raise ModelError(
            f"the file contains {contents.layout.name}, but --like is {family.spec.name}",
            where=f"{contents.header.file}, --like {reference}",
            fix=f"name a model of the same family; without --like, {contents.reference} is used",
        )

    # Only now are the components known whose weights must be downloaded.
    roles_in_file = {family.spec.denoiser_name, *contents.parts}
    copied: tuple[str, ...] = ()
    if not choices.parts_only:
        roles = present_roles(family)
        copied = tuple(role for role in roles if role not in roles_in_file and role != "scheduler")
    family = resolve_reference(reference, copied)

    schedule = _schedule(contents, family, choices)
    if choices.parts_only and schedule is not None and schedule.config != family.scheduler_config:
        raise ModelError(
            f"the model in the file predicts {schedule.prediction} and has another noise schedule "
            f"than {reference}, but --parts-only does not write a noise schedule",
            where=f"{contents.header.file}, --parts-only",
            fix="run the command without --parts-only, and set model.base to the new folder",
        )
    building = temp_path_for(folder)
    return Plan(contents, folder, building, reference, family, schedule, copied, choices.parts_only)


def convert(plan: Plan, *, launch: Launch | None = None) -> Family:
    """Write the folder, and return the family that Latentline detects in it. After an error, nothing remains.

    Raises:
        ModelError: The file does not match the reference model.
        LaunchError: The process failed for another reason.
        OSError: The disk is full, or the folder cannot be written.
    """
    plan.building.mkdir(parents=True)
    try:
        _convert_components(plan, launch or LocalLaunch(AccelerateSettings()))
        if not plan.parts_only:
            _add_other_components(plan)

        # Otherwise a power failure could leave empty files under the final name.
        for path in (*plan.building.rglob("*"), plan.building):
            (sync_folder if path.is_dir() else sync_file)(path)
        _verify(plan, plan.building)
        plan.building.rename(plan.folder)
        sync_folder(plan.folder.parent)
    except BaseException:
        shutil.rmtree(plan.building, ignore_errors=True)
        raise
    return _verify(plan, plan.folder)


def vae_scaling(family: Family) -> float | None:
    """Return the `scaling_factor` of the family's VAE; None if it has none."""
    return read_json(family.model.component("vae") / "config.json").get("scaling_factor")


def _schedule(contents: Contents, family: Family, choices: Choices) -> Schedule | None:
    if family.prediction_type() == "flow":
        if choices.prediction is not None or choices.zero_snr is not None:
            raise ModelError(
                f"{contents.layout.name} is a flow model and predicts neither noise nor velocity",
                where="--prediction, --zero-snr",
                fix="remove both options",
            )
        return None
    recorded = recorded_schedule(contents.header)
    return choose_schedule(
        family.scheduler_config, recorded, prediction=choices.prediction, zero_snr=choices.zero_snr
    )


def _convert_components(plan: Plan, launch: Launch) -> None:
    with tempfile.TemporaryDirectory(prefix="latentline-") as scratch:
        job_file = Path(scratch) / "job.json"
        file = plan.contents.header.file.resolve()
        components = {role: _component_job(plan, role, part) for role, part in plan.parts.items()}
        write_job(ConversionJob(file, plan.family.model.path, plan.building.resolve(), components), job_file)
        launch(ENTRY_MODULE, job_file)


def _component_job(plan: Plan, role: str, part: Part) -> ComponentJob:
    tensors = plan.contents.header.with_prefix(part.prefix, part.without)
    if role == plan.family.spec.denoiser_name:
        unused = tuple(part.prefix + name for name in plan.contents.layout.unused)
        num_values = sum(tensor.num_values for name, tensor in tensors.items() if name not in unused)
        return ComponentJob("denoiser", part.prefix, part.dtype, num_values, part.without)
    if role == "text_conditioner":
        num_values = sum(tensor.num_values for tensor in tensors.values())
        return ComponentJob("same_names", part.prefix, part.dtype, num_values)
    if role == "vae":
        prefixes = tuple(part.prefix + name for name in _VAE_PARTS)
        num_values = sum(tensor.num_values for name, tensor in tensors.items() if name.startswith(prefixes))
        return ComponentJob("vae", part.prefix, part.dtype, num_values)
    return ComponentJob("text_encoder", part.prefix, part.dtype)


def _add_other_components(plan: Plan) -> None:
    for role in plan.copied:
        (plan.building / role).mkdir()
        for path in local_component_files(plan.family.model.component(role)):
            shutil.copyfile(path, plan.building / role / path.name)

    config = plan.schedule.config if plan.schedule else plan.family.scheduler_config
    _write_json(plan.building / "scheduler" / _SCHEDULE_FILE, config)
    index = index_file(plan.family.model.path)
    if plan.family.is_modular:
        # It has no optional components.
        shutil.copyfile(index, plan.building / index.name)
    else:
        _write_json(plan.building / index.name, _index(plan, config))


def _index(plan: Plan, scheduler: Mapping[str, Any]) -> dict[str, Any]:
    # diffusers does not load components that are null in the index, such as a safety checker.
    written = {*plan.parts, *plan.copied}
    index = {
        name: [None, None] if is_component(entry) and name not in written else entry
        for name, entry in plan.family.model.index.items()
    }
    class_name = scheduler.get("_class_name")
    is_same = class_name == plan.family.scheduler_config.get("_class_name")
    index["scheduler"] = plan.family.model.index["scheduler"] if is_same else ["diffusers", class_name]
    return index


def _verify(plan: Plan, folder: Path) -> Family:
    """Return the family detected in the folder, or in the reference model with the folder's components."""
    if plan.parts_only:
        family = detect(plan.family.model.path, {role: folder / role for role in plan.parts})
    else:
        family = detect(folder, {})
        resolve_reference(str(folder), None)

    expected = plan.schedule.prediction if plan.schedule else "flow"
    if family.spec.name != plan.family.spec.name or family.prediction_type() != expected:
        raise ModelError(
            f"the converted model must be {plan.family.spec.name} with prediction {expected}, "
            f"got {family.spec.name} with prediction {family.prediction_type()}",
            where=str(folder),
            fix="report a bug in Latentline, with the names of the file and of the reference model",
        )
    return family


def _write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
