"""The forecast of a training step against an independent accounting, for eight models of published sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig
from torch import Tensor, nn

from bench.gpu.configurations import PUBLISHED, Published
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.models.worker.loading import component_class
from pipeline.recipe import recipe_from_mapping
from pipeline.trained_lora.worker.memory.training import TrainingForecast
from tests.pipeline.memory.fake_accounting import step_peak_bytes

TOKENS = 4096
"""Tokens of an image of 1024 x 1024 px with a VAE that divides edges by 8 and patches of 2."""


def sdxl(network: Any) -> Tensor:
    conditions = {"text_embeds": torch.empty(1, 1280), "time_ids": torch.empty(1, 6)}
    latent, text = torch.empty(1, 4, 128, 128), torch.empty(1, 77, 2048)
    return network(latent, torch.empty(1), encoder_hidden_states=text, added_cond_kwargs=conditions).sample


def sd35(network: Any) -> Tensor:
    latent, text, pooled = torch.empty(1, 16, 128, 128), torch.empty(1, 333, 4096), torch.empty(1, 2048)
    return network(latent, text, pooled, torch.empty(1), return_dict=False)[0]


def flux(network: Any) -> Tensor:
    return network(
        hidden_states=torch.empty(1, TOKENS, 64),
        timestep=torch.empty(1),
        guidance=torch.empty(1),
        pooled_projections=torch.empty(1, 768),
        encoder_hidden_states=torch.empty(1, 512, 4096),
        txt_ids=torch.empty(512, 3),
        img_ids=torch.empty(TOKENS, 3),
        return_dict=False,
    )[0]


def flux2(network: Any) -> Tensor:
    return network(
        hidden_states=torch.empty(1, TOKENS, 128),
        timestep=torch.empty(1),
        guidance=torch.empty(1),
        encoder_hidden_states=torch.empty(1, 512, 15360),
        txt_ids=torch.empty(1, 512, 4),
        img_ids=torch.empty(1, TOKENS, 4),
        return_dict=False,
    )[0]


def z_image(network: Any) -> Tensor:
    latent, text = torch.empty(16, 1, 128, 128), torch.empty(512, 2560)
    return network([latent], torch.empty(1), [text], return_dict=False)[0][0]


def qwen_image(network: Any) -> Tensor:
    return network(
        hidden_states=torch.empty(1, TOKENS, 64),
        timestep=torch.empty(1),
        encoder_hidden_states=torch.empty(1, 512, 3584),
        encoder_hidden_states_mask=None,
        img_shapes=[[(1, 64, 64)]],
        return_dict=False,
    )[0]


def ernie_image(network: Any) -> Tensor:
    latent, text = torch.empty(1, 128, 64, 64), torch.empty(1, 2048, 3072)
    return network(latent, torch.empty(1), text, torch.empty(1, dtype=torch.long), return_dict=False)[0]


def ideogram(network: Any) -> Tensor:
    length = 2048 + TOKENS
    ids = torch.empty(1, length, dtype=torch.long)
    return network(
        hidden_states=torch.empty(1, length, 128),
        timestep=torch.empty(1),
        encoder_hidden_states=torch.empty(1, length, 53248),
        position_ids=torch.empty(1, length, 3, dtype=torch.long),
        segment_ids=ids,
        indicator=ids,
        return_dict=False,
    )[0][:, 2048:]


PREDICT: dict[str, Callable[[Any], Tensor]] = {
    "SDXL": sdxl,
    "SD3.5 medium": sd35,
    "Z-Image": z_image,
    "FLUX.1 dev": flux,
    "Qwen-Image": qwen_image,
    "ERNIE-Image": ernie_image,
    "Ideogram 4": ideogram,
    "FLUX.2 dev": flux2,
}

SHALLOW = {"num_layers": 2, "num_single_layers": 4}
"""Numbers of blocks of a FLUX.1 dev whose step is accounted in seconds."""


def adapters(targets: list[str]) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return the recipe's settings and peft's configuration of each kind of adapter, by name."""
    rank: dict[str, Any] = {"rank": 16, "alpha": 16}
    low_rank: dict[str, Any] = {"r": 16, "target_modules": targets}
    return {
        "LoRA": (rank, LoraConfig(**low_rank, lora_alpha=16)),
        "DoRA": ({**rank, "dora": True}, LoraConfig(**low_rank, lora_alpha=16, use_dora=True)),
        "LoHa": ({**rank, "kind": "loha"}, LoHaConfig(**low_rank, alpha=16)),
        "LoKr": ({**rank, "kind": "lokr"}, LoKrConfig(**low_rank, alpha=16)),
        "OFT": ({"kind": "oft"}, OFTConfig(oft_block_size=32, target_modules=targets)),
    }


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "LoHa", "LoKr", "OFT"])
def test_the_forecast_of_a_few_blocks_is_within_a_tenth_of_the_accounting(kind: str, tmp_path: Path) -> None:
    published = next(each for each in PUBLISHED if each.name == "FLUX.1 dev")
    transformer = {**published.networks["transformer"], **SHALLOW}
    shallow = replace(published, networks={**published.networks, "transformer": transformer})
    forecast_bytes, accounted_bytes = forecast_and_accounting(shallow, flux, tmp_path, kind)
    assert forecast_bytes == pytest.approx(accounted_bytes, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", PREDICT)
def test_the_forecast_is_within_a_tenth_of_the_accounting(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    published = next(each for each in PUBLISHED if each.name == name)
    forecast_bytes, accounted_bytes = forecast_and_accounting(published, PREDICT[name], tmp_path)
    record_property("forecast, accounting in GiB", (forecast_bytes / 2**30, accounted_bytes / 2**30))
    assert forecast_bytes == pytest.approx(accounted_bytes, rel=0.1)


class SdWithText(nn.Module):
    """The networks of Stable Diffusion, with an adapter in each."""

    def __init__(self, unet: Any, encoder: Any) -> None:
        super().__init__()
        self.unet, self.encoder = unet, encoder

    def add_adapter(self, config: Any) -> None:
        self.unet.add_adapter(config)
        self.encoder.requires_grad_(False)
        self.encoder.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=TEXT_TARGETS))


