"""`latentline explain`: everything that is recorded of one sample."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.json_output import give, json_option
from pipeline.errors import counted
from pipeline.maintenance.explain import StageFacts, explain, find_sample
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import require_isolation
from pipeline.storage.tables import Tables

SHORT_FACTS: dict[str, tuple[str, ...]] = {
    "raw_images": ("sample_id", "height", "width", "file_bytes", "format", "notes"),
    "validated_dataset": ("caption", "more_captions", "caption_from"),
    "aspect_buckets": ("bucket", "crop_top", "crop_left", "crop_loss", "scale"),
    "vae_latents": ("dtype", "flipped"),
    "text_embeddings": ("variant", "num_tokens", "num_cut"),
    "trained_lora": ("split", "times_seen"),
}
"""Facts of each stage that are shown without --full."""

SHORT_ENTRY_FACTS = ("path", "state")
"""Facts of each cache entry that are shown without --full."""


@click.command(short_help="Show the state of one image at every stage.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.argument("sample")
@click.option("--full", is_flag=True, help="Add keys, hashes, file stats and the inputs of each cache entry.")
@json_option("Print all facts as JSON, as with --full.")
def command(recipe: Recipe, sample: str, full: bool, as_json: bool) -> None:
    """Show whether an image of RECIPE is used or rejected and why, then its state at every stage.

    SAMPLE is the image: its sample id, which is the dataset's name and the path in the dataset, such as
    photos/rose_01.jpg, or a part of it that occurs in no other sample id.

    The stages show its size, caption, bucket and crop, its cache entries and whether they are valid, and how
    often the last run trained on it.
    """
    require_isolation(recipe)
    tables = Tables(recipe.output_dir, log=log_to_stderr)
    sample_id = find_sample(tables, sample)
    explained = explain(recipe, tables, sample_id, log=log_to_stderr)
    if as_json:
        give({"sample_id": sample_id, **_by_stage(explained)})
        return

    echo(f"{sample_id}: {_summary(explained)}")
    # A rejection explains the missing stages, so it precedes them.
    for each in sorted(explained, key=lambda each: each.stage != "rejected"):
        echo(each.stage)
        for name, value in (each.facts if full else _short_facts(each)).items():
            echo(f"  {_label(name):24} {_text(value)}")
    if not full:
        echo("--full adds keys, hashes, file stats and the inputs of each entry")


def _summary(explained: Iterable[StageFacts]) -> str:
    facts = {each.stage: each.facts for each in explained}
    if "rejected" in facts:
        rejection = facts["rejected"]
        return f"rejected by {rejection['stage']}, {rejection['detail']}\nfix: {rejection['fix']}"

    states = [each["state"] for stage, each in facts.items() if " entry" in stage]
    num_unusable = sum(state != "valid" for state in states)
    if not states:
        return "scanned; run the cache job to prepare it for training"
    if num_unusable:
        entries = counted(len(states), "cache entry", "cache entries")
        return f"{num_unusable} of {entries} missing or damaged; the next job encodes them"
    split = facts.get("trained_lora", {}).get("split")
    times_seen = facts.get("trained_lora", {}).get("times_seen", 0)
    if split == "validation":
        return "held out for validation; its cache entries are valid"
    seen = f", seen {counted(times_seen, 'time')} by the last run" if split else ", not trained on yet"
    return f"used for training; its cache entries are valid{seen}"


def _short_facts(explained: StageFacts) -> dict[str, Any]:
    facts = explained.facts
    default = SHORT_ENTRY_FACTS if " entry" in explained.stage else tuple(facts)
    names = SHORT_FACTS.get(explained.stage, default)
    return {name: facts[name] for name in names if facts.get(name) not in (None, "", "[]")}


def _label(name: str) -> str:
    return "bucket (height x width)" if name == "bucket" else name


def _by_stage(explained: Iterable[StageFacts]) -> dict[str, Mapping[str, Any]]:
    # A sample may have several rows in a stage, such as one per resolution: "<stage> (2)" and so on.
    stages: dict[str, Mapping[str, Any]] = {}
    num_rows = Counter[str]()
    for each in explained:
        num_rows[each.stage] += 1
        number = num_rows[each.stage]
        stages[each.stage if number == 1 else f"{each.stage} ({number})"] = each.facts
    return stages


def _text(value: object) -> object:
    # In quotes, leading and trailing spaces are visible.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:.6g}" if isinstance(value, float) else value
