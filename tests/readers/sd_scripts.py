"""LoRA files read by sd-scripts' own code, which must be importable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import nn

from pipeline.models.worker.loading import read_text_encoder
from pipeline.trained_lora.export.lora_files import Layout
from tests.pipeline.models.convert.state_dicts import State, weights
from tests.pipeline.models.convert.transformer_originals import anima, flux, lumina2, sd3_transformer
from tests.pipeline.models.convert.unet_originals import unet
from tests.readers.exported import Exported
from tests.readers.kohya_networks import Tensors, on_meta, reading, set_sizes
from tests.readers.readings import Place, Reading, places, text_places


class _Model(NamedTuple):
    """How sd-scripts stores a kind of model.

    Attributes:
        make: Function that creates the model.
        network: Module of its network.
        originals: Function that returns the weights under the names of the original code.
    """

    make: Callable[[], nn.Module]
    network: str
    originals: Callable[[Path], State]


def _sd_unet() -> nn.Module:
    return import_module("library.original_unet").UNet2DConditionModel(
        sample_size=64, cross_attention_dim=768
    )


def _sdxl_unet() -> nn.Module:
    return import_module("library.sdxl_original_unet").SdxlUNet2DConditionModel()


def _sd3() -> nn.Module:
    code: Any = import_module("library.sd3_models")
    return code.MMDiT(
        input_size=None,
        pos_embed_max_size=192,
        in_channels=16,
        depth=24,
        qk_norm="rms",
        adm_in_channels=2048,
        context_embedder_in_features=4096,
        context_embedder_out_features=24 * 64,
        num_patches=192 * 192,
        x_block_self_attn_layers=list(range(13)),
    )


def _flux(version: str) -> nn.Module:
    code: Any = import_module("library.flux_models")
    return code.Flux(code.configs[version].params)


def _chroma() -> nn.Module:
    code: Any = import_module("library.chroma_models")
    return code.Chroma(code.chroma_params)


def _lumina2() -> nn.Module:
    return import_module("library.lumina_models").NextDiT_2B_GQA_patch2_Adaln_Refiner()


def _anima() -> nn.Module:
    return import_module("library.anima_models").Anima(
        max_img_h=512,
        max_img_w=512,
        max_frames=128,
        in_channels=16,
        out_channels=16,
        patch_spatial=2,
        patch_temporal=1,
        model_channels=2048,
        num_blocks=28,
        pos_emb_cls="rope3d",
        use_adaln_lora=True,
    )


MODELS = {
    "Stable Diffusion 1.x and 2.x": _Model(_sd_unet, "lora", weights),
    "Stable Diffusion XL": _Model(_sdxl_unet, "lora", unet),
    "Stable Diffusion 3 and 3.5": _Model(_sd3, "lora_sd3", sd3_transformer),
    "FLUX.1 dev": _Model(lambda: _flux("dev"), "lora_flux", flux),
    "FLUX.1 schnell": _Model(lambda: _flux("schnell"), "lora_flux", flux),
    "FLUX.1 Kontext": _Model(lambda: _flux("dev"), "lora_flux", flux),
    "Chroma": _Model(_chroma, "lora_flux", flux),
    "Lumina Image 2": _Model(_lumina2, "lora_lumina", lumina2),
    "Anima": _Model(_anima, "lora_anima", anima),
}
"""Models that sd-scripts can load, by kind."""


def supports(kind: str) -> bool:
    """Return whether sd-scripts has the kind of model."""
    return kind in MODELS


def read(kind: str, exported: Exported, layout: Layout) -> tuple[Reading, dict[str, Place]]:
    """Return what sd-scripts does with a file, and where the model's weights are in its models."""
    component = exported.family.model.component(exported.family.spec.denoiser_name)
    originals = MODELS[kind].originals(component)
    model = on_meta(MODELS[kind].make)
    set_sizes(model, originals)
    encoders = _text_encoders(exported)

    def merge(tensors: Tensors) -> Any:
        code: Any = import_module(f"networks.{MODELS[kind].network}")
        # The network of Lumina 2 takes the first text encoder, also without an adapter.
        texts = list(encoders.values()) or [nn.Module()]
        arguments: dict[str, Any] = {"weights_sd": tensors, "for_inference": True}
        network, _ = code.create_network_from_weights(1.0, None, None, texts, model, **arguments)
        network.merge_to(texts, model, tensors, None, "cpu")
        return network

    models: Mapping[str, nn.Module] = {"": model, **encoders}
    where = places(weights(component), originals) | text_places(
        exported, {f"{role[:-1]}": role for role in encoders}
    )
    return reading(models, load_file(exported.file(layout)), merge), where


def _text_encoders(exported: Exported) -> dict[str, nn.Module]:
    """Return the text encoders that have adapters, by the prefix of their weights' names.

    They are classes of transformers, in whose 4.x versions, which sd-scripts requires, the layers are below
    `text_model`.
    """
    encoders: dict[str, nn.Module] = {}
    for role in exported.family.trainable_text_encoders():
        encoder = read_text_encoder(exported.family, role, "float32")[0]
        if not hasattr(encoder, "text_model"):
            outer = nn.Module()
            outer.add_module("text_model", encoder)
            encoder = outer
        set_sizes(encoder, encoder.state_dict())
        encoders[f"{role}."] = encoder
    return encoders
