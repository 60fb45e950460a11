"""Encoder, checks, sampler and SDXL's conditioning use one geometry: a change affects all four."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.worker.tensors import read_torch
from pipeline.images.geometry import Placed, Placement, ladder
from pipeline.models.worker.family import load_family
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.reporting.findings import CheckContext
from pipeline.storage.tables import Tables
from pipeline.text_embeddings.stage import cache_text
from pipeline.trained_lora.inputs import training_inputs
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.prompts import preview_prompts
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.vae_latents import checks as vae_latents
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate

OTHER = (ladder(96, 16, 2.0),)
_assign_many = Placement.assign_many


def other_geometry(self: Placement, height: Any, width: Any, names: Any = None, focus: Any = None) -> Placed:
    """Use larger targets on a finer ladder and a crop at the top, independent of the recipe."""
    return _assign_many(replace(self, sets=OTHER, crop="top"), height, width, names, focus)


@dataclass
class GeometryUses:
    """The geometry as the four of them use it."""

    latents: dict[str, tuple[str, tuple[int, ...]]]
    failing_checks: set[str]
    batches: set[frozenset[str]]
    time_ids: dict[str, tuple[float, ...]]


@pytest.fixture
def recipe(tmp_path: Path, photos: Path, tiny_sdxl: Path) -> Recipe:
    values = {
        "datasets": [{"name": "photos", "path": photos}],
        "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "output",
        "model": {"base": str(tiny_sdxl)},
        "buckets": {"resolution": 64, "step": 64},
        "training": {"steps": 5, "batch_size": 4, "gradient_accumulation": 1, "seed": 1},
    }
    return recipe_from_mapping("one", values)


def cached(recipe: Recipe, launch: Any) -> GeometryUses:
    """Run everything up to the first step like the job does, with real cache entries."""
    tables = Tables(recipe.output_dir)

    def keep(asset: str, result: Any) -> Any:
        tables.write(asset, result.table)
        tables.write_rejected(asset, result.rejected)
        return result.table

    raw = keep("raw_images", scan(recipe, tables, log=str))
    valid = keep("validated_dataset", validate(recipe, raw, tables, log=str))
    buckets = keep("aspect_buckets", assign_buckets(recipe, valid, log=str))
    latents = keep("vae_latents", cache_latents(recipe, buckets, tables, launch=launch, log=str))
    text = keep("text_embeddings", cache_text(recipe, valid, tables, launch=launch, log=str))
    entries = RecipeEntries(recipe)
    inputs = training_inputs(recipe, entries, latents, text)
    prompts = preview_prompts(recipe, entries, inputs, latents)
    order = TrainingJob(recipe, entries.model_folder, "0" * 16, inputs, entries.text_spec(""), prompts)
    return GeometryUses(
        latents={row["sample_id"]: _stored(entries, row) for row in latents.to_dicts()},
        failing_checks=failing(recipe),
        batches={
            frozenset(slot.variant_id for slot in share)
            for step in order.plan()
            for micro in step.micro_batches
            for share in micro
        },
        time_ids=_time_ids(order),
    )


def _stored(entries: RecipeEntries, row: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    stored = read_torch(entries.store, entries.latent_spec(row))["latent"]
    return row["key"], tuple(stored.shape)


def failing(recipe: Recipe) -> set[str]:
    """Return the names of the closed gates of vae_latents for the current tables."""
    findings = vae_latents.run(CheckContext(recipe, Tables(recipe.output_dir)))
    return {finding.name for finding in findings if not finding.passed}


def _time_ids(order: TrainingJob) -> dict[str, tuple[float, ...]]:
    """Return the size and crop that SDXL's denoiser receives for each sample."""
    family = load_family(order.base)
    denoiser = family.denoiser.load("float32", "cpu")
    maker = MicroBatchMaker(order, family, family.noise.load_scheduler())
    time_ids: dict[str, tuple[float, ...]] = {}
    calls: list[torch.Tensor] = []
    denoiser.register_forward_pre_hook(
        lambda _, __, kwargs: calls.append(kwargs["added_cond_kwargs"]["time_ids"]), with_kwargs=True
    )
    for step in order.plan():
        for micro in step.micro_batches:
            batch = maker.make(step.step, micro[0]).to(torch.device("cpu"))
            with torch.no_grad():
                family.denoiser.predict(denoiser, batch.latent, batch.timesteps, batch.conditions)
            time_ids |= dict(zip(batch.variant_ids, (tuple(ids) for ids in calls[-1].tolist()), strict=True))
    return time_ids


def test_L03_encoder_check_sampler_and_conditioning_use_the_same_geometry(
    recipe: Recipe, in_process_launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cached(recipe, in_process_launch)
    assert before.failing_checks == set()
    assert failing(recipe) == set()

    monkeypatch.setattr(Placement, "assign_many", other_geometry)
    assert "shape_uniformity" in failing(recipe), "the check does not use the geometry"
    after = cached(recipe, in_process_launch)
    assert after.failing_checks == set()

    assert before.latents.keys() == after.latents.keys() == after.time_ids.keys()
    for sample, (key, shape) in after.latents.items():
        assert key != before.latents[sample][0]
        assert shape != before.latents[sample][1]
        assert after.time_ids[sample][:2] == before.time_ids[sample][:2], "the original size has not changed"
        assert after.time_ids[sample][4:] == tuple(8.0 * edge for edge in shape[1:])
        assert after.time_ids[sample][2] == 0.0, "the crop is not at the top"
    assert any(ids[2] > 0 for ids in before.time_ids.values()), "no sample has a crop offset"
    assert after.batches != before.batches

    monkeypatch.undo()
    assert "shape_uniformity" in failing(recipe)
