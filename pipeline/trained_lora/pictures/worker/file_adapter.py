"""Adapters in the shape of a LoRA file, with which a loaded base model draws at any strength."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from peft import LoraConfig
from torch import nn

from pipeline.errors import DrawingError, FamilyError, counted
from pipeline.trained_lora.export.lora_files import LAYOUTS, Layout, LoraFile, LoraModule
from pipeline.trained_lora.pictures.worker.file_rotation import RotationAdapter, holds_rotations
from pipeline.trained_lora.worker.adapter.fused_layers import with_separate_parts
from pipeline.trained_lora.worker.adapter.lora import ADAPTER, Networks, lora_modules, trainable_weights
from pipeline.trained_lora.worker.adapter.targets import adaptable_layers
from pipeline.trained_lora.worker.adapter.warm_start import (
    file_scale,
    load_lora_tensors,
    read_lora_tensors,
    unmatched_keys,
    without_zero_modules,
)
from pipeline.trained_lora.worker.export.modules import fused_outs

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily

_MAX_LISTED = 5

_TEXT_PREFIXES = ("text_encoder", "lora_te")
"""Beginnings of the keys of text encoders in all layouts."""


def add_file(family: WorkerFamily, networks: Networks, file: LoraFile) -> FileAdapter | RotationAdapter:
    """Return the adapter of a file on the layers that it names, at strength 1.

    Raises:
        DrawingError: The file has tensors that match no layer, or none that do.
    """
    if holds_rotations(file):
        return RotationAdapter(networks[""], list(_all_layers(family, {"": networks[""]})), file)
    return FileAdapter(family, networks, file)


def adapts_text_encoders(file: LoraFile) -> bool:
    """Return whether the file has tensors of text encoders."""
    return any(key.startswith(_TEXT_PREFIXES) for key in file.tensors)


class FileAdapter:
    """Adapters on the layers of a base model that a LoRA file names, with the weights of the file.

    Their shape is the file's and not the recipe's, so that files of other programs work too, and LoHa, LoKr,
    PiSSA and OLoRA, which are exported as a LoRA.
    """

    def __init__(self, family: WorkerFamily, networks: Networks, file: LoraFile) -> None:
        """Add adapters to the layers that the file names, and load its weights at strength 1.

        Raises:
            DrawingError: The file has tensors that match no layer, or none that do.
        """
        layers = list(_all_layers(family, networks))
        self._layout: Layout = _detect_layout(family, layers, file)

        # sd-scripts trains one adapter for a layer of query, key and value; the model here has three.
        file = with_separate_parts(file, layers, self._layout)
        self._modules = _modules_in(file, layers, self._layout)
        file = without_zero_modules(file, self._modules, self._layout)
        _require_all_tensors_used(family, file, self._modules, self._layout)

        own_modules = {
            prefix: [module for module in self._modules if _prefix(module, networks) == prefix]
            for prefix in networks
        }
        self.networks = {prefix: networks[prefix] for prefix, modules in own_modules.items() if modules}
        for prefix, network in self.networks.items():
            _add_adapter(network, prefix, own_modules[prefix])
        self._scales = {each.name: file_scale(file, each, self._layout) for each in self._modules}
        load_lora_tensors(self.networks, self._modules, file, self._layout)
        self.set_strength(1.0)

    def load(self, path: Path) -> None:
        """Replace the weights by another file of the same run, which has equal layers and ranks."""
        file = with_separate_parts(read_lora_tensors(path), self._modules, self._layout)
        load_lora_tensors(self.networks, self._modules, file, self._layout)

    def set_strength(self, strength: float) -> None:
        """Multiply the effect of the LoRA by `strength`, as diffusers' `set_adapters` does; 0 disables it."""
        for prefix, network in self.networks.items():
            model = cast("Any", network)
            if strength == 0.0:
                model.disable_adapters()
                continue
            model.enable_adapters()

            # peft's `set_scale` would compute alpha / rank again, with another rounding than in training.
            for name, layer in lora_modules(network):
                cast("Any", layer).scaling[ADAPTER] = strength * self._scales[f"{prefix}{name}"]


def _add_adapter(network: nn.Module, prefix: str, modules: list[LoraModule]) -> None:
    names = {module.name.removeprefix(prefix): module for module in modules}
    config = LoraConfig(
        r=modules[0].rank,
        # A list of paths would also select layers with a longer path that ends in one of them.
        target_modules="|".join(map(re.escape, names)),
        # The first module's rank is the default, and peft matches a pattern at the end of a path unless it is
        # anchored.
        rank_pattern={f"^{re.escape(name)}": module.rank for name, module in names.items()},
        use_dora=any(module.magnitude for module in modules),
    )

    # Only the adapter's weights are then found by `trainable_weights`.
    network.requires_grad_(False)
    cast("Any", network).add_adapter(config, adapter_name=ADAPTER)
    for weight in trainable_weights(network):
        weight.data = weight.data.float()


