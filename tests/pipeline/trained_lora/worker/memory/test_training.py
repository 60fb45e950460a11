from __future__ import annotations

from pathlib import Path
from typing import Any

from demo.tiny_models import make_tiny_flux2_klein
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.recipe import recipe_from_mapping
from pipeline.trained_lora.worker.memory.training import TrainingForecast, TrainingMemory


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
