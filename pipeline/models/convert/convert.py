"""From a single file to a diffusers folder: what it is, its parts converted, the others from elsewhere.

The folder appears under its name when it is complete and has been looked at, and never before.
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
from pipeline.models.convert.job import Order, PartOrder
from pipeline.models.convert.like import files_of, is_component, present_roles, resolve_like
from pipeline.models.convert.schedule import Schedule, said_by, schedule_of
from pipeline.models.diffusers_folder import read_json
from pipeline.models.families import detect
from pipeline.processes.launch import LocalLaunch
from pipeline.recipe import AccelerateSettings
from pipeline.storage.atomic import sync_file, sync_folder, temp_path_for, write_text

if TYPE_CHECKING:
    from pipeline.models.families import BetaPrediction, Family
    from pipeline.processes.launch import Launch

ENTRY_MODULE = "pipeline.models.convert.worker"

_VAE_PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
_SCHEDULE = "scheduler_config.json"


@dataclass(frozen=True)
class Choices:
    """What the user may say of a conversion.

    Attributes:
        like: Folder or Hub id of the model that the file is made from; None: the usual one of its layout.
        parts_only: Only the file's own parts are written, for `model.components`.
        prediction: What the denoiser predicts; None: what the file says, or else `like`.
        zero_snr: Whether the noise schedule ends in noise alone; None likewise.
    """

    like: str | None = None
    parts_only: bool = False
    prediction: BetaPrediction | None = None
    zero_snr: bool | None = None


@dataclass(frozen=True)
class Plan:
    """What a conversion will do, once everything that it needs is on this machine.

    Attributes:
        contents: Of the file.
        folder: What is written.
        building: Beside it: what it is called until it is whole.
        like: As the user has it.
        family: Of `like`.
        schedule: The folder's noise schedule; None for flow matching, which is as `like` has it.
        copied: Components that are taken from `like`.
        parts_only: As of `Choices`.
    """

    contents: Contents
    folder: Path
    building: Path
    like: str
    family: Family
    schedule: Schedule | None
    copied: tuple[str, ...]
    parts_only: bool

    @property
    def parts(self) -> dict[str, Part]:
        """The file's components by name, the denoiser first."""
        return {self.family.denoiser_name: self.contents.denoiser, **self.contents.parts}

    @property
    def num_bytes(self) -> int:
        """About how many will be written."""
        copied = sum(
            each.stat().st_size for role in self.copied for each in files_of(self.family.place(role))
        )
        return self.contents.header.file.stat().st_size + copied


def plan_conversion(contents: Contents, folder: Path, choices: Choices) -> Plan:
    """What will be done; configurations, and parts that the file lacks, are downloaded if they are not here.

    Raises:
        ModelError: The folder exists, or `like` is no model that the file can be made from.
        FamilyError: `like` is a model of a family that is not known.
    """
    if folder.exists() or folder.is_symlink():
        fix = "name a folder that is not there yet, or remove that one"
        raise ModelError("the folder exists, and nothing is ever replaced", where=str(folder), fix=fix)
    like = choices.like or contents.like
    light = resolve_like(like, ())
    if light.name != contents.layout.family:
        raise ModelError(
            f"the file holds {contents.layout.name}, and --like is {light.name}",
            where=f"{contents.header.file}, --like {like}",
            fix=f"name a model of the same family, such as {contents.like}; it is taken without --like too",
        )
    parts = {light.denoiser_name, *contents.parts}
    copied = (
        ()
        if choices.parts_only
        else tuple(role for role in present_roles(light) if role not in parts and role != "scheduler")
    )
    family = resolve_like(like, copied)
    schedule = _schedule(contents, family, choices)
    plan = Plan(contents, folder, temp_path_for(folder), like, family, schedule, copied, choices.parts_only)
    if plan.parts_only and schedule is not None and schedule.config != family.scheduler_config:
        raise ModelError(
            f"the file predicts {schedule.prediction}, which its noise schedule has to say, and "
            "model.components takes no schedule from elsewhere",
            where=f"{contents.header.file}, --parts-only",
            fix="convert it without --parts-only",
        )
    return plan


def _schedule(contents: Contents, family: Family, choices: Choices) -> Schedule | None:
    if family.prediction_type() == "flow":
        if choices.prediction is not None or choices.zero_snr is not None:
            raise ModelError(
                f"{contents.layout.name} learns a flow, and no noise or velocity",
                where="--prediction, --zero-snr",
                fix="leave them out",
            )
        return None
    said = said_by(contents.header)
    return schedule_of(
        family.scheduler_config, said, prediction=choices.prediction, zero_snr=choices.zero_snr
    )