def _detect_layout(family: WorkerFamily, layers: list[LoraModule], file: LoraFile) -> Layout:
    """Return the layout that names the most layers of the file."""
    num_layers = {
        layout: sum(layer.keys(layout)[0] in file.tensors for layer in layers) for layout in LAYOUTS
    }
    layout = max(LAYOUTS, key=num_layers.__getitem__)
    if num_layers[layout] == 0:
        example = f", its first tensor is {min(file.tensors)}" if file.tensors else ""
        raise DrawingError(
            f"the file has no LoRA of {family.spec.name} under the names of diffusers, kohya or "
            f"ComfyUI{example}",
            where=str(file.path),
            fix="use a LoRA, not a LoHa or LoKr, that was trained for the recipe's base model",
        )
    return layout


def _modules_in(file: LoraFile, layers: list[LoraModule], layout: Layout) -> list[LoraModule]:
    modules: list[LoraModule] = []
    for layer in layers:
        down_key, up_key, _ = layer.keys(layout)
        if down_key in file.tensors and up_key in file.tensors:
            # At rank 1, the rows of `down` are the number of layers that share it.
            num_parts = layer.shapes(layout)[down_key][0]
            rank = file.tensors[down_key].shape[0] // num_parts
            magnitude = layer.magnitude_key(layout) in file.tensors
            module = replace(layer, rank=rank, magnitude=magnitude)
            modules.append(replace(module, alpha=file_scale(file, module, layout) * rank))
    return modules


def _require_all_tensors_used(
    family: WorkerFamily, file: LoraFile, modules: list[LoraModule], layout: Layout
) -> None:
    unmatched = unmatched_keys(file, modules, layout)
    if unmatched:
        number = counted(len(unmatched), "tensor does", "tensors do")
        raise DrawingError(
            f"{number} not match the layers of {family.spec.name}: {', '.join(unmatched[:_MAX_LISTED])}",
            where=str(file.path),
            fix="use a LoRA that was trained for the recipe's base model",
        )


def _all_layers(family: WorkerFamily, networks: Networks) -> Iterator[LoraModule]:
    """Yield each layer that can have an adapter, as a module of rank 1; its key may be empty in a layout."""
    for prefix, network in networks.items():
        for name, layer in adaptable_layers(network).items():
            is_convolution = isinstance(layer, nn.Conv2d)
            module = LoraModule(
                name=f"{prefix}{name}",
                diffusers=f"{family.spec.denoiser_name}.{name}",
                kohya="",
                comfyui="",
                in_features=layer.in_channels if is_convolution else layer.in_features,
                out_features=layer.out_channels if is_convolution else layer.out_features,
                kernel=tuple(layer.kernel_size) if is_convolution else (),
                rank=1,
                alpha=1.0,
            )
            if not prefix:
                yield _with_denoiser_keys(family, module, network)
            elif (named := _with_text_keys(family, module, prefix)) is not None:
                yield named


def _with_text_keys(family: WorkerFamily, module: LoraModule, prefix: str) -> LoraModule | None:
    """Return the module of a text encoder with its keys; None if LoRA files cannot name it."""
    role = prefix.removesuffix(".")
    try:
        keys = family.trainable_text_encoders()[role].keys(role, module.name.removeprefix(prefix))
    except FamilyError:
        return None
    diffusers, kohya, comfyui = keys
    return replace(module, diffusers=diffusers, kohya=kohya, comfyui=comfyui)


def _with_denoiser_keys(family: WorkerFamily, module: LoraModule, denoiser: nn.Module) -> LoraModule:
    try:
        layer, comfyui = family.kohya_layer(module.name), family.comfyui_key(module.name)
        outs = fused_outs(denoiser, layer)
    except (FamilyError, AttributeError):  # torch raises AttributeError for a part that this model lacks
        return module
    return replace(
        module,
        kohya=layer.key,
        comfyui=comfyui,
        kohya_part=layer.modules.index(module.name),
        kohya_outs=outs,
    )


def _prefix(module: LoraModule, networks: Networks) -> str:
    return next((prefix for prefix in networks if prefix and module.name.startswith(prefix)), "")
