from __future__ import annotations

import pytest

from pipeline.models.families import FAMILIES
from pipeline.models.families.compute_dtype import (
    denoiser_precision,
    dtypes_text,
    text_encoder_dtype,
    vae_dtype,
)

CLIP_CLASSES = {"CLIPTextModel", "CLIPTextModelWithProjection"}
LANGUAGE_MODELS = {
    "ChatGLMModel",
    "Gemma2Model",
    "GlmModel",
    "LlamaForCausalLM",
    "Mistral3ForConditionalGeneration",
    "Mistral3Model",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLModel",
    "SmolLM3Model",
    "T5EncoderModel",
    "UMT5EncoderModel",
}


def test_auto_is_float32_for_clip_and_bfloat16_for_every_language_model_of_the_families() -> None:
    classes = {
        path.rpartition(".")[2]: text_encoder_dtype("auto", path)
        for spec in FAMILIES
        for role, path in spec.components.items()
        if role.startswith("text_encoder")
    }
    assert {name for name, dtype in classes.items() if dtype == "float32"} == CLIP_CLASSES
    assert {name for name, dtype in classes.items() if dtype == "bfloat16"} == LANGUAGE_MODELS


def test_auto_is_float32_for_a_vae_unless_its_configuration_declares_half_precision_safe() -> None:
    assert vae_dtype("auto", {"force_upcast": True}) == "float32"
    assert vae_dtype("auto", {}) == "float32"
    assert vae_dtype("auto", {"force_upcast": False}) == "float16"


def test_auto_trains_transformers_in_bf16_and_unets_as_before_in_float32() -> None:
    precisions = {spec.name: denoiser_precision("auto", spec.denoiser_name) for spec in FAMILIES}
    unets = {"Stable Diffusion 1.x and 2.x", "Stable Diffusion XL", "Kolors"}
    assert {name for name, precision in precisions.items() if precision == "no"} == unets
    assert set(precisions.values()) == {"no", "bf16"}
    assert {denoiser_precision(each, "unet") for each in ("no", "fp16", "bf16")} == {"no", "fp16", "bf16"}


@pytest.mark.parametrize("setting", ["float16", "bfloat16", "float32"])
def test_a_stated_dtype_applies_to_every_component(setting: str) -> None:
    assert vae_dtype(setting, {"force_upcast": False}) == setting
    assert text_encoder_dtype(setting, "transformers.CLIPTextModel") == setting
    assert text_encoder_dtype(setting, "transformers.T5EncoderModel") == setting


def test_dtypes_that_agree_are_written_once() -> None:
    assert dtypes_text({"text_encoder": "float32", "text_encoder_2": "float32"}) == "float32"
    different = {"text_encoder": "float32", "text_encoder_2": "bfloat16"}
    assert dtypes_text(different) == "text_encoder float32, text_encoder_2 bfloat16"
