"""Names of the layers in transformers of the FLUX kind, with double and single blocks."""

from __future__ import annotations

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.parts.lora_keys import BlockNames, StackedKeys

# Published width of FLUX.1's transformer, the only one for which diffusers reads kohya's single blocks.
_CONVERTED_WIDTH = 3072


def _double_blocks(mlp_in: str, mlp_out: str) -> BlockNames:
    return BlockNames(
        "transformer_blocks",
        {
            "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "img_attn_proj": ("attn.to_out.0",),
            "img_mlp_0": (f"ff.{mlp_in}",),
            "img_mlp_2": (f"ff.{mlp_out}",),
            "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "txt_attn_proj": ("attn.to_add_out",),
            "txt_mlp_0": (f"ff_context.{mlp_in}",),
            "txt_mlp_2": (f"ff_context.{mlp_out}",),
        },
        original="double_blocks",
    )


_DOUBLE, _DOUBLE_2 = _double_blocks("net.0.proj", "net.2"), _double_blocks("linear_in", "linear_out")
_SINGLE = BlockNames(
    "single_transformer_blocks",
    {
        "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        "linear2": ("proj_out",),
    },
    original="single_blocks",
)
_SINGLE_2 = BlockNames(
    "single_transformer_blocks",
    {"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)},
    original="single_blocks",
)


def flux_targets(model: ModelFolder) -> list[str]:
    """Return the linear layers in double and single blocks except modulations; no layers outside blocks."""
    # `proj_out` is also the name of a layer outside of the blocks, so each block's layer has its number.
    blocks = range(int(model.config("transformer")["num_single_layers"]))
    return [*_DOUBLE.modules, "proj_mlp", *(f"{block}.proj_out" for block in blocks)]


def flux2_targets(model: ModelFolder) -> list[str]:
    """Return the linear layers in double and single blocks."""
    blocks = range(int(model.config("transformer")["num_single_layers"]))
    outs = [f"single_transformer_blocks.{block}.attn.to_out" for block in blocks]
    return [*_DOUBLE_2.modules, "attn.to_qkv_mlp_proj", *outs]


def _has_converted_width(model: ModelFolder) -> bool:
    config = model.config("transformer")
    return int(config["num_attention_heads"]) * int(config["attention_head_dim"]) == _CONVERTED_WIDTH


FLUX_KEYS = StackedKeys(
    flux_targets,
    kohya_readable=_has_converted_width,
    diffusers_reads_comfyui=True,
    blocks=(_DOUBLE, _SINGLE),
)
"""Keys of FLUX.1 and Chroma."""

FLUX2_KEYS = StackedKeys(flux2_targets, kohya_readable=True, blocks=(_DOUBLE_2, _SINGLE_2))
"""Keys of FLUX.2."""
