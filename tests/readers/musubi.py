"""LoRA files read by musubi-tuner's own code, whose folder `src` must be importable."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import nn

from pipeline.trained_lora.export.lora_files import Layout
from tests.pipeline.models.convert.state_dicts import State, weights
from tests.pipeline.models.convert.transformer_originals import flux, ideogram4, krea2, wan
from tests.readers.exported import Exported
from tests.readers.kohya_networks import Tensors, on_meta, reading, set_sizes
from tests.readers.readings import Place, Reading, places


class _Model(NamedTuple):
    """How musubi-tuner stores a kind of model.

    Attributes:
        make: Function that creates the model.
        network: Module of its network in `musubi_tuner.networks`.
        originals: Function that returns the weights under the names of the original code.
    """

    make: Callable[[], nn.Module]
    network: str
    originals: Callable[[Path], State] = weights


def _code(module: str) -> Any:
    return import_module(f"musubi_tuner.{module}")


def _kontext() -> nn.Module:
    code = _code("flux.flux_models")
    return code.Flux(code.configs_flux_dev_context.params)


def _flux2(version: str) -> nn.Module:
    params = _code("flux_2.flux2_utils").FLUX2_MODEL_INFO[version].params
    return _code("flux_2.flux2_models").Flux2(params)


def _qwen_image() -> nn.Module:
    return _code("qwen_image.qwen_image_model").QwenImageTransformer2DModel()


def _z_image() -> nn.Module:
    return _code("zimage.zimage_model").ZImageTransformer2DModel()


def _krea2() -> nn.Module:
    return _code("krea2.krea2_mmdit").SingleStreamDiT(_code("krea2.krea2_utils").single_mmdit_large_wide)


def _ideogram4() -> nn.Module:
    code = _code("ideogram4.ideogram4_model")
    return code.Ideogram4Transformer(code.Ideogram4Config())


def _kandinsky5() -> nn.Module:
    params = _code("kandinsky5.configs").TASK_CONFIGS["k5-lite-t2i-hd"].dit_params
    return _code("kandinsky5.models.dit").DiffusionTransformer3D(**vars(params))


def _wan() -> nn.Module:
    # Its package reads the number of the current GPU when it is imported.
    with patch.object(torch.cuda, "current_device", return_value=0):
        code = _code("wan.modules.model")
    return code.WanModel(
        model_type="t2v",
        patch_size=(1, 2, 2),
        dim=1536,
        ffn_dim=8960,
        num_heads=12,
        num_layers=30,
    )


MODELS = {
    "FLUX.1 Kontext": _Model(_kontext, "lora_flux", flux),
    "FLUX.2 klein": _Model(lambda: _flux2("klein-base-4b"), "lora_flux_2", flux),
    "FLUX.2 dev": _Model(lambda: _flux2("dev"), "lora_flux_2", flux),
    "Qwen-Image": _Model(_qwen_image, "lora_qwen_image"),
    "Qwen-Image-Edit": _Model(_qwen_image, "lora_qwen_image"),
    "Z-Image": _Model(_z_image, "lora_zimage"),
    "Z-Image Turbo": _Model(_z_image, "lora_zimage"),
    "Krea 2": _Model(_krea2, "lora_krea2", krea2),
    "Ideogram 4": _Model(_ideogram4, "lora_ideogram4", ideogram4),
    "Kandinsky 5 (image)": _Model(_kandinsky5, "lora_kandinsky"),
    "Wan 2.1 (image)": _Model(_wan, "lora_wan", wan),
}
"""Models that musubi-tuner can load, by kind. Its HiDream is O1, another model than I1."""


def supports(kind: str) -> bool:
    """Return whether musubi-tuner has the kind of model."""
    return kind in MODELS


def read(kind: str, exported: Exported, layout: Layout) -> tuple[Reading, dict[str, Place]]:
    """Return what musubi-tuner does with a file, and where the model's weights are in its model."""
    component = exported.family.model.component(exported.family.spec.denoiser_name)
    originals = MODELS[kind].originals(component)
    model = on_meta(MODELS[kind].make)
    set_sizes(model, originals)

    def merge(tensors: Tensors) -> Any:
        code = _code(f"networks.{MODELS[kind].network}")
        network = code.create_arch_network_from_weights(1.0, tensors, unet=model, for_inference=True)
        network.merge_to(None, model, tensors)
        return network

    return reading({"": model}, load_file(exported.file(layout)), merge), places(
        weights(component), originals
    )
