"""`latentline upload`: upload the published LoRA to the Hugging Face Hub."""

from __future__ import annotations

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, bytes_text, echo
from pipeline.cli.json_output import give
from pipeline.recipe import Recipe
from pipeline.trained_lora.export.lora_files import LORA_FOLDER, lora_file_names


@click.command(short_help="Upload the published LoRA to the Hugging Face Hub.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.argument("repository")
@click.option("--public", is_flag=True, help="Create a public repository. By default it is private.")
@click.option(
    "--license",
    "licence",
    help="Licence of the LoRA for its card, by the Hub's identifier, such as cc-by-4.0.",
)
@click.option("--dry-run", is_flag=True, help="Show the files and the card, and upload nothing.")
def command(recipe: Recipe, repository: str, *, public: bool, licence: str | None, dry_run: bool) -> None:
    """Upload the LoRA in the folder lora/ of RECIPE's outputs to REPOSITORY, such as anna/flowers-lora.

    The repository gets the LoRA in three layouts, the model card, the previews and the provenance, but not
    samples.parquet, which has the names and captions of the images. A missing repository is created. One
    that exists keeps its other files, and stays private or public.

    The access token comes from HF_TOKEN or from hf auth login. It is in no recipe, file or log.
    """
    from pipeline.trained_lora.export.hub_upload import prepare_upload, upload

    folder, names = recipe.output_dir / LORA_FOLDER, lora_file_names(recipe)
    prepared = prepare_upload(folder, recipe.name, repository, licence=licence, names=names)
    total = sum(map(prepared.num_bytes, prepared.files))
    echo(f"{'would upload' if dry_run else 'uploading'} {bytes_text(total)} to {repository}")
    for name in prepared.files:
        echo(f"  {name}, {bytes_text(prepared.num_bytes(name))}")
    files = {name: prepared.num_bytes(name) for name in prepared.files}
    if dry_run:
        echo(f"\n{prepared.card}")
        give({"repository": repository, "files": files, "card": prepared.card, "address": None})
        return
    address = upload(prepared, public=public)
    echo(f"uploaded to {address}")
    give({"repository": repository, "files": files, "card": prepared.card, "address": address})
