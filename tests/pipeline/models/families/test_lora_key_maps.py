"""The names that each family gives to every adaptable module in the files of kohya's tools and ComfyUI.

A module's expected name is where its weights are in a checkpoint of the original code. The functions that
write such checkpoints are also the oracle of the conversion, and share nothing with the key maps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from demo.tiny_models import TINY
from pipeline.errors import FamilyError
from pipeline.models.families import Family, Layer, detect
from tests.pipeline.models.convert.state_dicts import State, weights
from tests.pipeline.models.convert.transformer_originals import (
    anima,
    flux,
    ideogram4,
    krea2,
    lumina2,
    sd3_transformer,
    wan,
)
from tests.pipeline.models.convert.unet_originals import unet
from tests.tiny_models import TinyModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

Originals = Callable[[Path], State]


class Names(NamedTuple):
    """Names that the readers of a family's files use, after `lora_unet_` in kohya's layout."""

    kohya: Originals
    comfyui: Originals | None
    """Original code whose names follow the prefix; None if the layout uses kohya's keys."""

    prefix: str = "transformer."


UNET_PREFIX = "diffusion_model."

NAMES: dict[str, Names] = {
    "Stable Diffusion 1.x and 2.x": Names(weights, unet, UNET_PREFIX),
    "Stable Diffusion XL": Names(unet, unet, UNET_PREFIX),
    "Stable Diffusion 3 and 3.5": Names(sd3_transformer, weights),
    "FLUX.1 dev": Names(flux, weights),
    "FLUX.1 schnell": Names(flux, weights),
    "FLUX.1 Kontext": Names(flux, weights),
    "FLUX.2 klein": Names(flux, weights),
    "FLUX.2 dev": Names(flux, weights),
    "Qwen-Image": Names(weights, weights),
    "Qwen-Image-Edit": Names(weights, weights),
    "Qwen-Image-Edit (first)": Names(weights, weights),
    "Qwen-Image 2.1": Names(weights, weights),
    "Qwen-Image 2.1 Turbo": Names(weights, weights),
    "Z-Image": Names(weights, weights),
    "Z-Image Turbo": Names(weights, weights),
    "Chroma": Names(flux, weights),
    "Lumina Image 2": Names(lumina2, None),
    "Sana": Names(weights, weights),
    "AuraFlow": Names(weights, weights),
    "HiDream": Names(weights, weights),
    "Kolors": Names(weights, unet, UNET_PREFIX),
    "CogView4": Names(weights, weights),
    "ERNIE-Image": Names(weights, weights, UNET_PREFIX),
    "Krea 2": Names(krea2, krea2, UNET_PREFIX),
    "Anima": Names(anima, anima, UNET_PREFIX),
    "Ideogram 4": Names(ideogram4, None),
    "Kandinsky 5 (image)": Names(weights, weights),
    "Bria FIBO": Names(weights, weights),
    "Bria FIBO 2": Names(weights, weights),
    "Wan 2.1 (image)": Names(wan, wan, UNET_PREFIX),
}
"""Names by kind of model. sd-scripts and ComfyUI read diffusers' names where no original code is given."""


