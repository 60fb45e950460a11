"""LoRA files read by ComfyUI's own code, which must be importable.

ComfyUI derives the sizes of a model from the shapes of its original weights. The class of its configuration
is chosen here, because ComfyUI finds it by the published width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn

from pipeline.trained_lora.export.lora_files import Layout
from tests.pipeline.models.convert.state_dicts import State, weights, with_prefix
from tests.pipeline.models.convert.transformer_originals import (
    anima,
    aura_flow,
    flux,
    ideogram4,
    krea2,
    lumina2,
    qwen_image21,
    sd3_transformer,
    wan,
    z_image,
)
from tests.pipeline.models.convert.unet_originals import unet
from tests.readers.exported import Exported
from tests.readers.readings import Place, Reading, places, stem, text_places

_PREFIX = "diffusion_model."
"""Prefix of the denoiser's weights in ComfyUI's model."""


class _Model(NamedTuple):
    """How ComfyUI stores a kind of model.

    Attributes:
        config: Name of its configuration in `comfy.supported_models`.
        originals: Function that returns the weights under the names of the original code.
        clips: Module and class of its text encoders, if they can have adapters.
        encoders: Prefix of each text encoder's weights, by component of the diffusers pipeline.
        sizes: Sizes of the tiny model that ComfyUI knows by the published width only.
    """

    config: str
    originals: Callable[[Path], State]
    clips: tuple[str, str] | None = None
    encoders: Mapping[str, str] = {}
    sizes: Mapping[str, Any] = {}


def _anima(folder: Path) -> State:
    """Return the transformer, and the text conditioner by which ComfyUI detects Anima."""
    return anima(folder) | with_prefix("llm_adapter.", weights(folder.parent / "text_conditioner"))


_Z_IMAGE_SIZES = {
    "n_heads": 2,
    "n_kv_heads": 2,
    "axes_dims": [4, 6, 6],
    "axes_lens": [1024, 64, 64],
    "ffn_dim_multiplier": 8 / 3,
    "z_image_modulation": True,
}
_LUMINA2_SIZES = {"n_heads": 4, "n_kv_heads": 2, "axes_dims": [4, 4, 4], "axes_lens": [300, 64, 64]}


MODELS = {
    "Stable Diffusion 1.x and 2.x": _Model(
        "SD15", unet, ("comfy.sd1_clip", "SD1ClipModel"), {"text_encoder": "clip_l.transformer."}
    ),
    "Stable Diffusion XL": _Model(
        "SDXL",
        unet,
        ("comfy.sdxl_clip", "SDXLClipModel"),
        {"text_encoder": "clip_l.transformer.", "text_encoder_2": "clip_g.transformer."},
    ),
    "Stable Diffusion 3 and 3.5": _Model("SD3", sd3_transformer),
    "FLUX.1 dev": _Model("Flux", flux),
    "FLUX.1 schnell": _Model("FluxSchnell", flux),
    "FLUX.1 Kontext": _Model("Flux", flux),
    "FLUX.2 klein": _Model("Flux2", flux),
    "FLUX.2 dev": _Model("Flux2", flux),
    "Qwen-Image": _Model("QwenImage", weights),
    "Qwen-Image-Edit": _Model("QwenImage", weights),
    "Qwen-Image 2.1": _Model("QwenImage21", qwen_image21),
    "Qwen-Image 2.1 Turbo": _Model("QwenImage21", qwen_image21),
    "Z-Image": _Model("ZImage", z_image, sizes=_Z_IMAGE_SIZES),
    "Z-Image Turbo": _Model("ZImage", z_image, sizes=_Z_IMAGE_SIZES),
    "Chroma": _Model("Chroma", flux),
    "Lumina Image 2": _Model("Lumina2", lumina2, sizes=_LUMINA2_SIZES),
    "AuraFlow": _Model("AuraFlow", aura_flow),
    "HiDream": _Model("HiDream", weights),
    "Kolors": _Model("SDXL", unet),
    "ERNIE-Image": _Model("ErnieImage", weights),
    "Krea 2": _Model("Krea2", krea2),
    "Ideogram 4": _Model("Ideogram4", ideogram4),
    "Kandinsky 5 (image)": _Model("Kandinsky5Image", weights),
    "Anima": _Model("Anima", _anima, sizes={"num_heads": 2, "num_blocks": 2}),
    "Wan 2.1 (image)": _Model("WAN21_T2V", wan, sizes={"num_heads": 2, "freq_dim": 32, "text_dim": 32}),
}
"""Models that ComfyUI can load, by kind. It has no code for Sana, CogView4 and Bria FIBO."""


def supports(kind: str) -> bool:
    """Return whether this version of ComfyUI has the kind of model."""
    _use_cpu()
    return kind in MODELS and hasattr(import_module("comfy.supported_models"), MODELS[kind].config)


def read(kind: str, exported: Exported, layout: Layout) -> tuple[Reading, dict[str, Place]]:
    """Return what ComfyUI does with a file, and where the model's weights are in ComfyUI."""
    component = exported.family.model.component(exported.family.spec.denoiser_name)
    originals = with_prefix(_PREFIX, MODELS[kind].originals(component))
    where = places(weights(component), originals) | text_places(exported, MODELS[kind].encoders)
    return _read(kind, exported.file(layout), originals), where


