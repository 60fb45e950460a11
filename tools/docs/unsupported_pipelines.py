"""The tables of diffusers' pipelines without a family, written by `python -m tools.docs.families_page`."""

from __future__ import annotations

import inspect
import tomllib
import typing
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Literal

import diffusers
from diffusers.loaders import PeftAdapterMixin
from diffusers.loaders.lora_base import LoraBaseMixin

UNSUPPORTED = Path(__file__).with_name("pipelines_without_family.toml")

Table = Literal["groups", "without_loader"]
"""Groups of pipelines in the file: those that can load a LoRA, and those that cannot."""


@cache
def _pipelines() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old pipelines warn when they are imported
        found = {name: getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Pipeline")}
    return {name: kind for name, kind in found.items() if inspect.isclass(kind)}


@cache
def pipelines_with_lora() -> frozenset[str]:
    """Return the names of all pipelines in the installed diffusers that can load a LoRA."""
    return frozenset(name for name, kind in _pipelines().items() if issubclass(kind, LoraBaseMixin))


@cache
def pipelines_without_loader() -> frozenset[str]:
    """Return the pipelines that cannot load a LoRA, although their transformer accepts adapters."""
    return frozenset(
        name
        for name, kind in _pipelines().items()
        if not issubclass(kind, LoraBaseMixin) and _accepts_adapters(kind)
    )


def _accepts_adapters(pipeline: Any) -> bool:
    hint = inspect.signature(pipeline.__init__, eval_str=True).parameters.get("transformer")
    kinds = () if hint is None else (hint.annotation, *typing.get_args(hint.annotation))
    return any(inspect.isclass(kind) and issubclass(kind, PeftAdapterMixin) for kind in kinds)


def unsupported_pipelines(table: Table = "groups") -> dict[str, str]:
    """Return the reason why a pipeline has no family, by its name.

    Raises:
        ValueError: A pipeline is listed twice.
    """
    groups = tomllib.loads(UNSUPPORTED.read_text(encoding="utf-8"))[table]
    names = Counter(name for group in groups for name in group["pipelines"])
    if twice := sorted(name for name, number in names.items() if number > 1):
        raise ValueError(f"{UNSUPPORTED.name} lists {', '.join(twice)} twice")
    return {name: group["reason"] for group in groups for name in group["pipelines"]}


def unsupported_table(table: Table = "groups") -> str:
    """Return the pipelines by reason, in Markdown."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in unsupported_pipelines(table).items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| {reason} | {', '.join(names)} |" for reason, names in by_reason.items()]
    return "\n".join(["| reason | pipelines |", "|---|---|", *rows, ""])
