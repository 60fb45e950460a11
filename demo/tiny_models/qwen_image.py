"""A tiny Qwen-Image with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import qwen2_5_vl, write_qwen_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule, write_json

_TEXT_WIDTH = 32
_CHANNELS = 16
_MEAN_GAIN = 8.0
_LOGVAR_BIAS = -8.0


def make_tiny_qwen_image(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `QwenImagePipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "QwenImagePipeline",
        {
            "vae": qwen_vae,
            "transformer": _transformer,
            "text_encoder": partial(qwen2_5_vl, width=_TEXT_WIDTH),
            "scheduler": partial(
                flow_schedule,
                use_dynamic_shifting=True,
                max_shift=0.9,
                max_image_seq_len=8192,
            ),
        },
        tokenizers={"tokenizer": write_qwen_tokenizer},
        seed=seed,
    )


def make_tiny_qwen_image_edit(
    folder: Path, *, first: bool = False, zero_cond_t: bool = True, seed: int = 0
) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `QwenImageEditPlusPipeline.from_pretrained(folder)` loads it if torchvision is installed, which the
    processor requires; `QwenImageEditPipeline` loads the first model.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        first: Whether to write the model before 2509, for one reference and without `zero_cond_t`.
        zero_cond_t: Whether references have timestep 0 in the transformer, as in the models since 2511.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "QwenImageEditPipeline" if first else "QwenImageEditPlusPipeline",
        {
            "vae": qwen_vae,
            "transformer": partial(_transformer, zero_cond_t=zero_cond_t and not first),
            "text_encoder": partial(qwen2_5_vl, width=_TEXT_WIDTH),
            "scheduler": partial(
                flow_schedule, use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192
            ),
        },
        tokenizers={"tokenizer": write_qwen_tokenizer, "processor": _write_processor},
        seed=seed,
    )


def _write_processor(folder: Path) -> str:
    """Write a `Qwen2VLProcessor` with tokenizer and image processor; return its class name."""
    write_qwen_tokenizer(folder)
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    names = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    write_json(folder / "preprocessor_config.json", {**sizes, **names})
    return "Qwen2VLProcessor"


def qwen_vae() -> Any:
    """Return an `AutoencoderKLQwenImage` with 16 channels and factor 8."""
    import torch
    from diffusers import AutoencoderKLQwenImage

    made: Any = AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1)
    with torch.no_grad():
        made.quant_conv.weight[:_CHANNELS] *= _MEAN_GAIN
        made.quant_conv.bias[_CHANNELS:] = _LOGVAR_BIAS
    return made


def _transformer(*, zero_cond_t: bool = False) -> Any:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    )
