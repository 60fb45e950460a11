"""Computed times of a recipe, for FLUX.1 dev with few blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu.configurations import PUBLISHED
from pipeline.memory.gpus import H100, gpu_named
from pipeline.memory.job import ComputedTimes, MemoryJob
from pipeline.memory.worker.operations import latent_work, step_work
from pipeline.memory.worker.stages import forecast_stages
from pipeline.models.worker.family import load_family
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.trained_lora.worker.memory.resident_blocks import largest_size
from pipeline.trained_lora.worker.memory.training import TrainingForecast

GIB = 2**30
TRAINING = {"gradient_checkpointing": True, "gradient_accumulation": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    published = next(each for each in PUBLISHED if each.name == "FLUX.1 dev")
    transformer = {**published.networks["transformer"], "num_layers": 1, "num_single_layers": 1}
    shallow = replace(published, networks={**published.networks, "transformer": transformer})
    return shallow.write(tmp_path_factory.mktemp("times") / "model")


def recipe(folder: Path, **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "datasets": [{"name": "photos", "path": str(folder.parent / "photos")}],
        "output_dir": str(folder.parent / "out"),
        "model": {"base": str(folder)},
        "buckets": {"resolution": 512},
        "training": TRAINING,
        "accelerate": {"mixed_precision": "bf16"},
    }
    return recipe_from_mapping("times", values | sections)


def times(folder: Path, card: str | None = "RTX 4090", **sections: Any) -> ComputedTimes | None:
    job = MemoryJob(recipe(folder, **sections), folder, {}, None if card is None else 24 * GIB, card=card)
    return forecast_stages(job).times


def test_times_are_those_of_the_counted_operations(folder: Path) -> None:
    gpu, size, family = gpu_named("RTX 4090"), largest_size(recipe(folder)), load_family(folder)
    assert gpu is not None
    training = TrainingForecast(family, recipe(folder), size)
    step_s = 3 * gpu.seconds(step_work(training, training.variant))
    latent_s = gpu.computing_s(latent_work(family, size, "float32"), float32=True)
    assert times(folder) == ComputedTimes("RTX 4090", size.height, size.width, latent_s, step_s)

    quicker = times(folder, latents={"compute_dtype": "bfloat16"})
    assert quicker is not None
    assert quicker.latent_s < 0.7 * latent_s


@pytest.mark.parametrize(
    ("sections", "setting"),
    [
        ({"training": {**TRAINING, "quantize": "int8"}}, "training.quantize: int8"),
        ({"training": {**TRAINING, "offload": 0}}, "training.offload: 0"),
        ({"training": {**TRAINING, "compile": True}}, "training.compile: true"),
        ({"training": {**TRAINING, "compile": "auto"}}, "training.compile: auto"),
        (
            {"training": {**TRAINING, "attention_backend": "_native_math"}},
            "training.attention_backend: _native_math",
        ),
        ({"accelerate": {"mixed_precision": "no"}}, "accelerate.mixed_precision: no"),
    ],
)
def test_a_setting_that_changes_the_work_without_being_counted_is_named(
    sections: dict[str, Any], setting: str, folder: Path
) -> None:
    computed = times(folder, **sections)
    assert computed is not None
    assert (computed.step_s, computed.not_counted) == (None, setting)
    assert computed.latent_s > 0


def test_the_gpu_of_this_machine_has_times_if_its_specifications_are_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert times(folder, card=None) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: H100.device_name)
    card = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    computed = times(folder, card=None)
    assert computed is not None
    assert computed.gpu == "H100"