TEXT_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


@pytest.mark.slow
def test_the_forecast_with_trained_text_encoders_is_within_a_tenth_of_the_accounting(tmp_path: Path) -> None:
    batch_size, size = 8, Size(256, 256)
    published = next(each for each in PUBLISHED if each.name == "Stable Diffusion 1.5")
    family = load_family(published.write(tmp_path / "model"))
    lora = {"rank": 16, "alpha": 16, "text_encoders": {}}

    def forecast(lora: dict[str, Any]) -> int:
        values = {
            "datasets": [{"name": "photos", "path": str(tmp_path / "photos")}],
            "output_dir": str(tmp_path / "out"),
            "model": {"base": str(tmp_path / "model")},
            "training": {"batch_size": batch_size, "lora": lora},
            "accelerate": {"mixed_precision": "bf16"},
        }
        training = TrainingForecast(family, recipe_from_mapping("memory", values), size)
        return training.memory(training.variant).device

    def make() -> Any:
        unet = component_class(family, "unet").from_config(family.denoiser_config)
        kind: Any = component_class(family, "text_encoder")
        return SdWithText(
            unet, kind(kind.config_class.from_dict(family.model.config("text_encoder")))
        ).bfloat16()

    def predict(network: Any) -> Tensor:
        text = network.encoder(torch.zeros(batch_size, 77, dtype=torch.long))[0]
        latent = torch.empty(batch_size, 4, size.height // 8, size.width // 8)
        return network.unet(latent, torch.empty(batch_size), encoder_hidden_states=text).sample

    adapter = LoraConfig(r=16, lora_alpha=16, target_modules=family.lora_targets())
    accounted_bytes = step_peak_bytes(make, predict, adapter=adapter, checkpointing=False)
    assert forecast(lora) == pytest.approx(accounted_bytes, rel=0.1)
    assert forecast({"rank": 16, "alpha": 16}) < 0.9 * accounted_bytes


def forecast_and_accounting(
    published: Published, predict: Callable[[Any], Tensor], tmp_path: Path, kind: str = "LoRA"
) -> tuple[int, int]:
    family = load_family(published.write(tmp_path / "model"))
    settings, adapter = adapters(family.lora_targets())[kind]
    values = {
        "datasets": [{"name": "photos", "path": str(tmp_path / "photos")}],
        "output_dir": str(tmp_path / "out"),
        "model": {"base": str(tmp_path / "model")},
        "training": {"batch_size": 1, "gradient_checkpointing": True, "lora": settings},
        "accelerate": {"mixed_precision": "bf16"},
    }
    training = TrainingForecast(family, recipe_from_mapping("memory", values), Size(1024, 1024))
    forecast_bytes = training.memory(training.variant).device

    def make() -> Any:
        return (
            component_class(family, family.spec.denoiser_name).from_config(family.denoiser_config).bfloat16()
        )

    accounted_bytes = step_peak_bytes(make, predict, adapter=adapter, checkpointing=True)
    return forecast_bytes, accounted_bytes
