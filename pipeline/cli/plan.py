"""`latentline plan`: what the next cache job would encode, and why."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from pipeline.cli.arguments import RECIPE
from pipeline.cli.sizes import bytes_text, seconds_text
from pipeline.errors import counted
from pipeline.maintenance.forecast import Expected, Forecast, forecast
from pipeline.recipe import Recipe
from pipeline.recipe.gates import PATH_ISOLATION
from pipeline.storage.tables import Tables

MAX_NAMED = 3


@click.command
@click.argument("recipe", type=RECIPE)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, every sample named.")
def command(recipe: Recipe, as_json: bool) -> None:
    """Say what the cache job of RECIPE would encode now, and why; nothing is made.

    Written is nothing but hashes of the base model's files, fingerprints.json in cache_dir.

    Where one of its gates would close, that is said first.

    New and changed images are decoded to see whether they would be kept.
    """
    found = forecast(recipe, Tables(recipe.output_dir), log=lambda line: click.echo(line, err=True))
    if as_json:
        kinds = {"latents": found.latents, "text": found.text}
        counts = {f"{name}_to_make": expected.to_make for name, expected in kinds.items()}
        closed = [gate._asdict() for gate in found.closed]
        said = {**asdict(found), "closed": closed, **counts}
        click.echo(json.dumps(said, indent=2, ensure_ascii=False))
        return
    if any(gate.name == PATH_ISOLATION.name for gate in found.closed):
        click.echo(f"{recipe.name}: {_stop(found)}, before any work:")
        _show_gates(found)
        return
    click.echo(f"{recipe.name}: {_samples(found)}")
    if found.closed:
        _show_closed(found)
    for name, expected in (("vae_latents", found.latents), ("text_embeddings", found.text)):
        _show(name, expected)


def _samples(found: Forecast) -> str:
    rejected = ", ".join(f"{count:,} {reason}" for reason, count in sorted(found.rejected.items()))
    text = f"{counted(found.samples, 'sample')} kept, {sum(found.rejected.values()):,} rejected"
    text += f" ({rejected})" if rejected else ""
    return text + (f", {len(found.gone):,} of the last run gone" if found.gone else "")


def _show_closed(found: Forecast) -> None:
    click.echo(f"{_stop(found)}, before anything is encoded:")
    _show_gates(found)
    click.echo("with that mended or allowed, of the samples that are kept now:")


def _stop(found: Forecast) -> str:
    return f"the job would stop at {found.closed[0].asset}"


def _show_gates(found: Forecast) -> None:
    for gate in found.closed:
        click.echo(f"  {gate.name}: {gate.summary}")
        for line in gate.fix.splitlines():
            click.echo(f"    fix: {line}")


def _show(name: str, expected: Expected) -> None:
    line = f"{name:16} {expected.there:>9,} there {expected.to_make:>9,} to encode"
    if expected.to_make:
        took = "time unknown until some were encoded here"
        if expected.seconds is not None:
            took = f"about {seconds_text(expected.seconds)} and the start of the encoder"
        line += f"   {bytes_text(expected.num_bytes)}, {took}"
    click.echo(line)
    for reason, names in sorted(expected.reasons.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
        click.echo(f"  {len(names):>9,} {reason}: {shown}")
