"""vae_latents: the cache entry of each image's latent."""

from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetsDefinition,
    MaterializeResult,
    MetadataValue,
)

from assets.location import Location
from assets.metadata import publish
from assets.pictures import captioned_pictures, pictures_once
from assets.sources import base_model
from assets.step import run_step, stage_asset, stage_spec
from pipeline.escaping import markdown_text
from pipeline.recipe import Recipe
from pipeline.reporting.reports import Report
from resources.step_log import run_log

DESCRIPTION = (
    "The cache entry of each image's latent. Its key covers everything that decides the bytes; "
    "only missing entries are encoded."
)


def build_vae_latents(recipe: Recipe, location: Location) -> AssetsDefinition:
    """Build the asset `<recipe>/vae_latents` with its checks."""
    spec = stage_spec(
        recipe,
        "vae_latents",
        DESCRIPTION,
        kinds={"pytorch"},
        deps=[base_model(recipe).key],
    )

    @stage_asset(recipe, location, spec, inputs={"buckets": "aspect_buckets"}, launches=True)
    def vae_latents(
        context: AssetExecutionContext, buckets: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.storage.tables import Tables
        from pipeline.vae_latents import checks
        from pipeline.vae_latents.stage import cache_latents

        def materialize() -> MaterializeResult[Any]:
            launch = location.launch(context, recipe)
            tables = Tables(recipe.output_dir, log=run_log(context))
            result = cache_latents(
                recipe,
                buckets,
                tables,
                launch=launch,
                log=run_log(context),
                seal_packs=location.launcher_of(context).seal_packs,
            )
            shown = _decoded_latents(recipe, result.report)
            pictures = pictures_once(context, shown)
            return publish(recipe, "vae_latents", result, log=run_log(context), pictures=pictures)

        yield from run_step(context, recipe, "vae_latents", materialize, checks.run)

    return vae_latents


def _decoded_latents(recipe: Recipe, report: Report) -> dict[str, MetadataValue[Any]]:
    """Return pictures of a few images as the VAE received them, each next to its decoded latent."""
    from pipeline.vae_latents.report import shown

    folder = recipe.output_dir / "reports" / "vae_latents"
    captions = {
        folder / row["picture"]: f"{markdown_text(row['sample_id'])}: PSNR {row['psnr_db']:.1f} dB"
        for row in shown(report.get("decoded", []))
    }
    return {"picture_decoded": captioned_pictures(captions)} if captions else {}
