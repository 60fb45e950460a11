"""Preparing a `latentline sample`: its LoRAs, prompts and folder, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import DrawingError, counted
from pipeline.models.recipe_support import reference_mistakes, require_preview_prompts
from pipeline.outputs.folder import outputs_of
from pipeline.recipe import PreviewPrompt
from pipeline.recipe.isolation import require_separate_folder
from pipeline.recipe.schema import PLACEHOLDER_FIX
from pipeline.trained_lora.context_file import require_same_context
from pipeline.trained_lora.export.earlier_step import exportable_run
from pipeline.trained_lora.job import JOB_FILE, read_recipe_and_prompts
from pipeline.trained_lora.pictures.choice import Steps, choose_file, choose_loras
from pipeline.trained_lora.pictures.job import SHEET_FILE, DrawingJob
from pipeline.trained_lora.prompts import Prompt, recipe_prompts, square_prompts
from pipeline.trained_lora.run_folder import RunLayout, lora_steps, run_folder
from pipeline.trained_lora.run_upload import fetch_lora

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import Recipe

MAX_PICTURES = 240
"""Maximum number of pictures. With one in each row, they fill a JPEG file of at most 65,535 pixel rows."""

PICTURES_FOLDER = Path("reports", "pictures")
"""Folder in output_dir with a numbered folder for each call."""


@dataclass(frozen=True)
class Request:
    """Options of one `latentline sample`.

    Attributes:
        run: Name of the run's folder; None for the published LoRA.
        steps: Steps to compare; empty for the published or last one.
        file: LoRA file to draw with instead of a run's.
        prompts: Prompts; empty for the recipe's.
        references: Reference images of all prompts, in order; empty for the references in the recipe.
        seed: Seed of the first noise; None for each prompt's own seed, or the recipe's.
        output: Folder of the pictures; None for a new one in the reports.
    """

    run: str | None = None
    steps: Steps = ()
    file: Path | None = None
    strengths: tuple[float, ...] = (1.0,)
    prompts: tuple[str, ...] = ()
    references: tuple[Path, ...] = ()
    seed: int | None = None
    output: Path | None = None


def prepare_drawing(recipe: Recipe, request: Request) -> DrawingJob:
    """Return the job of a request. Its folder need not exist, and nothing is written.

    Raises:
        DrawingError: The run, a step, the file or the prompts are missing, a reference image does not suit
            the base model, or pictures would be replaced.
        PathIsolationError: The folder overlaps a dataset, the cache or a folder of the recipe's runs.
        RecipeError: A preview prompt of the recipe does not suit the base model.
        TrainingError: No run has a LoRA.
    """
    folder = request.output.absolute() if request.output else _new_folder(recipe)
    require_separate_folder(recipe, "--output" if request.output else "output_dir", folder)

    if request.file is not None:
        chosen = choose_file(request.file)
    else:
        fetch_loras(recipe, request.run, request.steps)
        chosen = choose_loras(recipe.output_dir, request.run, request.steps)

    # A run's LoRA is drawn with the base model, quantization and precision of its training, even if the
    # recipe has changed since then.
    trained, previews = trained_recipe(recipe, chosen.run)
    if request.references:
        # The recipe names the references, because they decide the prompts' embeddings.
        trained = _with_referenced_prompts(trained, recipe, request)

    entries = RecipeEntries(trained)
    if request.references or request.prompts:
        _require_references(trained, entries.family, request.references)
    if request.references:
        prompts = recipe_prompts(entries, trained.training.sample_prompts)
    else:
        prompts = _prompts(recipe, request.prompts, entries, previews)
    # The requested seed also replaces the seeds that single prompts have in the recipe.
    if request.seed is not None:
        prompts = tuple(replace(prompt, seed=None) for prompt in prompts)
    job = DrawingJob(
        recipe=trained,
        base=entries.model_folder,
        component_folders=entries.component_folders,
        empty_text=entries.text_spec(""),
        prompts=prompts,
        loras=chosen.loras,
        strengths=request.strengths,
        seed=trained.training.seed if request.seed is None else request.seed,
        folder=folder,
        run=chosen.run,
    )
    _require_few_pictures(job)
    _require_new_files(job)
    return job


def fetch_loras(recipe: Recipe, run: str | None, steps: Steps) -> None:
    """Fetch the LoRA files that `choose_loras` needs from an output folder at an address."""
    outputs = outputs_of(recipe)
    if not outputs.is_remote:
        return
    if not run and not steps and outputs.fetch("lora/"):
        return
    layout = RunLayout(run_folder(recipe.output_dir, run or exportable_run(recipe.output_dir)))
    existing = list(lora_steps(layout))
    for step in existing if steps == "all" else steps or existing[-1:]:
        fetch_lora(outputs, layout, step)


def trained_recipe(recipe: Recipe, run: str | None) -> tuple[Recipe, tuple[Prompt, ...]]:
    """Return the recipe with which a run was trained, with this recipe's folders, and the run's prompts."""
    trained, previews = recipe, tuple[Prompt, ...]()
    if run is not None:
        file = run_folder(recipe.output_dir, run) / JOB_FILE

        # The run's folder may have been deleted after its LoRA was published.
        if file.is_file():
            trained, previews = read_recipe_and_prompts(file)
            require_same_context(trained, RunLayout(file.parent))

    update = {
        "name": recipe.name,
        "source": recipe.source,
        "cache_dir": recipe.cache_dir,
        "output_dir": recipe.output_dir,
        # One process draws all pictures, whatever the number of processes that trained the run.
        "accelerate": trained.accelerate.model_copy(update={"num_processes": 1, "shard": False}),
    }
    return trained.model_copy(update=update), previews


def _with_referenced_prompts(trained: Recipe, recipe: Recipe, request: Request) -> Recipe:
    given = tuple(
        PreviewPrompt(prompt=_with_triggers(trained, caption)) for caption in dict.fromkeys(request.prompts)
    )
    prompts = given or tuple(dict.fromkeys(recipe.preview_prompts))
    if not prompts:
        raise _no_prompts(recipe)
    files = tuple(path.absolute() for path in request.references)
    prompts = tuple(prompt.model_copy(update={"references": files}) for prompt in prompts)
    training = trained.training.model_copy(update={"sample_prompts": prompts})
    return trained.model_copy(update={"training": training})


def _require_references(recipe: Recipe, family: Family, files: tuple[Path, ...]) -> None:
    spec, model = family.spec.references, f"the base model {recipe.model.base} ({family.spec.name})"
    if spec is None and files:
        what = f"{model} accepts no reference images, got {len(files)}"
        raise DrawingError(what, where="--reference", fix="remove --reference")
    if spec is not None and spec.required and not files:
        what = f"{model} requires a reference image for each picture, got none"
        raise DrawingError(what, where="--reference", fix="add --reference before.png")
    for mistake in reference_mistakes(recipe, family, files, ("--reference",)):
        raise DrawingError(mistake.what, where="--reference", fix=mistake.fix)


def _no_prompts(recipe: Recipe) -> DrawingError:
    return DrawingError(
        "prompts are missing: training.sample_prompts is not set in the recipe",
        where=str(recipe.source),
        fix='pass --prompt "...", or set training.sample_prompts',
    )


def _prompts(
    recipe: Recipe, given: Iterable[str], entries: RecipeEntries, previews: tuple[Prompt, ...]
) -> tuple[Prompt, ...]:
    """Return the given prompts, or else the recipe's, or else the prompts of the run's previews."""
    if captions := list(dict.fromkeys(_with_triggers(entries.recipe, each) for each in given)):
        return square_prompts(entries, captions)
    if own := list(dict.fromkeys(recipe.preview_prompts)):
        require_preview_prompts(recipe, entries.family)
        return recipe_prompts(entries, own)
    if not previews:
        raise _no_prompts(recipe)
    return previews


def _with_triggers(recipe: Recipe, prompt: str) -> str:
    if what := recipe.placeholder_mistake(prompt):
        raise DrawingError(what, where=f"the prompt {prompt!r}", fix=PLACEHOLDER_FIX)
    return recipe.with_triggers(prompt)


def _require_few_pictures(job: DrawingJob) -> None:
    number = len(list(job.cells()))
    if number > MAX_PICTURES:
        raise DrawingError(
            f"{number:,} pictures are more than fit on one sheet, which has at most {MAX_PICTURES}",
            where=f"{counted(len(job.loras), 'step')}, {counted(len(job.strengths), 'strength')}, "
            f"{counted(len(job.prompts), 'prompt')}",
            fix="pass fewer steps, strengths or prompts",
        )


def _require_new_files(job: DrawingJob) -> None:
    existing = [
        path.name for path in (*(cell.path for cell in job.cells()), job.folder / SHEET_FILE) if path.exists()
    ]
    if existing:
        raise DrawingError(
            f"{counted(len(existing), 'picture exists', 'pictures exist')} already, such as {existing[0]}",
            where=str(job.folder),
            fix="pass another folder with --output, or delete these pictures",
        )


def _new_folder(recipe: Recipe) -> Path:
    """Return the first of `001`, `002`, ... after all existing ones, on this machine and at the address."""
    parent = recipe.output_dir / PICTURES_FOLDER
    names = {path.name for path in parent.glob("[0-9]*")}
    names |= {PurePosixPath(name).parts[2] for name in outputs_of(recipe).names(PICTURES_FOLDER.as_posix())}
    numbers = [int(name) for name in names if name.isdecimal()]
    return parent / f"{max(numbers, default=0) + 1:03d}"
