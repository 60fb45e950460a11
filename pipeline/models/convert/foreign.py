"""Files that hold no whole denoiser, or one that cannot be trained: each is refused by what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.errors import ModelError
from pipeline.models.convert.header import Header

_PACKED_TYPES = re.compile(r"(F8_|F4|F6_|I8|U8|I4|U4)")
"""Number formats of packed weights, as safetensors names them."""

_PACKED_NAMES = (
    ".scale_weight",
    ".weight_scale",
    ".scale_input",
    "scaled_fp8",
    ".comfy_quant",
    ".absmax",
    ".quant_state",
    ".qweight",
    ".wscales",
    ".SCB",
)

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class _Kind:
    """A kind of file, known by texts that occur in names of its tensors, and what to do with it."""

    what: str
    fix: str
    parts: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()


_LORA = _Kind(
    "a LoRA (or LoHa, LoKr), which is added to a model",
    "name the model that it was made for; training.lora.start_from goes on from a LoRA",
    parts=(
        ".lora_down.",
        ".lora_up.",
        ".lora_A.",
        ".lora_B.",
        ".lora.down.",
        ".hada_w1_a",
        ".lokr_w1",
        ".oft_blocks",
        ".diff_b",
    ),
    starts=("lora_unet_", "lora_te", "lora_transformer_"),
)
_CONTROL = _Kind(
    "a ControlNet or another adapter, which steers a model",
    "name the model that it was made for",
    parts=("controlnet_cond_embedding.", "input_hint_block.", "controlnet_blocks.", "motion_modules."),
    starts=("control_model.", "control_layers.", "control_all_x_embedder.", "ip_adapter.", "image_proj."),
)
_VAE = _Kind(
    "a VAE alone",
    "name the model; a VAE in diffusers' form, a folder or a Hub id, is taken by "
    "model.components: {vae: ...}",
    starts=("encoder.conv_in.", "encoder.down.", "first_stage_model.", "vae.encoder.", "encoder.stages."),
)
_TEXT_ENCODER = _Kind(
    "a text encoder alone",
    "name the model; a text encoder in diffusers' form is taken by model.components: {text_encoder: ...}",
    parts=(".layer.0.SelfAttention.", "self_attn.q_proj.", "transformer.resblocks."),
    starts=("text_model.", "cond_stage_model.", "text_encoders."),
)
_EMBEDDING = _Kind(
    "an embedding (textual inversion), which is a word for a model",
    "name the model that it was made for",
    starts=("emb_params", "string_to_param", "clip_l", "clip_g"),
)
_DIFFUSERS = _Kind(
    "one part of a diffusers folder, in diffusers' own layout",
    "name its folder, which has a config.json too: as model.base where a model_index.json lies above it, or "
    "alone in model.components, such as {unet: FOLDER} or {transformer: FOLDER}",
    starts=("down_blocks.", "transformer_blocks.", "single_transformer_blocks.", "joint_transformer_blocks."),
)
_ADAPTERS = (_LORA, _CONTROL)
"""May hold names of a denoiser too, so they are asked about first."""

_OTHERS = (_VAE, _TEXT_ENCODER, _DIFFUSERS, _EMBEDDING)


def refuse_adapter(header: Header) -> None:
    """Nothing, where the file is no adapter, and no shard of a larger one.

    Raises:
        ModelError: It is; the text says which.
    """
    if _SHARD.search(header.file.stem):
        raise ModelError(
            "that is one of several shards of a model",
            where=str(header.file),
            fix="name a file that holds all of it, or the diffusers folder that the shards belong to",
        )
    for kind in _ADAPTERS:
        if _is(header, kind):
            raise _refusal(header, kind)


def refuse_unknown(header: Header) -> ModelError:
    """For a file with no denoiser that is known: what it is, if that can be told."""
    for kind in _OTHERS:
        if _is(header, kind):
            return _refusal(header, kind)
    from pipeline.models.convert.layouts import LAYOUTS

    shown = ", ".join(header.names[:3]) + (", ..." if len(header.names) > 3 else "")
    return ModelError(
        f"the file is in no layout that is known here: its tensors are {shown or 'none at all'}",
        where=str(header.file),
        fix=f"a file can be converted that holds {', '.join(layout.name for layout in LAYOUTS)}",
    )


def refuse_packed(header: Header, prefix: str) -> None:
    """Nothing, where the denoiser's weights are numbers that can be computed with.

    Raises:
        ModelError: They are packed, such as fp8, int8 or nf4.
    """
    packed = sorted({each.dtype for each in header.below(prefix).values() if is_packed(each.dtype)})
    if packed or any(part in name for name in header.below(prefix) for part in _PACKED_NAMES):
        how = f" as {', '.join(packed)}" if packed else ""
        raise ModelError(
            f"its weights are packed{how} (fp8, int8 or fewer bits), which has lost what a training needs",
            where=str(header.file),
            fix="take the same model in float16, bfloat16 or float32; to save memory while training, "
            "training.quantize packs such weights itself",
        )


def is_packed(dtype: str) -> bool:
    """Whether numbers of this format are packed weights."""
    return _PACKED_TYPES.match(dtype) is not None


def _is(header: Header, kind: _Kind) -> bool:
    return header.has_any(kind.parts) or any(name.startswith(kind.starts) for name in header.names)


def _refusal(header: Header, kind: _Kind) -> ModelError:
    return ModelError(f"that is {kind.what}, and no model", where=str(header.file), fix=kind.fix)
