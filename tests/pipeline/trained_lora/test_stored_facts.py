"""The facts of a run, which decide its id, are those that earlier versions have stored."""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.trained_lora.fingerprint import (
    run_facts,
)
from pipeline.trained_lora.inputs import training_inputs
from tests.pipeline.recipe_effects import Values
from tests.pipeline.trained_lora.fingerprint_case import Samples, samples

__all__ = ["samples"]

PLAIN_FACTS: dict[str, Any] = {
    "version": 1,
    "samples": {"number": 6, "latents": "hash", "text": "hash", "repeats": "hash"},
    "empty_text": "hash",
    "model": {"family": "Stable Diffusion 1.x and 2.x", "denoiser": "hash"},
    "plan": {
        "seed": 42,
        "batch_size": 1,
        "gradient_accumulation": 1,
        "num_processes": 1,
        "caption_dropout": 0.1,
        "underfilled": "partial",
    },
    "loss": {
        "kind": "mse",
        "delta": 0.1,
        "weighting": "none",
        "gamma": 5.0,
        "prediction": "epsilon",
        "timesteps": {
            "density": "auto",
            "location": 0.0,
            "scale": 1.0,
            "mode_scale": 1.29,
            "min": 0.0,
            "max": 1.0,
            "shift": None,
        },
        "density": "uniform",
    },
    "noise": {"offset": 0.0, "input_perturbation": 0.0, "zero_terminal_snr": False},
    "optimizer": {
        "kind": "adamw",
        "arguments": {},
        "learning_rate": 0.0001,
        "max_grad_norm": 1.0,
        "ema_decay": None,
    },
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "lora": {
        "rank": 16,
        "alpha": 16.0,
        "kind": "lora",
        "dropout": 0.0,
        "targets": "family",
        "modules": [],
        "conv_rank": None,
        "conv_alpha": None,
        "ranks": [],
        "dora": False,
        "rslora": False,
        "init": "kaiming",
        "start_from": None,
        "family_targets": ["to_q", "to_k", "to_v", "to_out.0"],
    },
    "mixed_precision": "no",
    "quantize": "none",
    "compile": False,
}
"""Facts of a recipe of defaults, as of 2026-11-25, with "hash" for each SHA-256."""

RICH_RECIPE: Values = {
    "datasets": [
        {
            "name": "photos",
            "path": "@folder@/photos",
            "weight": 2.0,
            "loss_weight": 0.5,
            "mask": {"path": "@folder@/masks", "unmasked_weight": 0.2, "prior_weight": 0.1},
        },
        {"name": "class", "path": "@folder@/class", "role": "prior", "weight": 1.0},
    ],
    "text": {"caption_dropout": 0.0},
    "training": {
        "exhausted": "repeat",
        "loss": {"prior_weight": 0.5},
        "lr_scheduler": "cosine",
        "optimizer_arguments": {"weight_decay": 0.5},
        "lora": {
            "targets": "blocks",
            "save_dtype": "float16",
            "loraplus_ratio": 16.0,
            "start_from": "@lora_file@",
        },
    },
}

RICH_FACTS: dict[str, Any] = {
    "samples.number": 12,
    "samples.masks": "hash",
    "empty_text": None,
    "plan.caption_dropout": 0.0,
    "plan.weights.photos": 2.0,
    "plan.weights.class": 1.0,
    "plan.exhausted": "repeat",
    "loss.prior.datasets": ["class"],
    "loss.prior.target": "images",
    "loss.prior.weight": 0.5,
    "loss.dataset_weights.photos": 0.5,
    "loss.masks.photos.unmasked_weight": 0.2,
    "loss.masks.photos.normalise": True,
    "loss.masks.photos.prior_weight": 0.1,
    "optimizer.arguments.weight_decay": 0.5,
    "schedule.kind": "cosine",
    "schedule.steps": 1000,
    "schedule.cycles": 1,
    "schedule.power": 1.0,
    "schedule.decay_steps": 0,
    "lora.targets": "blocks",
    "lora.loraplus_ratio": 16.0,
    "lora.save_dtype": "float16",
    "lora.start_from": "hash",
    "lora.family_targets": None,
}
"""Facts of `RICH_RECIPE` that differ from those of defaults."""


def facts_of(samples: Samples, values: Values, validated: pl.DataFrame) -> dict[str, Any]:
    entries = RecipeEntries(samples.recipe(values))
    inputs = training_inputs(entries.recipe, entries, *samples.tables(entries, validated))
    return run_facts(entries.recipe, entries, inputs)


def without_hashes(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the facts by dotted name, with "hash" for each SHA-256."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            flat |= without_hashes(value, f"{prefix}{name}.")
        else:
            is_hash = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
            flat[f"{prefix}{name}"] = "hash" if is_hash else value
    return flat


def test_R11_the_facts_of_a_run_are_those_of_earlier_versions(samples: Samples) -> None:
    """A fact that is new or missing would start every run again."""
    plain = facts_of(samples, {}, samples.validated)
    assert without_hashes(plain) == without_hashes(PLAIN_FACTS)

    hashes = pl.col("content_hash").str.reverse()
    masked = samples.validated.with_columns(mask_path="path", mask_hash=hashes, mask_mean=pl.lit(0.5))
    prior = samples.validated.with_columns(
        dataset=pl.lit("class"), sample_id=pl.col("sample_id").str.replace("photos", "class")
    )
    both = pl.concat([masked, prior], how="diagonal")
    rich = without_hashes(facts_of(samples, RICH_RECIPE, both))
    assert rich == {
        **without_hashes(
            {
                **PLAIN_FACTS,
                "optimizer": {
                    **PLAIN_FACTS["optimizer"],
                    "arguments": RICH_RECIPE["training"]["optimizer_arguments"],
                },
            }
        ),
        **RICH_FACTS,
    }
