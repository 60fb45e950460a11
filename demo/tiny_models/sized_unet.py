"""A tiny UNet conditioned on sizes, crop and a pooled text embedding, as in Stable Diffusion XL."""

from __future__ import annotations

from typing import Any

_TIME_ID_WIDTH = 8
_NUM_TIME_IDS = 6


def sized_unet(*, text_width: int, pooled_width: int, **more: Any) -> Any:
    """Return a `UNet2DConditionModel` with random weights and no attention in its first level.

    Args:
        text_width: Width of the text embedding.
        pooled_width: Width of the pooled text embedding.
        **more: Further arguments of the class.
    """
    from diffusers import UNet2DConditionModel

    by_level: dict[str, Any] = {"attention_head_dim": (2, 4), "transformer_layers_per_block": (1, 2)}
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **by_level,
        use_linear_projection=True,
        norm_num_groups=8,
        cross_attention_dim=text_width,
        addition_embed_type="text_time",
        addition_time_embed_dim=_TIME_ID_WIDTH,
        projection_class_embeddings_input_dim=pooled_width + _NUM_TIME_IDS * _TIME_ID_WIDTH,
        **more,
    )
