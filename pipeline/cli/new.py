"""`latentline new`: write a first recipe for a folder of images."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeline.cli.conventions import RECIPE, as_recipe_path, echo, report_broken_recipes
from pipeline.cli.json_output import give
from pipeline.errors import RUN_RECIPE, LatentlineError, RecipeError, counted
from pipeline.recipe import Recipe, load_recipe, path_in_recipe, recipes_dir
from pipeline.recipe.schema import name_mistake, valid_name
from pipeline.storage.addresses import Url

DEFAULT_BASE = "stabilityai/stable-diffusion-xl-base-1.0"


@click.command(short_help="Write a recipe for a folder of images.")
@click.argument("recipe")
@click.option(
    "--images",
    type=click.Path(path_type=Path),
    help="Folder of images and captions, a file with the captions of many images, or the dataset "
    "configuration of another trainer.",
)
@click.option("--base", help=f"Hub id or diffusers folder of the base model. By default {DEFAULT_BASE}.")
@click.option(
    "--from", "source", type=RECIPE, help="Recipe to copy, with an output folder of its own and all comments."
)
@click.option(
    "--preset",
    type=click.Choice(["subject", "style", "edit"]),
    help="Published settings for a goal and the family of the base model; the source is printed.",
)
@click.option(
    "--variant",
    type=click.IntRange(1),
    help="With --from: take over a variant of the recipe's last sweep, its settings and its run.",
)
@click.option("--steps", type=click.IntRange(1), help="Number of optimizer steps.")
@click.option("--epochs", type=click.IntRange(1), help="Epochs instead of --steps.")
@click.option("--rank", type=click.IntRange(1), help="Rank of the LoRA, and its alpha.")
@click.option("--learning-rate", type=click.FloatRange(0.0, min_open=True), help="Learning rate.")
@click.option("--resolution", type=click.IntRange(8), help="Edge of a square bucket in pixels.")
@click.option("--trigger", help="Trigger word: put in front of captions that do not contain it.")
def command(
    recipe: str, images: Path | None, base: str | None, source: Recipe | None, **options: Any
) -> None:
    """Write a recipe for a folder of images, or copy a recipe.

    RECIPE is its name, such as flowers for configs/flowers.yaml. An existing recipe is never overwritten.

    The command detects which files hold the captions, and chooses the resolution that the base model was
    trained at. Captions may also be in one file, such as metadata.jsonl, metadata.csv, captions.json or
    sd-scripts' meta_cap.json, in the folder or as --images. Nothing is downloaded.

    If you come from another trainer, pass its dataset configuration as --images (sd-scripts, OneTrainer,
    ai-toolkit, SimpleTuner or diffusion-pipe), or a folder in sd-scripts' layout, such as 10_rose. The
    command prints which settings it took over and which it could not.

    To try other settings, copy a recipe: latentline new flowers32 --from flowers --rank 32.

    After a sweep, latentline new best --from flowers --variant 7 writes that variant as a recipe. Its run is
    taken over, so that latentline run finds it finished and publishes its LoRA.
    """
    if options["steps"] is not None and options["epochs"] is not None:
        raise click.UsageError("--steps and --epochs exclude each other.")
    if (images is None) == (source is None):
        raise click.UsageError("Pass either --images, or --from with the recipe to copy.")
    if options["variant"] is not None and source is None:
        raise click.UsageError("--variant needs --from with the recipe of the sweep.")

    report_broken_recipes()
    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe
    if (mistake := name_mistake(name)) is not None:
        rest = ["--from", source.name] if source is not None else ["--images", str(images)]
        rest += ["--base", base] if base else []
        raise RecipeError(
            mistake,
            where=str(recipes_dir()),
            fix=shlex.join(["latentline", "new", valid_name(name), *rest]),
        )
    file = recipes_dir() / f"{name}.yaml"
    if file.exists():
        raise _already_exists(file)

    if source is not None:
        _copy(name, file, source, base, options)
    elif images is not None:
        _write_new(name, file, images, base or DEFAULT_BASE, options)
    echo(f"next: latentline plan {name}     shows what would be encoded, and gates that would close")
    echo(f"then: {RUN_RECIPE} {name} --cache-only, and latentline diagnose {name}: captions that do not fit")
    echo(f"then: {RUN_RECIPE} {name}")


def _write_new(name: str, file: Path, images: Path, base: str, options: dict[str, Any]) -> None:
    from pipeline.new_recipe.chosen_settings import with_settings
    from pipeline.new_recipe.recipe_text import (
        accepted_references,
        draft_recipe,
        model_resolution,
        new_manifests,
        recipe_text,
        resolution_remarks,
    )

    base_in_recipe = as_recipe_path(base)
    draft = draft_recipe(images, max_references=accepted_references(base_in_recipe))
    if (trigger := options["trigger"]) is not None:
        # Part of the draft, so that the preview prompt contains it too.
        draft.datasets = [
            replace(each, keys={**each.keys, "captions.trigger": trigger}) for each in draft.datasets
        ]
    size = model_resolution(base_in_recipe)
    settings = _settings(options, base_in_recipe)
    text = recipe_text(name, draft, base_in_recipe, size)
    text = with_settings(text, settings) if settings else text
    try:
        _require_valid(name, text, file)
    except LatentlineError as err:
        raise _about_options(err, file, images=images, base=base) from err

    # The recipe is the last file, so that it never names a manifest that does not exist yet.
    manifests = new_manifests(name, draft)
    _write_files({**manifests, file: text})
    remarks = [*draft.report(), *resolution_remarks(draft, size)]
    for line in remarks:
        echo(line)
    for path in manifests:
        echo(f"wrote {path}: the captions in the form that a recipe reads")
    echo(f"wrote {file}: {counted(draft.num_images, 'image')}")
    for line in draft.warnings():
        echo(f"WARNING: {line}", err=True)
    give(
        {
            "recipe": name,
            "file": file,
            "images": draft.num_images,
            "manifests": [*manifests],
            "remarks": remarks,
            "warnings": draft.warnings(),
        }
    )


def _copy(name: str, file: Path, source: Recipe, base: str | None, options: dict[str, Any]) -> None:
    from pipeline.new_recipe.chosen_settings import with_settings

    base_in_recipe = as_recipe_path(base) if base else source.model.base
    settings = {
        # Next to the other one, at an address too.
        "output_dir": f"{str(source.output_address).rpartition('/')[0]}/{name}",
        **({"model.base": base_in_recipe} if base else {}),
        **_settings(options, base_in_recipe),
    }
    if not isinstance(source.output_address, Url):
        settings["output_dir"] = path_in_recipe(source.output_dir.with_name(name))
    variant = None
    if options["variant"] is not None:
        from pipeline.new_recipe.sweep_variant import find_variant

        variant = find_variant(source, options["variant"])
    text = with_settings(source.source.read_text("utf-8"), settings, trigger=options["trigger"])
    if variant is not None:
        # As in the sweep, datasets with settings of their own keep them.
        swept = {**_exclusive(variant.settings), **variant.settings, "sweep": None}
        text = with_settings(text, swept, for_all=False)
    _require_valid(name, text, file)
    _write_files({file: text})
    echo(f"wrote {file}: a copy of {source.source.name}, output in {settings['output_dir']}")
    folder = None
    if variant is not None:
        from pipeline.new_recipe.sweep_variant import take_over_run

        folder = take_over_run(source, variant, load_recipe(file))
        echo(
            f"took over run {variant.run}: {folder}"
            if folder is not None
            else "the run of the variant is not on this machine: latentline run trains it again"
        )
    give({"recipe": name, "file": file, "copied_from": source.source, "settings": settings, "run": folder})


def _exclusive(settings: Mapping[str, Any]) -> dict[str, None]:
    """Return the key that a number of steps or epochs replaces, to be removed."""
    pairs = {"training.steps": "training.epochs", "training.epochs": "training.steps"}
    return {other: None for key, other in pairs.items() if key in settings}


def _settings(options: dict[str, Any], base: str) -> dict[str, Any]:
    """Return the recipe keys that preset and options choose; an option replaces the preset's value."""
    settings: dict[str, Any] = {}
    if (goal := options["preset"]) is not None:
        from pipeline.new_recipe.presets import find_preset

        preset = find_preset(goal, base)
        settings |= preset.settings
        echo(f"preset {goal} of {preset.family}, from {preset.source}:")
        echo(f"  {', '.join(f'{key} {value}' for key, value in preset.settings.items())}")
    if (rank := options["rank"] or settings.get("training.lora.rank")) is not None:
        settings |= {"training.lora.rank": rank, "training.lora.alpha": float(rank)}
    if options["learning_rate"] is not None:
        settings["training.learning_rate"] = options["learning_rate"]
    if options["steps"] is not None:
        settings |= {"training.steps": options["steps"], "training.epochs": None}
    if options["epochs"] is not None:
        settings |= {"training.epochs": options["epochs"], "training.steps": None}
    if options["resolution"] is not None:
        settings |= {"buckets.resolution": options["resolution"], "buckets.resolutions": None}
        settings["buckets.per_image"] = None
    return settings


