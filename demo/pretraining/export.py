"""The trained base model as a diffusers folder, with its scores and the curves of its losses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

from demo.drawing import draw_prompts
from demo.pretraining.loop import Stage
from demo.pretraining.networks import new_scheduler
from demo.score import score
from demo.world import CONCEPT, SHAPES, Scene, scenes

NUM_PROMPTS = 128
SEEDS = (0, 1)


def export_model(
    vae: Any,
    networks: Mapping[str, Any],
    tokenizer: Any,
    folder: Path,
    *,
    provenance: Mapping[str, object],
) -> dict[str, Any]:
    """Write the model in float16 with `provenance.json`, and return what that file contains.

    Args:
        vae: The VAE, with its scaling factor in its configuration.
        networks: The networks "unet" and "text_encoder".
        tokenizer: The tokenizer.
        folder: Destination.
        provenance: Entries of `provenance.json` besides the scores.
    """
    components: dict[str, Any] = {
        **networks,
        "vae": vae,
        "tokenizer": tokenizer,
        "scheduler": new_scheduler(),
    }
    optional: dict[str, Any] = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    pipeline: Any = StableDiffusionPipeline(**components, **optional)
    pipeline.to(torch.float16).save_pretrained(folder)
    _state_float32(folder / "text_encoder" / "config.json")

    # The scores are those of the rounded weights, computed in float32.
    rounded = StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    record = {**provenance, "scores": base_scores(rounded)}
    text = json.dumps(record, indent=2) + "\n"
    (folder / "provenance.json").write_text(text, encoding="utf-8")
    return record


def _state_float32(config: Path) -> None:
    """Let plain `from_pretrained` load the text encoder in float32, as it loads the UNet."""
    facts = json.loads(config.read_text(encoding="utf-8"))
    text = json.dumps({**facts, "dtype": "float32"}, indent=2, sort_keys=True) + "\n"
    config.write_text(text, encoding="utf-8")


def base_scores(pipeline: Any) -> list[dict[str, float]]:
    """Return the model's scores for each seed, with its score for the concept that it has not learned."""
    known = base_prompts()
    return [
        {
            "seed": seed,
            **vars(_score(pipeline, known, seed)),
            "concept": _score(pipeline, scenes(CONCEPT)[:NUM_PROMPTS], seed).shape,
        }
        for seed in SEEDS
    ]


def base_prompts() -> list[Scene]:
    """Return the known scenes that the model's scores are measured on."""
    known = scenes(*SHAPES)
    return [known[index] for index in np.random.default_rng(0).permutation(NUM_PROMPTS) % len(known)]


def _score(pipeline: Any, expected: Sequence[Scene], seed: int) -> Any:
    return score(draw_prompts(pipeline, [scene.caption for scene in expected], seed=seed), expected)


def loss_curve(stage: Stage) -> list[dict[str, float]]:
    """Return the stage's log: the mean loss of each interval of steps."""
    return [json.loads(line) for line in stage.log.read_text(encoding="utf-8").splitlines()]
