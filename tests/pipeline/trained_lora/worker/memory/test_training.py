from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from demo.tiny_models import TINY, make_tiny_flux2_klein, make_tiny_sdxl
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.recipe import recipe_from_mapping
from pipeline.trained_lora.worker.memory.skeletons import num_bytes, tensors_of, text_encoder_skeleton
from pipeline.trained_lora.worker.memory.training import TrainingForecast, TrainingMemory
from tests.pipeline.trained_lora.worker.test_training_adapter import write_adapter


def step_bytes(folder: Path, *references: dict[str, Any]) -> int:
    datasets = [
        {"name": "plain", "path": "/data/plain"},
        {"name": "edits", "path": "/data/edits", "references": [*references]},
    ]
    values = {"datasets": datasets, "output_dir": "/out", "model": {"base": str(folder)}}
    forecast = TrainingForecast(load_family(folder), recipe_from_mapping("memory", values), Size(64, 64))
    return forecast.memory(forecast.variant).step


def test_each_reference_adds_memory_and_a_lower_resolution_saves_some(tmp_path: Path) -> None:
    make_tiny_flux2_klein(tmp_path)
    before, style = {"path": "/data/before", "resolution": 128}, {"path": "/data/style", "resolution": 128}
    without, one, two = (
        step_bytes(tmp_path),
        step_bytes(tmp_path, before),
        step_bytes(tmp_path, before, style),
    )
    assert without < one < two
    assert without < step_bytes(tmp_path, {**before, "resolution": 64}) < one
    assert step_bytes(tmp_path, {"path": "/data/before"}) > two


def test_eight_bit_products_pack_the_weights_of_the_blocks_alone(tmp_path: Path) -> None:
    make_tiny_flux2_klein(tmp_path)

    def memory(**training: Any) -> TrainingMemory:
        values = {
            "datasets": [{"name": "plain", "path": "/data/plain"}],
            "output_dir": "/out",
            "model": {"base": str(tmp_path)},
            "training": training,
        }
        forecast = TrainingForecast(
            load_family(tmp_path), recipe_from_mapping("memory", values), Size(64, 64)
        )
        return forecast.memory(forecast.variant)

    plain, packed, products = memory(), memory(quantize="int8"), memory(compute="int8")
    assert packed.base < products.base < plain.base
    assert products.step != packed.step


# diffusers' Chroma imports a class from a deprecated path; its ChatGLM calls a deprecated function of torch.
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", TINY)
def test_the_step_of_every_family_can_be_forecast(name: str, tmp_path: Path) -> None:
    TINY[name](tmp_path)
    assert step_bytes(tmp_path) > 0


def test_trained_text_encoders_are_counted_with_their_adapters_and_activations(tmp_path: Path) -> None:
    make_tiny_sdxl(tmp_path)
    family = load_family(tmp_path)

    def memory(**lora: Any) -> TrainingMemory:
        values = {
            "datasets": [{"name": "plain", "path": "/data/plain"}],
            "output_dir": "/out",
            "model": {"base": str(tmp_path)},
            "training": {"lora": {"rank": 4, "alpha": 4, **lora}},
        }
        forecast = TrainingForecast(family, recipe_from_mapping("memory", values), Size(64, 64))
        return forecast.memory(forecast.variant)

    cached, trained = memory(), memory(text_encoders={})
    encoders = [text_encoder_skeleton(family, role, "float32") for role in ("text_encoder", "text_encoder_2")]
    assert trained.base - cached.base == sum(num_bytes(tensors_of(each)) for each in encoders)
    assert trained.trained > cached.trained
    assert trained.step > cached.step


def test_a_context_lora_and_a_training_adapter_are_counted_if_their_files_are_here(
    tiny_sd: Path, tmp_path: Path
) -> None:
    files = [tmp_path / name / "lora.safetensors" for name in ("context", "adapter")]
    for file in files:
        file.parent.mkdir()
        write_adapter(tiny_sd, file, targets=("to_q", "conv1") if file == files[0] else ("to_v",))
    family = load_family(tiny_sd)

    def memory(precision: str, **model: Any) -> TrainingMemory:
        values = {
            "datasets": [{"name": "plain", "path": "/data/plain"}],
            "output_dir": "/out",
            "model": {"base": str(tiny_sd), **model},
            "accelerate": {"mixed_precision": precision},
        }
        forecast = TrainingForecast(family, recipe_from_mapping("memory", values), Size(64, 64))
        return forecast.memory(forecast.variant)

    numbers = [sum(tensor.numel() for tensor in load_file(file).values()) for file in files]
    context = {"context_lora": {"path": str(files[0])}}
    for precision, value_bytes in (("bf16", 2), ("no", 4)):
        plain = memory(precision)
        with_context = memory(precision, **context)
        both = memory(precision, **context, training_adapter=str(files[1]))
        assert with_context == replace(plain, base=plain.base + value_bytes * numbers[0])
        assert both == replace(plain, base=plain.base + value_bytes * sum(numbers))
    assert memory("no", training_adapter="owner/name-that-is-not-here") == plain
