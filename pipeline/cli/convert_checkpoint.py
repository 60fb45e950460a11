"""`latentline convert-checkpoint`: one .safetensors file becomes the diffusers folder that recipes take."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.arguments import as_recipes_have_it
from pipeline.cli.sizes import bytes_text

if TYPE_CHECKING:
    from pipeline.models.convert.convert import Plan
    from pipeline.models.families import BetaPrediction, Family

_MB = 1_000_000
_PATH = click.Path(path_type=Path)


@click.command
@click.argument("file", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option(
    "--like",
    metavar="BASE",
    help="Folder or Hub id of the model that FILE was made from; else the usual one.",
)
@click.option("--parts-only", is_flag=True, help="Write only what FILE holds, for model.components.")
@click.option(
    "--prediction",
    type=click.Choice(["epsilon", "v_prediction"]),
    help="What its UNet predicts, if FILE does not say it right.",
)
@click.option(
    "--zero-snr/--no-zero-snr", default=None, help="Whether its noise schedule ends in noise alone."
)
def command(
    file: Path,
    folder: Path,
    like: str | None,
    parts_only: bool,
    prediction: BetaPrediction | None,
    zero_snr: bool | None,
) -> None:
    """Make FOLDER, a diffusers folder for model.base, of FILE, a model in one .safetensors file.

    Weights keep their number format. Configurations, and the parts that FILE does not hold, are those of the
    model that it was made from; a folder in --like needs no network. FILE is only read, and FOLDER appears
    when it is complete.
    """
    from pipeline.models.convert.contents import read_contents
    from pipeline.models.convert.convert import Choices, convert, plan_conversion
    from pipeline.reporting.progress import progress

    contents = read_contents(file)
    choices = Choices(like=like, parts_only=parts_only, prediction=prediction, zero_snr=zero_snr)
    click.echo(f"{file}: {contents.layout.name}, made like {like or contents.like}", err=True)
    plan = plan_conversion(contents, folder, choices)
    with progress(
        lambda: _size(plan.building) // _MB,
        plan.num_bytes // _MB,
        "MB written",
        log=lambda line: click.echo(line, err=True),
    ):
        family = convert(plan)
    for line in _told(plan, family):
        click.echo(line)


def _size(folder: Path) -> int:
    size = 0
    with suppress(OSError):  # renamed meanwhile
        for path in folder.rglob("*"):
            with suppress(OSError):
                size += path.stat().st_size if path.is_file() else 0
    return size


def _told(plan: Plan, family: Family) -> list[str]:
    """What was written, of what, and the lines for a recipe."""
    lines = [f"wrote {plan.folder}, {bytes_text(_size(plan.folder))}: {family.name}"]
    for role, part in plan.parts.items():
        also = f" (some of it was {', '.join(part.others)})" if part.others else ""
        lines.append(f"  {role}: of the file, in {part.dtype}{also}")
    if plan.contents.left:
        lines.append(f"  left in the file: {', '.join(plan.contents.left)}")
    if plan.copied:
        lines.append(f"  {', '.join(plan.copied)}: copied from {plan.like}")
    lines += [*_schedule_told(plan), *_vae_told(plan, family)]
    lines += ["in a recipe:", *(f"  {line}" for line in _recipe_lines(plan))]
    if plan.copied and not plan.contents.parts and not plan.parts_only:
        lines += [
            f"or with no copy of what {plan.like} has anyway: --parts-only writes the {family.denoiser_name} "
            "alone, for model.components"
        ]
    return lines


def _schedule_told(plan: Plan) -> list[str]:
    if plan.schedule is None:
        return []
    from_where = {
        "the file": "as the file says",
        "--prediction": "as --prediction says",
        "--like": f"as {plan.like} does; the file does not say, and --prediction can",
    }
    line = f"  it predicts {plan.schedule.prediction}, {from_where[plan.schedule.source]}"
    zero = "; its noise schedule ends in noise alone (zero terminal SNR)" if plan.schedule.zero_snr else ""
    return [line + zero]


def _vae_told(plan: Plan, family: Family) -> list[str]:
    from pipeline.models.convert.convert import vae_scaling

    has, usual = vae_scaling(family), plan.contents.layout.vae_scaling
    if usual is None or has == usual:
        return []
    return [
        f"  WARNING: its VAE's scaling_factor is {has}, as {plan.like} has it; {plan.contents.layout.name} "
        f"usually has {usual}"
    ]


def _recipe_lines(plan: Plan) -> list[str]:
    folder = as_recipes_have_it(str(plan.folder))
    if not plan.parts_only:
        return ["model:", f"  base: {folder}"]
    parts = ", ".join(f"{role}: {folder}" for role in plan.parts)
    return ["model:", f"  base: {as_recipes_have_it(plan.like)}", f"  components: {{{parts}}}"]