MODULES_BY_DEFAULT = {
    "Stable Diffusion 1.x and 2.x": (32, "1022b6ce"),
    "Stable Diffusion XL": (96, "88ba35ef"),
    "Stable Diffusion 3 and 3.5": (23, "752e607a"),
    "FLUX.1 dev": (34, "3ede5c85"),
    "FLUX.1 schnell": (34, "3ede5c85"),
    "FLUX.1 Kontext": (34, "3ede5c85"),
    "FLUX.2 klein": (28, "6e156381"),
    "FLUX.2 dev": (28, "6e156381"),
    "Qwen-Image": (20, "cde46943"),
    "Qwen-Image-Edit": (20, "cde46943"),
    "Qwen-Image-Edit (first)": (20, "cde46943"),
    "Qwen-Image 2.1": (14, "31067e18"),
    "Qwen-Image 2.1 Turbo": (14, "31067e18"),
    "Z-Image": (28, "732a5e81"),
    "Z-Image Turbo": (28, "732a5e81"),
    "Chroma": (34, "3ede5c85"),
    "Lumina Image 2": (28, "e7d0945f"),
    "Sana": (16, "3308f3eb"),
    "AuraFlow": (24, "f11210b6"),
    "HiDream": (24, "e2b89171"),
    "Kolors": (96, "88ba35ef"),
    "CogView4": (8, "bcb0a6a8"),
    "ERNIE-Image": (14, "8f369dc6"),
    "Krea 2": (32, "625df6be"),
    "Anima": (20, "8d21bb81"),
    "Ideogram 4": (14, "5e723d59"),
    "Kandinsky 5 (image)": (26, "2fad8b56"),
    "Bria FIBO": (34, "3ede5c85"),
    "Bria FIBO 2": (73, "5e2949d3"),
    "Wan 2.1 (image)": (20, "335699cc"),
}
"""Number and hash of the modules that get an adapter by default, as of 2026-11-25.

They decide the names in the files of a run, and the run id.
"""


WHAT = ("kohya's key", "kohya's layer of modules", "ComfyUI's key")


def modules_of(state: State) -> dict[str, torch.Tensor]:
    """Return the weight of each module that an adapter could change: linear layers and convolutions."""
    return {
        name.removesuffix(".weight"): weight
        for name, weight in state.items()
        if name.endswith(".weight") and weight.ndim >= 2
    }


def layers_by_module(state: State, originals: State) -> dict[str, Layer]:
    """Return, by module, the original layer that contains its rows, with the layer's modules in order."""
    places = {
        row.numpy().tobytes(): (name, number)
        for name, weight in modules_of(originals).items()
        for number, row in enumerate(weight)
    }
    layers: dict[str, dict[int, str]] = {}
    for module, weight in modules_of(state).items():
        if place := places.get(weight[0].numpy().tobytes()):
            layers.setdefault(place[0], {})[place[1]] = module
    return {
        module: Layer(name, tuple(modules[row] for row in sorted(modules)))
        for name, modules in layers.items()
        for module in modules.values()
    }


def adapted(family: Family, module: str) -> bool:
    """Return whether peft adapts the module by default."""
    return any(module == target or module.endswith(f".{target}") for target in family.lora_targets())


@pytest.mark.parametrize("kind", TINY)
def test_every_module_has_the_name_of_its_weights_in_the_code_that_reads_the_file(
    kind: str, tiny_model: TinyModel
) -> None:
    folder = tiny_model(kind)
    family, names = detect(folder), NAMES[kind]
    state = weights(folder / family.spec.denoiser_name)
    kohya = layers_by_module(state, names.kohya(folder / family.spec.denoiser_name))
    comfyui = layers_by_module(state, (names.comfyui or names.kohya)(folder / family.spec.denoiser_name))

    wrong = list[str]()
    named = set[str]()
    for module in modules_of(state):
        try:
            actual = (*vars(family.kohya_layer(module)).values(), family.comfyui_key(module))
        except FamilyError:
            continue
        named.add(module)
        layer = kohya[module]
        kohya_key = f"lora_unet_{layer.key.replace('.', '_')}"
        comfyui_key = f"{names.prefix}{comfyui[module].key}" if names.comfyui else kohya_key
        expected = (kohya_key, layer.modules, comfyui_key)
        wrong += [
            f"{module}: {what} is {ours}, its weights are in {theirs}"
            for what, ours, theirs in zip(WHAT, actual, expected, strict=True)
            if ours != theirs
        ]

    assert not wrong, "\n".join(wrong)
    by_default = sorted(module for module in modules_of(state) if adapted(family, module))
    assert set(by_default) - named == set(), "modules that are adapted by default have no name"
    digest = hashlib.sha256("\n".join(by_default).encode()).hexdigest()[:8]
    assert (len(by_default), digest) == MODULES_BY_DEFAULT[kind], by_default
    assert len(named) >= 8, f"only {sorted(named)} have names"


def test_every_kind_of_model_has_expected_names() -> None:
    assert NAMES.keys() == MODULES_BY_DEFAULT.keys() == TINY.keys()
