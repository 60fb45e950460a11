"""The check that the demo's LoRA has learned its concept, as a Dagster code location of its own.

    dagster job execute -m demo.checks -j demo_scores

Dagster shows the result on the asset `demo/trained_lora`, which belongs to another code location.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from dagster import (
    AssetCheckResult,
    AssetCheckSeverity,
    AssetKey,
    AssetSelection,
    Definitions,
    asset_check,
    define_asset_job,
    in_process_executor,
)

from assets.publishing import picture_metadata
from pipeline.recipe import in_project, load_recipe

RECIPE = Path(__file__).parent.parent / "configs" / "demo.yaml"


@asset_check(
    asset=AssetKey(["demo", "trained_lora"]),
    description="With the LoRA, the base model draws the concept and still draws the shapes that it knew. "
    "The score reads shape, colour and background from the pixels.",
)
def concept_learned() -> AssetCheckResult:
    """Draw pictures with and without the published LoRA, and compare their scores with the targets."""
    from demo.learned import load_pipeline, measure

    recipe = load_recipe(RECIPE)
    pictures = recipe.output_dir / "learned"
    pictures.mkdir(exist_ok=True)
    base = in_project(recipe.model.base)
    learned = measure(load_pipeline(base), recipe.output_dir / "lora", pictures)

    missed = learned.missed_targets()
    return AssetCheckResult(
        passed=not missed,
        severity=AssetCheckSeverity.WARN,
        description="; ".join([learned.summary(), *missed]),
        metadata={**asdict(learned), **picture_metadata(pictures)},
    )


defs = Definitions(
    asset_checks=[concept_learned],
    jobs=[define_asset_job("demo_scores", selection=AssetSelection.checks(concept_learned))],
    executor=in_process_executor,
)
