"""A tiny Qwen-Image 2.1 with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import PARTS_TEMPLATE, qwen3_vl, write_qwen_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule, write_json
from pipeline.storage.atomic import write_text

_TEXT_WIDTH = 32
_CHANNELS = 64
_MEAN_GAIN = 16.0
_LOGVAR_BIAS = -8.0
_TURBO_SIGMAS = (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568)


def make_tiny_qwen_image21(folder: Path, *, turbo: bool = False, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `QwenImage21Pipeline.from_pretrained(folder)` loads it if torchvision is installed, which the image
    processor requires. It draws pictures of 64x64 pixels with an alpha channel.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        turbo: Use the schedule of Qwen-Image-2.1-Turbo.
        seed: Seed of the random weights.
    """
    schedule = {} if turbo else {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192}
    assemble(
        folder,
        "QwenImage21Pipeline",
        {
            "vae": _vae,
            "transformer": _transformer,
            "text_encoder": partial(qwen3_vl, "Qwen3VLForConditionalGeneration", width=_TEXT_WIDTH),
            "scheduler": partial(flow_schedule, **schedule),
        },
        tokenizers={"processor": _write_processor},
        seed=seed,
        index={"sample_sigmas": _TURBO_SIGMAS} if turbo else None,
    )


def _write_processor(folder: Path) -> str:
    """Write a `Qwen3VLProcessor` with tokenizer, template and image processors; return its class name."""
    write_qwen_tokenizer(folder, template=PARTS_TEMPLATE)
    write_text(folder / "chat_template.jinja", PARTS_TEMPLATE)
    reading = {
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "processor_class": "Qwen3VLProcessor",
    }
    size = {"shortest_edge": 64 * 64, "longest_edge": 4096 * 4096}
    images = {**reading, "image_processor_type": "Qwen2VLImageProcessor", "size": size}
    write_json(folder / "preprocessor_config.json", images)
    write_json(
        folder / "video_preprocessor_config.json",
        {**reading, "video_processor_type": "Qwen3VLVideoProcessor"},
    )
    return "Qwen3VLProcessor"


def _vae() -> Any:
    """Return an `AutoencoderKLQwenImage21` with 64 channels and factor 16."""
    import torch
    from diffusers import AutoencoderKLQwenImage21

    made: Any = AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=4, num_res_blocks=1)
    with torch.no_grad():
        made.quant_conv.weight[:_CHANNELS] *= _MEAN_GAIN
        made.quant_conv.bias[_CHANNELS:] = _LOGVAR_BIAS
    return made


def _transformer() -> Any:
    from diffusers import QwenImage21Transformer2DModel

    return QwenImage21Transformer2DModel(
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=_TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
