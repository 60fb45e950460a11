"""Entries of the last job's table that the running job does not request; they stay registered until it ends.

A job registers what it requests before it starts. If it fails, the table of the last job stays, and other
machines cannot read the table in `latentline gc`.

    <cache_dir>/outputs/<id>-<kind>-earlier.keys      see `users`
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import polars as pl

from pipeline.cache.users import register_user, unregister_kinds

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries


def register_earlier(
    entries: RecipeEntries, kind: str, previous: pl.Series | None, requested: pl.Series
) -> None:
    """Register the entries of the last job's table that the job does not request, if there are any.

    Args:
        entries: Entries of the recipe.
        kind: Kind of the entries.
        previous: Keys in the last job's table; None without a table.
        requested: Keys that the job requests.

    Raises:
        StoreError: The cache cannot be written.
    """
    if previous is None:
        return
    keys = pl.DataFrame({"key": previous.cast(pl.String)}).drop_nulls()
    earlier = keys.join(pl.DataFrame({"key": requested.cast(pl.String)}), on="key", how="anti")["key"]
    recipe = entries.recipe
    if not earlier.is_empty():
        register_user(
            entries.store.address,
            recipe.registered_output,
            recipe=recipe.name,
            kind=_earlier(kind),
            keys=earlier,
        )


def unregister_earlier(entries: RecipeEntries, kinds: Iterable[str]) -> None:
    """Delete the registrations of earlier entries, when all entries of the new table exist.

    Raises:
        StoreError: The cache cannot be listed, or a registration cannot be deleted.
    """
    unregister_kinds(entries.store.address, entries.recipe.registered_output, map(_earlier, kinds))


def _earlier(kind: str) -> str:
    return f"{kind}-earlier"
