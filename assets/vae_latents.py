"""vae_latents: the cache entry of each image's latent."""

from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetIn,
    AssetsDefinition,
    MaterializeResult,
    MetadataValue,
    multi_asset,
)

from assets.checks import check_specs
from assets.metadata import captioned_pictures, pictures_once, publish
from assets.names import asset_key
from assets.sources import model_key
from assets.step import run_step, table_spec
from pipeline.escaping import markdown_text
from pipeline.recipe import Recipe
from pipeline.reporting.reports import Report
from resources.gpu_pool import in_pool
from resources.local_launcher import AccelerateLauncher
from resources.step_log import run_log
from resources.step_names import step_name
from resources.tables import ASSET

DESCRIPTION = (
    "The cache entry of each image's latent. Its key covers everything that decides the bytes; "
    "only missing entries are encoded."
)


def build_vae_latents(recipe: Recipe, *, pool: str) -> AssetsDefinition:
    """Build the asset `<recipe>/vae_latents` with its checks; child processes need a place in `pool`."""

    @multi_asset(
        name=step_name(recipe.name, "vae_latents"),
        op_tags={ASSET: "vae_latents"},
        specs=[
            table_spec(
                recipe, "vae_latents", description=DESCRIPTION, kinds={"pytorch"}, deps=[model_key(recipe)]
            )
        ],
        ins={"buckets": AssetIn(asset_key(recipe, "aspect_buckets"))},
        check_specs=check_specs(recipe, "vae_latents"),
        can_subset=True,
    )
    def vae_latents(
        context: AssetExecutionContext, launcher: AccelerateLauncher, buckets: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.storage.tables import Tables
        from pipeline.vae_latents import checks
        from pipeline.vae_latents.stage import cache_latents

        def materialize() -> MaterializeResult[Any]:
            launch = in_pool(context, pool, launcher.bind(context, recipe.accelerate))
            tables = Tables(recipe.output_dir, log=run_log(context))
            result = cache_latents(
                recipe,
                buckets,
                tables,
                launch=launch,
                log=run_log(context),
                seal_packs=launcher.seal_packs,
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
