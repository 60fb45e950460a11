"""`latentline explain`: everything that is recorded of one sample."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import click

from pipeline.cli.conventions import RECIPE
from pipeline.maintenance.explain import StageFacts, explain, find_sample
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import require_isolation
from pipeline.storage.tables import Tables


@click.command
@click.argument("recipe", type=RECIPE)
@click.argument("sample")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(recipe: Recipe, sample: str, as_json: bool) -> None:
    """Show everything that is recorded of SAMPLE in RECIPE, from its file to its cache entries.

    SAMPLE is a sample id, <dataset>/<path>, or any part of one that no other sample contains.
    """
    require_isolation(recipe)
    tables = Tables(recipe.output_dir)
    sample_id = find_sample(tables, sample)
    explained = explain(recipe, tables, sample_id)
    if as_json:
        result = {"sample_id": sample_id, **_by_stage(explained)}
        click.echo(json.dumps(result, indent=2, ensure_ascii=False, default=str))
        return

    for each in explained:
        click.echo(each.stage)
        for name, value in each.facts.items():
            click.echo(f"  {name:24} {_text(value)}")


def _by_stage(explained: Iterable[StageFacts]) -> dict[str, Mapping[str, Any]]:
    """Return the facts by stage; further rows of a stage get the keys "<stage> (2)" and so on."""
    stages: dict[str, Mapping[str, Any]] = {}
    num_rows = Counter[str]()
    for each in explained:
        num_rows[each.stage] += 1
        number = num_rows[each.stage]
        stages[each.stage if number == 1 else f"{each.stage} ({number})"] = each.facts
    return stages


def _text(value: object) -> object:
    """Quote text, so that leading and trailing spaces are visible, and round fractions."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:.6g}" if isinstance(value, float) else value
