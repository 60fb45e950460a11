"""`latentline pack`: copy the cache entries of a recipe into packs."""

from __future__ import annotations

from dataclasses import asdict

import click

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.sealing import seal
from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, bytes_text, echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.errors import counted
from pipeline.maintenance.verify import needed_entries
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import require_isolation
from pipeline.storage.tables import Tables


@click.command(short_help="Copy cache entries into packs of about 1,000.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
def command(recipe: Recipe) -> None:
    """Copy the cache entries that RECIPE needs into packs: files of up to 1,000 entries or 128 MiB.

    Packs are for large caches in an object store, where each file costs a request. Each entry is verified
    before it is copied. Entries that are in packs already are not copied again.

    The files of single entries stay, and jobs use them as long as they exist. latentline gc lists them, and
    with --delete it deletes them after verifying the packs.
    """
    require_isolation(recipe)
    needed = needed_entries(recipe, Tables(recipe.output_dir), log=log_to_stderr)
    names = {each.spec.key: each.name for each in needed}
    store = RecipeEntries(recipe).store
    sealed = seal(store, (each.spec for each in needed), log=log_to_stderr)

    packs, entries = counted(sealed.num_packs, "pack"), counted(sealed.num_entries, "entry", "entries")
    before = f"{sealed.num_packed_before:,} of {counted(len(needed), 'entry', 'entries')} packed before"
    echo(f"{recipe.name}: {packs} written with {entries}, {bytes_text(sealed.num_bytes)}; {before}")
    if sealed.unusable:
        key, problem = next(iter(sealed.unusable.items()))
        entries = counted(len(sealed.unusable), "missing or damaged entry", "missing or damaged entries")
        echo(f"warning: {entries} not packed, the first: {names[key]}: {problem}", err=True)
        echo(f"fix: run latentline verify {recipe.name} --repair, then pack again", err=True)
    give({"recipe": recipe.name, "needed": len(needed), **asdict(sealed)})
    if sealed.num_entries:
        echo("run latentline gc --delete to delete the files of single entries that are in packs")
