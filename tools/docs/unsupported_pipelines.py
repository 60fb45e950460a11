"""The table of diffusers' pipelines without a family, written by `python -m tools.docs.families_page`."""

from __future__ import annotations

import inspect
import tomllib
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import diffusers
from diffusers.loaders.lora_base import LoraBaseMixin

UNSUPPORTED = Path(__file__).with_name("pipelines_without_family.toml")


@cache
def pipelines_with_lora() -> frozenset[str]:
    """Return the names of all pipelines in the installed diffusers that can load a LoRA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old pipelines warn when they are imported
        pipelines = {name: getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Pipeline")}
    return frozenset(
        name for name, kind in pipelines.items() if inspect.isclass(kind) and issubclass(kind, LoraBaseMixin)
    )


def unsupported_pipelines() -> dict[str, str]:
    """Return the reason why a pipeline has no family, by its name.

    Raises:
        ValueError: A pipeline is listed twice.
    """
    groups = tomllib.loads(UNSUPPORTED.read_text(encoding="utf-8"))["groups"]
    names = Counter(name for group in groups for name in group["pipelines"])
    if twice := sorted(name for name, number in names.items() if number > 1):
        raise ValueError(f"{UNSUPPORTED.name} lists {', '.join(twice)} twice")
    return {name: group["reason"] for group in groups for name in group["pipelines"]}


def unsupported_table() -> str:
    """Return the pipelines by reason, in Markdown."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in unsupported_pipelines().items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| {reason} | {', '.join(names)} |" for reason, names in by_reason.items()]
    return "\n".join(["| reason | pipelines |", "|---|---|", *rows, ""])
