"""The memory of captioning models, computed from their configurations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForImageTextToText, TorchAoConfig

from demo.tiny_models import make_tiny
from pipeline.captions.worker.captioner import GPU_BATCH
from pipeline.memory.forecast import forecast_memory
from pipeline.memory.job import CaptionerJob
from pipeline.memory.worker.captioning import caption_memory
from pipeline.recipe import recipe_from_mapping
from pipeline.recipe.captions import CaptionSettings
from pipeline.trained_lora.worker.memory.resident_blocks import RESERVED_BYTES
from tests.pipeline.captions.conftest import captioner

__all__ = ["captioner"]


def job(folder: Path, dtype: str = "bfloat16", **captions: Any) -> CaptionerJob:
    values = {"from": "model", "model": str(folder), "resolution": 64, "max_tokens": 8, **captions}
    return CaptionerJob(CaptionSettings.model_validate(values), folder, dtype)


@pytest.fixture
def without_weights(captioner: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def folder(name: str) -> Path:
        shutil.copytree(captioner(name), tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
        return tmp_path / name

    return folder


def stored_bytes(model: Any) -> int:
    """Return the bytes of the tensors of a loaded model; of a quantized weight, its values and scales."""
    total = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        parts = getattr(tensor, "tensor_data_names", None)
        total += sum(getattr(tensor, name).nbytes for name in parts) if parts else tensor.nbytes
    return total


@pytest.mark.parametrize("name", ["idefics3", "blip2", "florence2", "qwen2_5_vl", "qwen3_vl"])
def test_passes_of_each_class_are_forecast_without_weights(
    without_weights: Callable[[str], Path], name: str
) -> None:
    folder = without_weights(name)
    short, long = (caption_memory(job(folder, max_tokens=each), quantize=None) for each in (8, 200))
    assert (short.note, long.note) == ("", "")
    assert short.host < short.device < long.device


def test_weights_are_those_of_the_loaded_model(
    captioner: Callable[[str], Path], without_weights: Callable[[str], Path]
) -> None:
    for name in ("idefics3", "qwen2_5_vl", "qwen3_vl"):
        folder = without_weights(name)
        plain = AutoModelForImageTextToText.from_pretrained(captioner(name), dtype=torch.bfloat16)
        assert caption_memory(job(folder), quantize=None).host == stored_bytes(plain)

        # Both have the same passes, apart from the largest weight, which is unpacked meanwhile.
        options: dict[str, Any] = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
        packed = AutoModelForImageTextToText.from_pretrained(
            captioner(name), dtype=torch.bfloat16, device_map="cpu", **options
        )
        saved = stored_bytes(plain) - stored_bytes(packed)
        forecasts = [caption_memory(job(folder), quantize=each).device for each in (None, "int8")]
        assert saved > 0
        assert 0 <= forecasts[1] - (forecasts[0] - saved) < 20_000


def test_keys_and_values_of_the_longest_caption_are_counted(without_weights: Callable[[str], Path]) -> None:
    folder = without_weights("qwen2_5_vl")
    # Both passes are so long that the language model needs most, in which each token has equal parts.
    few, many = (caption_memory(job(folder, max_tokens=each), quantize=None) for each in (1000, 2000))
    cache_bytes = GPU_BATCH * 1000 * 2 * 2 * 32 * 2  # layers, keys and values, width, bytes
    assert many.device - few.device > cache_bytes


def test_examples_and_float32_take_more_memory(without_weights: Callable[[str], Path]) -> None:
    folder = without_weights("idefics3")
    plain = caption_memory(job(folder), quantize=None)
    with_example = replace(job(folder), examples=[{"image": None, "caption": "a red rose " * 20}])
    assert caption_memory(with_example, quantize=None).device > plain.device
    assert caption_memory(job(folder, "float32"), quantize=None).host == pytest.approx(
        2 * plain.host, rel=0.01
    )


def test_plan_names_the_setting_with_which_a_captioning_model_fits(
    without_weights: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = without_weights("idefics3")
    captions = {"from": "model", "model": str(folder), "resolution": 64}
    recipe = recipe_from_mapping(
        "flowers",
        {
            "datasets": [
                {"name": "photos", "path": str(tmp_path / "photos"), "captions": captions},
                {"name": "tags", "path": str(tmp_path / "b"), "captions": {**captions, "tagger": {}}},
            ],
            "output_dir": str(tmp_path / "out"),
            "model": {"base": str(tmp_path / "base")},
            "buckets": {"resolution": 64, "step": 16},
        },
    )
    make_tiny(tmp_path / "base")
    needed = caption_memory(job(folder, "float32", max_tokens=200), quantize=None).device
    memory = forecast_memory(recipe, card_bytes=RESERVED_BYTES + needed - 1)
    assert [each.stage for each in memory.stages] == [
        "write captions",
        "encode latents",
        "encode text",
        "train",
        "draw previews",
    ]
    stage = memory.stages[0]
    assert stage.device_bytes == needed
    assert stage.note == "it does not fit, set captions.dtype: bfloat16"
    assert stage.host_bytes > needed


def test_without_passes_the_weights_are_forecast_and_the_note_says_so(
    without_weights: Callable[[str], Path],
) -> None:
    # The code of this class needs values of a mask.
    memory = caption_memory(job(without_weights("blip")), quantize=None)
    assert memory.device == memory.host
    assert memory.note.startswith("weights alone: passes of BlipForConditionalGeneration give RuntimeError")
