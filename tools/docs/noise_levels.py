"""The table of noise levels in docs/families.md, written by `python -m tools.docs.families_page`.

It compares the share of training's noise levels below 0.5 with other trainers, with their settings from
`peer_noise_levels.toml`.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch

from demo.tiny_models import TINY
from pipeline.images.geometry import Size
from pipeline.models.families import detect
from pipeline.models.worker.family import load_family
from pipeline.recipe.objective import TimestepSettings
from pipeline.trained_lora.worker.noise import noise_levels

PEERS = Path(__file__).with_name("peer_noise_levels.toml")

EDGE_PX = 1024
"""Edge of the square image that the shares are stated for."""

NUM_LEVELS = 100_000
"""Number of evenly spread random numbers from which a share is computed."""


def noise_table(work: Path) -> str:
    """Return the table of all flow families in Markdown; the tiny models are written below `work`."""
    settings = tomllib.loads(PEERS.read_text(encoding="utf-8"))
    sources: dict[str, str] = settings.pop("sources")
    unknown = settings.keys() - TINY.keys()
    if unknown:
        raise ValueError(f"{PEERS.name} has kinds of models that do not exist: {sorted(unknown)}")

    lines = [f"| kind | Latentline | {' | '.join(sources)} |", "|---|---|" + "---|" * len(sources)]
    for number, (kind, make) in enumerate(TINY.items()):
        folder = work / str(number)
        make(folder)
        if detect(folder).prediction_type() == "flow":
            peers = [_percent(peer_share(settings.get(kind, {}).get(peer))) for peer in sources]
            lines.append(f"| {kind} | {_percent(share(folder))} | {' | '.join(peers)} |")

    versions = "; ".join(f"{peer} {source}" for peer, source in sources.items())
    return "\n".join([*lines, "", f"Sources: {versions}.", ""])


def share(base: Path) -> float:
    """Return the share of a base model's noise levels below 0.5 with the default settings of a recipe."""
    family = load_family(base)
    uniform = (torch.arange(NUM_LEVELS, dtype=torch.float64) + 0.5) / NUM_LEVELS
    levels = noise_levels(uniform, TimestepSettings(), family.spec.noise.density)

    # The position embeddings of some tiny models are too small for the complete size.
    edge_px = 8 * family.size_multiple()
    channels, height, width = family.latent_shape(Size(edge_px, edge_px))
    shape = (channels, height * EDGE_PX // edge_px, width * EDGE_PX // edge_px)
    timesteps = family.noise.timesteps(family.noise.load_scheduler(), levels, shape)
    return float((timesteps < family.num_timesteps / 2).double().mean())


def peer_share(setting: dict[str, Any] | None) -> float | None:
    """Return the share of noise levels below 0.5 for a setting of `peer_noise_levels.toml`."""
    if setting is None:
        return None
    if setting.get("density") == "uniform":
        return 1.0 / (1.0 + setting["shift"])
    centre = setting.get("centre") or math.log(setting.get("shift", 1.0))
    return NormalDist(centre, setting.get("width", 1.0)).cdf(0.0)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
