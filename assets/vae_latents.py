"""vae_latents: the store entry of each image's latent."""

from typing import Any

from dagster import AssetExecutionContext, MaterializeResult, MetadataValue

from assets.naming import LAUNCHER_RESOURCE
from assets.publishing import captioned, escaped, publish
from assets.steps import AssetStep
from pipeline.recipe import Recipe
from pipeline.reporting.reports import Report
from resources.launcher import AccelerateLauncher

DESCRIPTION = (
    "Each image's latent in the store, by a key of all that decides its bytes; only missing ones are encoded."
)


def cached(recipe: Recipe, context: AssetExecutionContext, buckets: Any) -> MaterializeResult[Any]:
    """The cached latents; a child process encodes what is missing, and none is started when nothing is."""
    from pipeline.storage.tables import Tables
    from pipeline.vae_latents.stage import cache_latents

    launcher: AccelerateLauncher = context.resources.launcher
    launch = launcher.bind(context, recipe.accelerate)
    tables = Tables(recipe.output_dir)
    result = cache_latents(recipe, buckets, tables, launch=launch, log=context.log.info)
    return publish(recipe, "vae_latents", result, pictures=_decoded(recipe, result.report))


def _decoded(recipe: Recipe, report: Report) -> dict[str, MetadataValue[Any]]:
    """A few images as the VAE saw them, each with what its latent decodes to."""
    from pipeline.vae_latents.report import shown

    rows, folder = report.get("decoded", []), recipe.output_dir / "reports" / "vae_latents"
    captions = {
        folder / row["picture"]: f"{escaped(row['sample_id'])}: PSNR {row['psnr_db']:.1f} dB"
        for row in shown(rows)
    }
    return {"picture_decoded": captioned(captions)} if captions else {}


VAE_LATENTS = AssetStep(
    "vae_latents",
    DESCRIPTION,
    cached,
    kinds=frozenset({"pytorch"}),
    reads={"buckets": "aspect_buckets"},
    resources=frozenset({LAUNCHER_RESOURCE}),
)
