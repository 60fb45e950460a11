from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from demo.tiny_models import make_tiny_sd3
from pipeline.errors import BucketError, FamilyError
from pipeline.images.geometry import Size
from pipeline.models.families import Layer
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

JOINT = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class StableDiffusion3Case(Case):
    pipeline_class = StableDiffusion3Pipeline
    targets: ClassVar[list[str]] = [f"attn.{end}" for end in JOINT]
    drawing: ClassVar[dict[str, Any]] = {"guidance_scale": 1.0}

    def make(self, folder: Path) -> None:
        make_tiny_sd3(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, _, pooled, _ = pipe.encode_prompt(caption, caption, caption)
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        text, pooled = micro.conditions["text_embedding"], micro.conditions["pooled_text_embedding"]
        return pipe.transformer(noisy, text, pooled, micro.timesteps).sample

    def kohya_keys(self) -> set[str]:
        layers = {
            "context_block_attn_qkv",
            "context_block_attn_proj",
            "x_block_attn_qkv",
            "x_block_attn_proj",
        }
        keys = {f"lora_unet_joint_blocks_{block}_{layer}" for block in range(3) for layer in layers}
        return keys - {
            "lora_unet_joint_blocks_2_context_block_attn_proj"
        }  # the last block has only an image output


class WithoutT5(StableDiffusion3Case):
    """SD 3.5 medium without its third text encoder."""

    targets: ClassVar[list[str]] = [*StableDiffusion3Case.targets, *(f"attn2.{end}" for end in JOINT[:4])]

    def make(self, folder: Path) -> None:
        make_tiny_sd3(folder, t5_encoder=False, dual_attention=True)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        return super().pipeline(folder, text_encoder_3=None, tokenizer_3=None, **parts)

    def kohya_keys(self) -> set[str]:
        second = {f"lora_unet_joint_blocks_0_x_block_attn2_{layer}" for layer in ("qkv", "proj")}
        return super().kohya_keys() | second


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(StableDiffusion3Case())


def test_the_complete_job_equals_diffusers_without_t5_and_with_dual_attention(
    check_family: Callable[[Case], None],
) -> None:
    check_family(WithoutT5())


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> WorkerFamily:
    folder = tmp_path_factory.mktemp("base")
    make_tiny_sd3(folder)
    return load_family(folder)


def test_without_t5_its_tokens_are_zeros_as_in_diffusers(tmp_path: Path) -> None:
    make_tiny_sd3(tmp_path, t5_encoder=False)
    family = load_family(tmp_path)
    assert family.max_length() == 77
    assert [part.role for part in family.fingerprint_parts("text")] == [
        "tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2"
    ]  # fmt: skip
    encoded = family.text.encode_caption(family.text.load("float32", "cpu"), "cat " * 80)
    pipe = StableDiffusion3Pipeline.from_pretrained(tmp_path, text_encoder_3=None, tokenizer_3=None)
    with torch.no_grad():
        expected = pipe.encode_prompt("cat " * 80, None, None, do_classifier_free_guidance=False)[0][0]
    torch.testing.assert_close(encoded.tensors["text_embedding"], expected, rtol=0, atol=1e-5)
    assert not encoded.tensors["text_embedding"][77:].any()
    assert (encoded.num_tokens, encoded.num_cut, encoded.cut_from) == (82, 5, 4 * 75)


def test_a_caption_is_cut_only_where_t5_ends(family: WorkerFamily) -> None:
    encoders = family.text.load("float32", "cpu")
    short = family.text.encode_caption(encoders, "cat " * 80)
    assert (short.num_cut, short.cut_from) == (0, None)
    long = family.text.encode_caption(encoders, "cat " * 300)
    assert (long.num_tokens, long.num_cut, long.cut_from) == (301, 45, 4 * 255)


def test_a_size_beyond_the_position_table_is_an_error(family: WorkerFamily) -> None:
    assert family.latent_shape(Size(192, 64)) == (16, 24, 8)
    with pytest.raises(BucketError, match="208x64"):
        family.latent_shape(Size(208, 64))


def test_query_key_and_value_share_one_layer_in_kohyas_layout(family: WorkerFamily) -> None:
    names = ("to_q", "to_k", "to_v")
    modules = tuple(f"transformer_blocks.1.attn.{name}" for name in names)
    assert family.kohya_layer(modules[1]) == Layer("lora_unet_joint_blocks_1_x_block_attn_qkv", modules)
    with pytest.raises(FamilyError, match="proj_out"):
        family.kohya_layer("proj_out")
