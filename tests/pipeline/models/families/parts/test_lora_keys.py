from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import FamilyError
from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families import FAMILIES
from pipeline.models.families.parts.lora_keys import BlockNames, ClipLora, Layer, LoraKeys, StackedKeys

CLIP = ClipLora("lora_te2", "clip_g", num_layers=2)
MODEL = ModelFolder(Path())
"""A model of which these keys read no file."""


@pytest.mark.parametrize("prefix", ["", "text_model."])
def test_keys_of_a_clip_are_the_same_whether_or_not_its_class_has_the_prefix(prefix: str) -> None:
    path = "encoder.layers.1.self_attn.q_proj"
    assert CLIP.keys("text_encoder_2", f"{prefix}{path}") == (
        f"text_encoder_2.text_model.{path}",
        "lora_te2_text_model_encoder_layers_1_self_attn_q_proj",
        f"text_encoders.clip_g.transformer.text_model.{path}",
    )


@pytest.mark.parametrize(
    "module", ["text_projection", "text_model.embeddings.token_embedding", "encoder.norm"]
)
def test_a_module_outside_of_a_clips_layers_has_no_key(module: str) -> None:
    with pytest.raises(FamilyError, match=f"cannot name the module {module}"):
        CLIP.keys("text_encoder", module)


def test_the_targets_of_a_clip_are_the_layers_that_the_embeddings_depend_on() -> None:
    attention = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    blocks = [*attention, "mlp.fc1", "mlp.fc2"]
    for which, layers in (("attention", attention), ("blocks", blocks)):
        expected = [f"encoder.layers.{number}.{layer}" for number in (0, 1) for layer in layers]
        assert CLIP.targets(which) == expected


def test_layers_without_other_names_keep_the_path_of_diffusers() -> None:
    keys = LoraKeys(["to_q"])
    assert keys.kohya_layer(MODEL, "mid.0.to_q") == Layer("lora_unet_mid_0_to_q", ("mid.0.to_q",))
    assert keys.comfyui_key(MODEL, "mid.0.to_q") == "transformer.mid.0.to_q"
    assert LoraKeys([], comfyui_prefix="diffusion_model.").comfyui_key(MODEL, "a") == "diffusion_model.a"
    assert (keys.targets(MODEL), LoraKeys(lambda model: ["a", "b"]).targets(MODEL)) == (["to_q"], ["a", "b"])
    assert [LoraKeys([], kohya_readable=each).reads_kohya(MODEL) for each in (False, True)] == [False, True]
    assert LoraKeys([], kohya_readable=lambda model: model is MODEL).reads_kohya(MODEL)
    assert not keys.reads_kohya(MODEL)
    assert keys.max_parts == 1


def test_kohyas_layout_is_read_back_with_diffusers_for_the_families_whose_loader_reads_it() -> None:
    readable = {spec.name: spec.lora.kohya_readable for spec in FAMILIES}
    assert {name for name, value in readable.items() if value is True} == {
        *("Stable Diffusion 1.x and 2.x", "Stable Diffusion XL", "Kolors"),
        *("FLUX.2 klein", "FLUX.2 dev", "Qwen-Image", "Qwen-Image-Edit", "Qwen-Image-Edit (first)"),
        "Z-Image",
    }
    depends_on_width = {name for name, value in readable.items() if callable(value)}
    assert depends_on_width == {"FLUX.1", "FLUX.1 Kontext", "Chroma"}


BLOCKS = (
    BlockNames("layers|refiner", {"qkv": ("to_q", "to_k", "to_v"), "out": ("to_out.0",)}),
    BlockNames("single", {"linear1": ("to_q", "proj")}, original="single_blocks"),
)


@pytest.mark.parametrize(
    ("module", "key", "modules"),
    [
        ("layers.3.to_k", "layers_3_qkv", ("layers.3.to_q", "layers.3.to_k", "layers.3.to_v")),
        ("refiner.11.to_out.0", "refiner_11_out", ("refiner.11.to_out.0",)),
        ("single.0.proj", "single_blocks_0_linear1", ("single.0.to_q", "single.0.proj")),
    ],
)
def test_a_stacked_layer_has_one_key_for_all_its_modules(
    module: str, key: str, modules: tuple[str, ...]
) -> None:
    keys = StackedKeys([], blocks=BLOCKS)
    assert keys.max_parts == 3
    assert keys.kohya_layer(MODEL, module) == Layer(f"lora_unet_{key}", modules)
    assert keys.comfyui_key(MODEL, module) == f"transformer.{module}"
    as_kohya = StackedKeys([], blocks=BLOCKS, comfyui_as_kohya=True)
    assert as_kohya.comfyui_key(MODEL, module) == f"lora_unet_{key}"


@pytest.mark.parametrize(
    "module", ["layers.3.norm", "to_q", "layers.to_q", "other.3.to_q", "layers.3.to_q.0"]
)
def test_a_module_that_no_block_names_is_an_error(module: str) -> None:
    with pytest.raises(FamilyError, match="does not include the module"):
        StackedKeys([], blocks=BLOCKS).kohya_layer(MODEL, module)
