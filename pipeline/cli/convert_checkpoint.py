"""`latentline convert-checkpoint`: convert one .safetensors file to a diffusers folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.conventions import as_recipe_path, bytes_text, echo, log_to_stderr, report_broken_recipes
from pipeline.cli.json_output import give

if TYPE_CHECKING:
    from pipeline.models.convert.convert import Plan
    from pipeline.models.families import BetaPrediction, Family

_MB = 1_000_000
_PATH = click.Path(path_type=Path)


@click.command(short_help="Convert a .safetensors model to a diffusers folder.")
@click.argument("file", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option(
    "--like",
    metavar="BASE",
    help="Folder or Hub id of the model that FILE was derived from. By default, the published model of the "
    "same architecture, such as stabilityai/stable-diffusion-xl-base-1.0.",
)
@click.option(
    "--parts-only",
    is_flag=True,
    help="Write only the parts that FILE holds, for model.components of a recipe, and copy no others.",
)
@click.option(
    "--prediction",
    type=click.Choice(["epsilon", "v_prediction"]),
    help="What the UNet predicts, if FILE records it wrongly or not at all. By default as recorded in FILE, "
    "or else as in BASE.",
)
@click.option(
    "--zero-snr/--no-zero-snr",
    default=None,
    help="Whether the noise schedule ends with pure noise (zero terminal SNR). By default as recorded in "
    "FILE, or else as in BASE if the predictions are the same.",
)
def command(
    file: Path,
    folder: Path,
    like: str | None,
    parts_only: bool,
    prediction: BetaPrediction | None,
    zero_snr: bool | None,
) -> None:
    """Convert a model in one .safetensors file to a diffusers folder, which model.base of a recipe can name.

    FILE is the model and is only read. FOLDER must not exist yet; it appears when the conversion is complete.
    Weights keep their dtype.

    FILE contains no configurations, and it may lack parts such as text encoders or the VAE. These are copied
    from BASE. If BASE is a Hub id, the files that are needed are downloaded.
    """
    from pipeline.models.convert.contents import read_contents
    from pipeline.models.convert.convert import Choices, convert, plan_conversion
    from pipeline.reporting.progress import progress

    report_broken_recipes()
    contents = read_contents(file)
    choices = Choices(reference=like, parts_only=parts_only, prediction=prediction, zero_snr=zero_snr)
    echo(f"{file}: {contents.layout.name}, derived from {like or contents.reference}", err=True)
    plan = plan_conversion(contents, folder, choices)
    with progress(
        lambda: _folder_bytes(plan.building) // _MB,
        plan.num_bytes // _MB,
        "MB written",
        log=log_to_stderr,
    ):
        family = convert(plan)

    for line in _report(plan, family):
        echo(line)
    give(
        {
            "folder": plan.folder,
            "family": family.spec.name,
            "converted": {role: part.dtype for role, part in plan.parts.items()},
            "copied": plan.copied,
            "reference": plan.reference,
            "ignored": plan.contents.ignored,
            "schedule": plan.schedule and asdict(plan.schedule),
        }
    )


def _folder_bytes(folder: Path) -> int:
    num_bytes = 0
    with suppress(OSError):  # another process writes and renames these files
        for path in folder.rglob("*"):
            with suppress(OSError):
                num_bytes += path.stat().st_size if path.is_file() else 0
    return num_bytes


def _report(plan: Plan, family: Family) -> list[str]:
    lines = [f"wrote {plan.folder}, {bytes_text(_folder_bytes(plan.folder))}: {family.spec.name}"]
    for role, part in plan.parts.items():
        converted = f" (partly converted from {', '.join(part.others)})" if part.others else ""
        lines.append(f"  {role}: from the file, in {part.dtype}{converted}")
    if plan.contents.ignored:
        lines.append(f"  not converted: {', '.join(plan.contents.ignored)}")
    if plan.copied:
        lines.append(f"  {', '.join(plan.copied)}: copied from {plan.reference}")

    lines += [*_schedule_lines(plan), *_vae_lines(plan, family)]
    lines += ["in a recipe:", *(f"  {line}" for line in _recipe_lines(plan))]
    if plan.copied and not plan.contents.parts and not plan.parts_only:
        lines.append(
            f"to avoid copying the other parts of {plan.reference}, use --parts-only, which writes only the "
            f"{family.spec.denoiser_name} for model.components"
        )
    return lines


def _schedule_lines(plan: Plan) -> list[str]:
    if plan.schedule is None:
        return []
    source = {
        "the file": "according to the file",
        "--prediction": "according to --prediction",
        "--like": f"like {plan.reference}; the file does not record it, and --prediction can override it",
    }[plan.schedule.source]
    zero_snr = "; the noise schedule has zero terminal SNR" if plan.schedule.zero_snr else ""
    return [f"  predicts {plan.schedule.prediction}, {source}{zero_snr}"]


def _vae_lines(plan: Plan, family: Family) -> list[str]:
    from pipeline.models.convert.convert import vae_scaling

    scaling, usual = vae_scaling(family), plan.contents.layout.vae_scaling
    if usual is None or scaling == usual:
        return []
    return [
        f"  WARNING: the VAE's scaling_factor is {scaling}, from {plan.reference}, "
        f"but {plan.contents.layout.name} usually has {usual}"
    ]


def _recipe_lines(plan: Plan) -> list[str]:
    folder = as_recipe_path(str(plan.folder))
    if not plan.parts_only:
        return ["model:", f"  base: {folder}"]
    parts = ", ".join(f"{role}: {folder}" for role in plan.parts)
    return ["model:", f"  base: {as_recipe_path(plan.reference)}", f"  components: {{{parts}}}"]
