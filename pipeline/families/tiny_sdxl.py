"""A Stable Diffusion XL of about a million random weights, made offline: for the tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pipeline.families.base import BetaPrediction
from pipeline.families.tiny import (
    END,
    MAX_LENGTH,
    START,
    TEXT_WIDTH,
    vocabulary,
    write_json,
    write_text_encoder,
    write_tokenizer,
    write_vae,
)

_POOLED_WIDTH = 48
"""Of the second encoder's projection; not its hidden width, so that no test mistakes one for the other."""

_SECOND_WIDTH = 40
_TIME_ID_WIDTH = 8
_NUM_TIME_IDS = 6


def make_tiny_sdxl(folder: Path, *, prediction_type: BetaPrediction = "epsilon", seed: int = 0) -> None:
    """Write the model as a diffusers folder; the same bytes for the same arguments.

    It is read by `StableDiffusionXLPipeline.from_pretrained(folder)` and draws pictures of 64x64 pixels. The
    caller's random state is left as it was.

    Args:
        folder: Made with its parents; files that are there already are replaced.
        prediction_type: What the scheduler's configuration says.
        seed: Of the random weights.
    """
    import torch
    from diffusers import EulerDiscreteScheduler

    folder.mkdir(parents=True, exist_ok=True)
    writers = (
        ("vae", partial(write_vae, scaling_factor=0.13025)),
        ("unet", _write_unet),
        ("text_encoder", write_text_encoder),
        ("text_encoder_2", _write_second_encoder),
    )
    with torch.random.fork_rng(devices=[]):
        for role, write in writers:
            torch.manual_seed(seed)
            write(folder / role)
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        timestep_spacing="leading",
        prediction_type=prediction_type,
    )
    scheduler.save_pretrained(folder / "scheduler")
    write_tokenizer(folder / "tokenizer")
    write_tokenizer(folder / "tokenizer_2")
    write_json(folder / "model_index.json", _index())


def _write_unet(folder: Path) -> None:
    from diffusers import UNet2DConditionModel

    by_level: dict[str, Any] = {"attention_head_dim": (2, 4), "transformer_layers_per_block": (1, 2)}
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **by_level,
        use_linear_projection=True,
        norm_num_groups=8,
        cross_attention_dim=TEXT_WIDTH + _SECOND_WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=_TIME_ID_WIDTH,
        projection_class_embeddings_input_dim=_POOLED_WIDTH + _NUM_TIME_IDS * _TIME_ID_WIDTH,
    )
    unet.save_pretrained(folder)


def _write_second_encoder(folder: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    ids = vocabulary()[0]
    config = CLIPTextConfig(
        vocab_size=len(ids),
        hidden_size=_SECOND_WIDTH,
        intermediate_size=2 * _SECOND_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        projection_dim=_POOLED_WIDTH,
        hidden_act="gelu",
        bos_token_id=ids[START],
        eos_token_id=ids[END],
        pad_token_id=ids[END],
    )
    CLIPTextModelWithProjection(config).save_pretrained(folder)


def _index() -> dict[str, object]:
    import diffusers

    return {
        "_class_name": "StableDiffusionXLPipeline",
        "_diffusers_version": diffusers.__version__,
        "feature_extractor": [None, None],
        "force_zeros_for_empty_prompt": True,
        "image_encoder": [None, None],
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
