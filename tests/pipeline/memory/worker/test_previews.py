"""The memory of previews against an independent accounting, and against a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from bench.gpu.configurations import PUBLISHED
from pipeline.images.geometry import Size
from pipeline.memory.worker.previews import preview_size, previews_bytes
from pipeline.models.worker.family import load_family
from pipeline.models.worker.loading import component_class
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.trained_lora.worker.memory.training import TrainingForecast
from tests.pipeline.memory.fake_accounting import cuda_functions, preview_peak_bytes

GIB = 2**30
SIZE = Size(1024, 1024)

MEASURED_SDXL = 8.8 * GIB
"""Peak of a preview of SDXL with a LoRA of rank 16 and AdamW on an H100; bench/results/h100.jsonl."""


def recipe(folder: Path, **training: Any) -> Recipe:
    values: dict[str, Any] = {
        "datasets": [{"name": "photos", "path": str(folder / "photos")}],
        "output_dir": str(folder / "out"),
        "model": {"base": str(folder / "model")},
        "training": {"batch_size": 1, "lora": {"rank": 16, "alpha": 16}, **training},
        "accelerate": {"mixed_precision": "bf16"},
    }
    return recipe_from_mapping("previews", values)


def sd15(network: Any, vae: Any) -> Tensor:
    with cuda_functions():
        text, latents = torch.empty(2, 77, 768), torch.empty(2, 4, 128, 128)
        guided = network(latents, torch.empty(2), encoder_hidden_states=text).sample
    return vae.decode(guided[:1].float(), return_dict=False)[0]


def sdxl(network: Any, vae: Any) -> Tensor:
    with cuda_functions():
        conditions = {"text_embeds": torch.empty(2, 1280), "time_ids": torch.empty(2, 6)}
        text, latents = torch.empty(2, 77, 2048), torch.empty(2, 4, 128, 128)
        arguments = {"encoder_hidden_states": text, "added_cond_kwargs": conditions}
        guided = network(latents, torch.empty(2), **arguments).sample
    return vae.decode(guided[:1].float(), return_dict=False)[0]


def flux(network: Any, vae: Any) -> Tensor:
    with cuda_functions():
        network(
            hidden_states=torch.empty(1, 4096, 64),
            timestep=torch.empty(1),
            guidance=torch.empty(1),
            pooled_projections=torch.empty(1, 768),
            encoder_hidden_states=torch.empty(1, 512, 4096),
            txt_ids=torch.empty(512, 3),
            img_ids=torch.empty(4096, 3),
        )
    return vae.decode(torch.empty(1, 16, 128, 128), return_dict=False)[0]


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("Stable Diffusion 1.5", sd15),
        pytest.param("SDXL", sdxl, marks=pytest.mark.slow),
        pytest.param("FLUX.1 dev", flux, marks=pytest.mark.slow),
    ],
)
def test_the_forecast_of_previews_is_within_a_tenth_of_the_accounting(
    name: str,
    draw: Callable[[Any, Any], Tensor],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    published = next(each for each in PUBLISHED if each.name == name)
    family = load_family(published.write(tmp_path / "model"))
    training = TrainingForecast(family, recipe(tmp_path), SIZE)
    forecast_bytes = previews_bytes(family, recipe(tmp_path), training, training.variant, SIZE)[1]

    def make(role: str) -> Any:
        return component_class(family, role).from_config(family.model.config(role))

    accounted_bytes = preview_peak_bytes(
        lambda: make(family.spec.denoiser_name).bfloat16(),
        lambda: make("vae"),
        draw,
        adapter=LoraConfig(r=16, lora_alpha=16, target_modules=family.lora_targets()),
    )
    record_property("forecast, accounting in GiB", (forecast_bytes / GIB, accounted_bytes / GIB))
    assert forecast_bytes == pytest.approx(accounted_bytes, rel=0.1)
    if name == "SDXL":
        assert forecast_bytes == pytest.approx(MEASURED_SDXL, rel=0.1)


def test_the_largest_preview_decides(tmp_path: Path) -> None:
    bucket = Size(1024, 768)
    assert preview_size(recipe(tmp_path), bucket) == bucket
    small = {"prompt": "a", "height": 512, "width": 512}
    assert preview_size(recipe(tmp_path, sample_prompts=[small]), bucket) == Size(512, 512)
    both = recipe(tmp_path, sample_prompts=[small, "b"])
    assert preview_size(both, bucket) == bucket
    large = {"prompt": "c", "height": 1536, "width": 1024}
    assert preview_size(recipe(tmp_path, sample_prompts=[small, large]), bucket) == Size(1536, 1024)