def _read(kind: str, file: Path, originals: State) -> Reading:
    """Take the steps of `comfy.sd.load_lora_for_models`, without the memory of a real model."""
    _use_cpu()
    lora_code: Any = import_module("comfy.lora")
    denoiser = _build(kind, originals)
    clips = _clips(kind)

    tensors = import_module("comfy.lora_convert").convert_lora(load_file(file))
    keys: dict[str, Any] = lora_code.model_lora_keys_unet(denoiser, {})
    if clips is not None:
        keys = lora_code.model_lora_keys_clip(clips, keys)
    loaded = lora_code.load_lora(tensors, keys)

    networks = [denoiser] if clips is None else [denoiser, clips]
    patches = {name: found for network in networks for name, found in _patches(network, loaded).items()}
    deltas: State = {}
    for name, found in patches.items():
        shape = originals[name].shape if name in originals else _delta_shape(found[0][1])
        deltas[name] = lora_code.calculate_weight(found, torch.zeros(shape), name).flatten(1)

    targets = {key: _weight_name(keys[key]) for key in map(stem, tensors) if keys.get(key) in loaded}
    return Reading(deltas, targets, frozenset(name for network in networks for name in network.state_dict()))


def _weight_name(target: Any) -> str:
    """Return the weight of a key's target, which is a tuple if it is a part of the weight."""
    return target if isinstance(target, str) else target[0]


def _use_cpu() -> None:
    """Set ComfyUI's option `--cpu`, before it looks for a device."""
    import_module("comfy.cli_args").args.cpu = True


def _build(kind: str, originals: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return ComfyUI's model for these weights."""
    detected = import_module("comfy.model_detection").detect_unet_config(originals, _PREFIX)
    model = MODELS[kind]
    config: Any = getattr(import_module("comfy.supported_models"), model.config)({**detected, **model.sizes})
    config.set_inference_dtype(torch.float32, None)
    return config.get_model(originals, _PREFIX, device="meta")


def _clips(kind: str) -> nn.Module | None:
    """Return ComfyUI's text encoders at their published size, without memory."""
    names = MODELS[kind].clips
    if names is None:
        return None
    return getattr(import_module(names[0]), names[1])(device="meta", dtype=torch.float32)


def _patches(network: nn.Module, loaded: Mapping[Any, Any]) -> dict[str, list[Any]]:
    """Return the patches that ComfyUI accepts for the network, by weight."""
    cpu = torch.device("cpu")
    patcher: Any = import_module("comfy.model_patcher").ModelPatcher(network, cpu, cpu)
    patcher.add_patches(loaded)
    return patcher.patches


def _delta_shape(adapter: Any) -> tuple[int, int]:
    """Return the shape of an adapter's delta weight on a linear layer."""
    up, down = adapter.weights[:2]
    return len(up), down.shape[1]
