"""The check that the demo's LoRA has learned its concept, as a Dagster code location of its own.

    python -m demo.checks

The command prints the scores and records them in the Dagster instance. Dagster shows them on the asset
`demo/trained_lora`, which belongs to another code location, and can repeat the check from its UI.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from dagster import (
    AssetCheckEvaluation,
    AssetCheckResult,
    AssetCheckSeverity,
    AssetKey,
    AssetSelection,
    DagsterInstance,
    Definitions,
    asset_check,
    define_asset_job,
    in_process_executor,
)

from assets.metadata import picture_metadata
from demo.learned import SHEET_FILE, Learned, load_pipeline, measure
from pipeline.recipe import Recipe, in_project, load_recipe
from pipeline.recipe.load import recipes_dir

TRAINED_LORA = AssetKey(["demo", "trained_lora"])


@asset_check(
    asset=TRAINED_LORA,
    description="With the LoRA, the base model draws the concept and still draws the shapes that it knew. "
    "The score reads shape, colour and background from the pixels.",
)
def concept_learned() -> AssetCheckResult:
    """Draw pictures with and without the published LoRA, and compare their scores with the targets."""
    recipe = demo_recipe()
    return check_result(measure_lora(recipe), sheet_folder(recipe))


defs = Definitions(
    asset_checks=[concept_learned],
    jobs=[define_asset_job("demo_scores", selection=AssetSelection.checks(concept_learned))],
    executor=in_process_executor,
)


def demo_recipe() -> Recipe:
    """Return the demo's recipe."""
    return load_recipe(recipes_dir() / "demo.yaml")


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


def check_result(learned: Learned, pictures: Path) -> AssetCheckResult:
    """Return the scores as the result of the check; a missed target is a warning."""
    missed = learned.missed_targets()
    return AssetCheckResult(
        passed=not missed,
        severity=AssetCheckSeverity.WARN,
        description="; ".join([learned.summary(), *missed]),
        metadata={**asdict(learned), **picture_metadata(pictures)},
    )


def main() -> int:
    """Measure, print and record the scores, and return the exit status: 1 if a score misses its target."""
    recipe = demo_recipe()
    learned = measure_lora(recipe)
    result = check_result(learned, sheet_folder(recipe))
    evaluation = AssetCheckEvaluation(
        asset_key=TRAINED_LORA,
        check_name="concept_learned",
        passed=result.passed,
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
    )
    with DagsterInstance.get() as instance:
        instance.report_runless_asset_event(evaluation)

    print(f"demo LoRA: {learned.summary()}")
    print(f"  before and after: {sheet_folder(recipe) / SHEET_FILE}")
    missed = learned.missed_targets()
    for sentence in missed:
        print(f"  missed: {sentence}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
