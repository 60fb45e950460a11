"""`latentline explain`: all that is known of one sample."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import click

from pipeline.cli.arguments import RECIPE
from pipeline.maintenance.explain import Known, explain, find_sample
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import require_isolation
from pipeline.storage.tables import Tables


@click.command
@click.argument("recipe", type=RECIPE)
@click.argument("sample")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(recipe: Recipe, sample: str, as_json: bool) -> None:
    """Say all that is known of SAMPLE in RECIPE, from its file to its cache entries.

    SAMPLE is its id, <dataset>/<path>, or as much of it as no other sample has.
    """
    require_isolation(recipe)
    tables = Tables(recipe.output_dir)
    sample_id = find_sample(tables, sample)
    known = explain(recipe, tables, sample_id)
    if as_json:
        stages = _by_stage(known)
        click.echo(json.dumps({"sample_id": sample_id, **stages}, indent=2, ensure_ascii=False, default=str))
        return
    for each in known:
        click.echo(each.stage)
        for name, value in each.facts.items():
            click.echo(f"  {name:24} {_shown(value)}")


def _by_stage(known: Iterable[Known]) -> dict[str, Mapping[str, Any]]:
    """The facts by stage; those of a stage's further rows as "<stage> (2)" and so on."""
    stages: dict[str, Mapping[str, Any]] = {}
    numbers: Counter[str] = Counter()
    for each in known:
        numbers[each.stage] += 1
        number = numbers[each.stage]
        stages[each.stage if number == 1 else f"{each.stage} ({number})"] = each.facts
    return stages


def _shown(value: object) -> object:
    """Text in quotes, so that spaces are seen; fractions without the last digits of their sum."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:.6g}" if isinstance(value, float) else value
