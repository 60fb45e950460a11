"""The recipe's text: few keys, each with the reason for its value."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pipeline.errors import counted
from pipeline.maintenance.draft.look import Group
from pipeline.maintenance.draft.size import Size
from pipeline.recipe import path_in_recipe

BATCH = 4
"""Samples in an optimizer step: one after the other, which takes the least memory."""

_VIEWS = 100
_FEWEST_STEPS, _MOST_STEPS, _STEPS_ROUNDED = 300, 3000, 50


def draft(name: str, groups: Sequence[Group], base: str, size: Size) -> str:
    """The whole YAML file.

    Args:
        name: Of the recipe.
        groups: Its datasets, at least one.
        base: As `model.base` has it.
        size: Of its buckets.
    """
    shown = sum(group.num_images for group in groups)
    steps = min(
        max(round(_VIEWS * shown / BATCH / _STEPS_ROUNDED) * _STEPS_ROUNDED, _FEWEST_STEPS), _MOST_STEPS
    )
    prompt = next((group.sample for group in groups if group.sample), "") or groups[0].text or "a photograph"
    return f"""\
# yaml-language-server: $schema=recipe.schema.json
#
# Written by `latentline new`; docs/recipes.md has all keys. The first two commands to run:
#   latentline plan {name}
#   dagster job execute -m assets.definitions -j {name}_train

datasets:
{_datasets(name, groups)}
cache_dir: .cache/latentline           # latents and text embeddings; all recipes may share it
output_dir: outputs/{name}

model:
  base: {_quoted(base)}

buckets: {{resolution: {size.resolution}, step: {size.step}}}   # {size.source}

training:
  steps: {steps}                          # shows each image about {_views(steps, shown)}
  batch_size: 1
  gradient_accumulation: {BATCH}             # as a batch of {BATCH}, in the memory of one
  gradient_checkpointing: true         # less memory, about a third more time, the same gradients
  learning_rate: 1.0e-4
  checkpoint_every: 250
  sample_every: 250                    # pictures while it trains, of these prompts
  sample_prompts: [{_quoted(prompt)}]
  lora: {{rank: 16, alpha: 16.0}}

accelerate: {{num_processes: 1, mixed_precision: bf16}}   # fp16 on GPUs before Ampere
"""


def _views(steps: int, shown: int) -> str:
    return counted(max(round(steps * BATCH / shown), 1), "time")


def _datasets(name: str, groups: Sequence[Group]) -> str:
    taken: set[str] = set()
    parts: list[str] = []
    for group in groups:
        slug = re.sub(r"[^A-Za-z0-9_-]+", "_", group.text or group.folder.resolve().name).strip("_") or name
        while slug in taken:
            slug += "_"
        taken.add(slug)
        parts.append(f"  - name: {_quoted(slug)}")
        parts.append(
            f"    path: {_quoted(path_in_recipe(group.folder))}   # {counted(group.num_images, 'image')}"
        )
        parts += [f"    repeats: {group.repeats}"] if group.repeats > 1 else []
        parts.append(f"    captions: {_captions(group)}")
    return "\n".join(parts) + "\n"


def _captions(group: Group) -> str:
    if group.suffix is not None:
        missing = group.num_images - group.num_captions
        told = f"   # {missing:,} of them have none: write them, or see checks.allow" if missing else ""
        return f"{{from: sidecar, suffix: {_quoted(group.suffix)}}}{told}"
    text = group.text or "a photograph"
    return f"{{from: fixed, text: {_quoted(text)}}}   # no caption files were found: one caption for all"


def _quoted(text: str) -> str:
    """As YAML reads it back: plain where that is safe."""
    plain = re.fullmatch(r"[A-Za-z./][A-Za-z0-9_./-]*", text)
    return (
        text
        if plain and text.lower() not in {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
        else (json.dumps(text, ensure_ascii=False))
    )