def convert(plan: Plan, *, launch: Launch | None = None) -> Family:
    """Write the folder, and give the family that Latentline finds in it.

    Args:
        plan: As `plan_conversion`.
        launch: Runs the process that holds the model; None: one of this machine.

    Raises:
        ModelError: The file is not what it seemed; nothing is left.
        LaunchError: The process ended for another reason; nothing is left.
        OSError: The disk is full, or the folder cannot be written; nothing is left.
    """
    plan.building.mkdir(parents=True)
    try:
        _convert_parts(plan, launch or LocalLaunch(AccelerateSettings()))
        if not plan.parts_only:
            _add_others(plan)
        # so that its name never stands for empty files
        for path in (*plan.building.rglob("*"), plan.building):
            (sync_folder if path.is_dir() else sync_file)(path)
        _look_at(plan, plan.building)
        plan.building.rename(plan.folder)
        sync_folder(plan.folder.parent)
    except BaseException:
        shutil.rmtree(plan.building, ignore_errors=True)
        raise
    return _look_at(plan, plan.folder)


def _convert_parts(plan: Plan, launch: Launch) -> None:
    with tempfile.TemporaryDirectory(prefix="latentline-") as scratch:
        order_file = Path(scratch) / "order.json"
        file = plan.contents.header.file.resolve()
        orders = {role: _part_order(plan, role, part) for role, part in plan.parts.items()}
        Order(file, plan.family.folder, plan.building.resolve(), orders).write(order_file)
        launch(ENTRY_MODULE, order_file)


def _part_order(plan: Plan, role: str, part: Part) -> PartOrder:
    tensors = plan.contents.header.below(part.prefix)
    if role == plan.family.denoiser_name:
        unused = tuple(part.prefix + name for name in plan.contents.layout.unused)
        number = sum(each.num_values for name, each in tensors.items() if name not in unused)
        return PartOrder("denoiser", part.prefix, part.dtype, number)
    if role == "vae":
        of_vae = tuple(part.prefix + name for name in _VAE_PARTS)
        number = sum(each.num_values for name, each in tensors.items() if name.startswith(of_vae))
        return PartOrder("vae", part.prefix, part.dtype, number)
    return PartOrder("text_encoder", part.prefix, part.dtype)


def _add_others(plan: Plan) -> None:
    """The parts of `like` that the file lacks, the schedule, and the index of them all."""
    for role in plan.copied:
        (plan.building / role).mkdir()
        for source in files_of(plan.family.place(role)):
            shutil.copyfile(source, plan.building / role / source.name)
    config = plan.schedule.config if plan.schedule else plan.family.scheduler_config
    _write_json(plan.building / "scheduler" / _SCHEDULE, config)
    _write_json(plan.building / "model_index.json", _index(plan, config))


def _index(plan: Plan, scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """`like`'s index; a component that is not in the folder is null in it."""
    written = {*plan.parts, *plan.copied}
    index = dict[str, Any]()
    for name, said in plan.family.index.items():
        index[name] = [None, None] if is_component(said) and name not in written else said
    kept = scheduler.get("_class_name") == plan.family.scheduler_config.get("_class_name")
    index["scheduler"] = plan.family.index["scheduler"] if kept else ["diffusers", scheduler["_class_name"]]
    return index


def _look_at(plan: Plan, folder: Path) -> Family:
    """The family that is found in the folder, or with its parts in `like`.

    Raises:
        ModelError: It is another, its schedule says another prediction, or a file is missing.
    """
    elsewhere = {role: folder / role for role in plan.parts} if plan.parts_only else {}
    family = detect(plan.family.folder if plan.parts_only else folder, elsewhere)
    if not plan.parts_only:
        resolve_like(str(folder), None)
    wanted = plan.schedule.prediction if plan.schedule else "flow"
    if family.name != plan.family.name or family.prediction_type() != wanted:
        raise ModelError(
            f"what was written is read as {family.name} that predicts {family.prediction_type()}",
            where=str(folder),
            fix=f"report this: it should be {plan.family.name} that predicts {wanted}",
        )
    return family


def _write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def vae_scaling(family: Family) -> float | None:
    """`scaling_factor` of the family's VAE; None where it has none."""
    return read_json(family.place("vae") / "config.json").get("scaling_factor")