def _write_files(files: dict[Path, str]) -> None:
    """Create the files in their order, and replace none."""
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another command may have written the recipe since the check before.
        try:
            with path.open("x", encoding="utf-8") as opened:
                opened.write(content)
        except FileExistsError as err:
            raise _already_exists(path) from err


def _already_exists(file: Path) -> RecipeError:
    return RecipeError(
        f"{file.name} already exists and is never overwritten",
        where=str(file),
        fix="choose another name, or edit that file",
    )


def _about_options(err: LatentlineError, file: Path, *, images: Path, base: str) -> LatentlineError:
    # The error names the file that would have been written. The user knows only the options.
    in_base, in_file = f"{file}, model.base", str(file)
    if err.where.startswith(in_base):
        where = f"--base {base}{err.where.removeprefix(in_base)}"
    elif err.where.startswith(in_file):
        rest = err.where.removeprefix(in_file)
        where = f"the new recipe for --images {images} --base {base}{rest}"
    else:
        return err
    return type(err)(err.what, where=where, fix=err.fix)


def _require_valid(name: str, text: str, file: Path) -> None:
    """Check the recipe as `latentline validate` would, before it is written to `file`."""
    from pipeline.cli.validate import check_settings
    from pipeline.recipe import load_recipe

    with tempfile.TemporaryDirectory(prefix="latentline-") as scratch:
        trial = Path(scratch) / f"{name}.yaml"
        trial.write_text(text, encoding="utf-8")
        check_settings(load_recipe(trial).model_copy(update={"source": file}))
