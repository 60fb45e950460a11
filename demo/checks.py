"""The checks that the demo's LoRAs have learned their concept, as a Dagster code location of its own.

    python -m demo.checks demo demo_captions

The command prints the scores and records them in the Dagster instance. Dagster shows them on the assets
`demo/trained_lora` and `demo_captions/trained_lora`, which belong to another code location, and can repeat
the checks from its UI.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import polars as pl
from dagster import (
    AssetCheckEvaluation,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetKey,
    AssetSelection,
    DagsterInstance,
    Definitions,
    asset_check,
    define_asset_job,
    in_process_executor,
)

from assets.pictures import picture_metadata
from demo.concept_pictures import scene_of_file
from demo.learned import SCORES_FILE, SHEET_FILE, Learned, load_pipeline, measure
from pipeline.recipe import Recipe, in_project, load_recipe
from pipeline.recipe.load import recipes_dir
from pipeline.storage.tables import Tables

DEMO, DEMO_CAPTIONS = "demo", "demo_captions"
"""Recipes with given captions, and with a model's."""

MIN_SHARE = 0.9
"""Minimum score of the concept with a model's captions, relative to the score with given ones."""

DESCRIPTION = (
    "With the LoRA, the base model draws the concept and still draws the shapes that it knew. The score "
    "reads shape, colour and background from the pixels."
)


def trained_lora(recipe: str) -> AssetKey:
    """Return the asset that a recipe's check belongs to."""
    return AssetKey([recipe, "trained_lora"])


def _build_check(name: str) -> AssetChecksDefinition:
    @asset_check(asset=trained_lora(name), description=DESCRIPTION)
    def concept_learned() -> AssetCheckResult:
        recipe = demo_recipe(name)
        return check_result(recipe, measure_lora(recipe))

    return concept_learned


_CHECKS = {name: _build_check(name) for name in (DEMO, DEMO_CAPTIONS)}

defs = Definitions(
    asset_checks=_CHECKS.values(),
    jobs=[
        define_asset_job(f"{name}_scores", selection=AssetSelection.checks(check))
        for name, check in _CHECKS.items()
    ],
    executor=in_process_executor,
)


def demo_recipe(name: str) -> Recipe:
    """Return a recipe of the demo."""
    return load_recipe(recipes_dir() / f"{name}.yaml")


def sheet_folder(recipe: Recipe) -> Path:
    """Return the folder of the scores and of the pictures before and after."""
    return recipe.output_dir / "learned"


def measure_lora(recipe: Recipe) -> Learned:
    """Return the scores without and with the LoRA that the recipe's last run published."""
    from pipeline.models.worker.loading import keep_quiet

    keep_quiet()
    output = sheet_folder(recipe)
    output.mkdir(exist_ok=True)
    return measure(load_pipeline(in_project(recipe.model.base)), recipe.output_dir / "lora", output)


def check_result(recipe: Recipe, learned: Learned) -> AssetCheckResult:
    """Return the scores as the result of the check; a missed target is a warning."""
    missed = missed_targets(recipe, learned)
    return AssetCheckResult(
        passed=not missed,
        severity=AssetCheckSeverity.WARN,
        description="; ".join([summary(recipe, learned), *missed]),
        metadata={**asdict(learned), **picture_metadata(sheet_folder(recipe))},
    )


def missed_targets(recipe: Recipe, learned: Learned) -> list[str]:
    """Return a sentence for each target that was missed; with a model's captions, there is one more."""
    missed = learned.missed_targets()
    if not recipe.has_model_captions:
        return missed
    given = score_with_given_captions()
    if given is None:
        return [*missed, f"the score with given captions is unknown: run python -m demo.checks {DEMO} first"]
    if learned.concept_after < MIN_SHARE * given:
        missed.append(
            f"the concept scores {learned.concept_after:.2f}, not {MIN_SHARE} of the {given:.2f} with given "
            "captions"
        )
    return missed


def summary(recipe: Recipe, learned: Learned) -> str:
    """Return the scores in one line; with a model's captions, also how many are right."""
    if not recipe.has_model_captions:
        return learned.summary()
    right, number = right_captions(Tables(recipe.output_dir).read("validated_dataset"))
    given = score_with_given_captions()
    share = f", {learned.concept_after / given:.2f} of the score with given captions" if given else ""
    return f"{learned.summary()}; {right} of {number} captions of the model are right{share}"


def right_captions(validated: pl.DataFrame) -> tuple[int, int]:
    """Return how many captions describe the scene in the name of their picture, and the number of scenes.

    `validated` is the table validated_dataset. Pictures with other names are not counted.
    """
    rows = validated.select("path", "caption").iter_rows()
    named = [(scene_of_file(Path(path)), caption) for path, caption in rows]
    right = [scene.caption == caption for scene, caption in named if scene is not None]
    return sum(right), len(right)


def score_with_given_captions() -> float | None:
    """Return the score of the concept that the recipe `demo` reached last; None if it is not measured."""
    file = sheet_folder(demo_recipe(DEMO)) / SCORES_FILE
    return json.loads(file.read_text(encoding="utf-8"))["concept_after"] if file.is_file() else None


def main(names: Sequence[str]) -> int:
    """Measure, print and record the scores, and return the exit status: 1 if a score misses its target."""
    return max([_check_recipe(demo_recipe(name)) for name in names])


def _check_recipe(recipe: Recipe) -> int:
    learned = measure_lora(recipe)
    result = check_result(recipe, learned)
    evaluation = AssetCheckEvaluation(
        asset_key=trained_lora(recipe.name),
        check_name="concept_learned",
        passed=result.passed,
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
    )
    with DagsterInstance.get() as instance:
        instance.report_runless_asset_event(evaluation)

    print(f"{recipe.name}: {summary(recipe, learned)}")
    print(f"  before and after: {sheet_folder(recipe) / SHEET_FILE}")
    missed = missed_targets(recipe, learned)
    for sentence in missed:
        print(f"  missed: {sentence}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [DEMO, DEMO_CAPTIONS]))
