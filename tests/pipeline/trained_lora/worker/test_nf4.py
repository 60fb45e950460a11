"""nf4 packs the layers of the blocks, and nothing else that diffusers can tell apart from them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from demo.tiny_models import make_tiny_flux, make_tiny_flux2_dev, make_tiny_sdxl
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.nf4 import layers_outside_blocks, unpacked_layers

FLUX_OUTSIDE = {
    "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.linear_2",
    "time_text_embed.guidance_embedder.linear_1",
    "time_text_embed.guidance_embedder.linear_2",
    "time_text_embed.text_embedder.linear_1",
    "time_text_embed.text_embedder.linear_2",
    "context_embedder",
    "x_embedder",
    "norm_out.linear",
}


def test_embedders_and_output_layers_of_flux_are_outside_of_its_blocks(tmp_path: Path) -> None:
    make_tiny_flux(tmp_path / "flux")
    assert set(unpacked_layers(load_family(tmp_path / "flux"))) == FLUX_OUTSIDE


def test_modulations_that_all_blocks_share_are_not_packed(tmp_path: Path) -> None:
    make_tiny_flux2_dev(tmp_path / "flux2")
    outside = unpacked_layers(load_family(tmp_path / "flux2"))
    assert {name for name in outside if "modulation" in name} == {
        "double_stream_modulation_img.linear",
        "double_stream_modulation_txt.linear",
        "single_stream_modulation.linear",
    }
    assert {"x_embedder", "context_embedder", "proj_out"} <= set(outside)


def test_the_attention_of_a_unet_is_packed_and_its_embeddings_are_not(tmp_path: Path) -> None:
    make_tiny_sdxl(tmp_path / "sdxl")
    outside = unpacked_layers(load_family(tmp_path / "sdxl"))
    assert {name.partition(".")[0] for name in outside} == {"time_embedding", "add_embedding"}


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_diffusers_replaces_exactly_the_other_layers_and_quantizes_their_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers replaces the layers on any machine; only their weights need a GPU."""
    import bitsandbytes
    from diffusers.quantizers.bitsandbytes.utils import replace_with_bnb_linear

    from pipeline.trained_lora.worker.base_model import quantization

    make_tiny_flux(tmp_path / "flux")
    family = load_family(tmp_path / "flux")
    with torch.device("meta"):
        denoiser = FluxTransformer2DModel.from_config(family.denoiser_config)
    linear = {name for name, each in denoiser.named_modules() if isinstance(each, nn.Linear)}
    outside = layers_outside_blocks(denoiser)
    config = quantization("nf4", "bfloat16", "cuda", unpacked=outside)

    skipped = config.llm_int8_skip_modules
    replaced = replace_with_bnb_linear(denoiser, modules_to_not_convert=skipped, quantization_config=config)
    packed = {
        name: each for name, each in replaced.named_modules() if isinstance(each, bitsandbytes.nn.Linear4bit)
    }
    assert set(packed) == linear - set(outside)
    assert "proj_out" in packed
    assert {(each.weight.compress_statistics, each.weight.quant_type) for each in packed.values()} == {
        (True, "nf4")
    }
