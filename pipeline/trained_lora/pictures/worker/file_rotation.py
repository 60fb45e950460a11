"""Rotations (OFT) in the shape of a file, with which a loaded base model draws at any strength."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from peft import OFTConfig, get_peft_config, set_peft_model_state_dict
from torch import Tensor, nn

from pipeline.errors import DrawingError, counted
from pipeline.recipe.lora import oft_block_size
from pipeline.trained_lora.export.lora_files import (
    ADAPTER_METADATA_KEY,
    ROTATION,
    ROTATION_LAYOUTS,
    Layout,
    LoraFile,
    LoraModule,
)
from pipeline.trained_lora.worker.adapter.lora import (
    ADAPTER,
    Networks,
    add_adapter,
    lora_modules,
    scale_rotation,
    trainable_weights,
)
from pipeline.trained_lora.worker.adapter.warm_start import read_lora_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peft.tuners.oft import OFTLayer
    from torch.utils.hooks import RemovableHandle

_MAX_LISTED = 5


def holds_rotations(file: LoraFile) -> bool:
    """Return whether the file is an OFT of peft's kind."""
    return any(key.endswith(ROTATION) for key in file.tensors)


class RotationAdapter:
    """Rotations of the inputs of a denoiser's layers that a file names, with the numbers of the file."""

    def __init__(self, denoiser: nn.Module, layers: Sequence[LoraModule], file: LoraFile) -> None:
        """Add rotations to those of the denoiser's `layers` that the file names, at strength 1.

        Raises:
            DrawingError: The file has tensors that match no layer, or blocks that peft does not make.
        """
        self._layout = _detect_layout(layers, file)
        self._names = {
            layer.rotation_key(self._layout): layer.name
            for layer in layers
            if layer.rotation_key(self._layout) in file.tensors and not layer.kernel
        }
        _require_all_tensors_used(file, {*self._names})
        self.networks: Networks = {"": denoiser}
        self._add(denoiser, file)
        self._scaled: list[RemovableHandle] = []
        self._load(file)

    def _add(self, denoiser: nn.Module, file: LoraFile) -> None:
        columns = {
            key: cast("Any", denoiser.get_submodule(name)).in_features for key, name in self._names.items()
        }
        config = _config(file, columns)
        # A list of paths would also select layers with a longer path that ends in one of them.
        config.target_modules = "|".join(map(re.escape, self._names.values()))

        # Only the adapter's weights are then found by `trainable_weights`.
        denoiser.requires_grad_(False)
        add_adapter(denoiser, config)
        for weight in trainable_weights(denoiser):
            weight.data = weight.data.float()

    def load(self, path: Path) -> None:
        """Replace the numbers by another file of the same run, which has equal layers and blocks."""
        self._load(read_lora_tensors(path))

    def _load(self, file: LoraFile) -> None:
        tensors = cast("dict[str, Tensor]", file.tensors)
        state = {f"{name}{ROTATION}": tensors[key] for key, name in self._names.items()}
        set_peft_model_state_dict(self.networks[""], state, adapter_name=ADAPTER)

    def set_strength(self, strength: float) -> None:
        """Multiply the effect of the rotations by `strength`, see `scale_rotation`; 0 disables them."""
        while self._scaled:
            self._scaled.pop().remove()
        denoiser = cast("Any", self.networks[""])
        if strength == 0.0:
            denoiser.disable_adapters()
            return
        denoiser.enable_adapters()
        if strength != 1.0:
            layers = [cast("OFTLayer", layer) for _, layer in lora_modules(denoiser)]
            self._scaled = [scale_rotation(layer, strength) for layer in layers]


def _detect_layout(layers: Sequence[LoraModule], file: LoraFile) -> Layout:
    """Return the layout that names the most layers of the file."""
    numbers = {
        layout: sum(layer.rotation_key(layout) in file.tensors for layer in layers)
        for layout in ROTATION_LAYOUTS
    }
    layout = max(ROTATION_LAYOUTS, key=numbers.__getitem__)
    if numbers[layout] == 0:
        raise DrawingError(
            "the file has no OFT of this base model under the names of diffusers or ComfyUI, its first "
            f"tensor is {min(file.tensors)}",
            where=str(file.path),
            fix="use an OFT that was trained for the recipe's base model",
        )
    return layout


def _require_all_tensors_used(file: LoraFile, known: set[str]) -> None:
    unmatched = sorted(key for key in file.tensors if key not in known)
    if unmatched:
        raise DrawingError(
            f"{counted(len(unmatched), 'tensor does', 'tensors do')} not match the linear layers of this "
            f"base model: {', '.join(unmatched[:_MAX_LISTED])}",
            where=str(file.path),
            fix="use an OFT that was trained for the recipe's base model, without scaling or DoRA",
        )


def _config(file: LoraFile, columns: dict[str, int]) -> OFTConfig:
    """Return peft's configuration of the file; `columns` are the layers' inputs by key."""
    if (stored := file.metadata.get(ADAPTER_METADATA_KEY)) is not None:
        settings = {key.partition(".")[2]: value for key, value in json.loads(stored).items()}
        config = get_peft_config(settings)
        candidates = [cast("OFTConfig", config)]
    else:
        # A file of ComfyUI's layout does not state the size that peft adjusts to each layer.
        sizes = sorted({_block_size(file.tensors[key].shape[1]) for key in columns}, reverse=True)
        candidates = [OFTConfig(oft_block_size=size) for size in sizes]

    for config in candidates:
        made = {key: _shape(number, config.oft_block_size) for key, number in columns.items()}
        if made == {key: tuple(file.tensors[key].shape) for key in columns}:
            return config
    raise DrawingError(
        "the blocks of the file are not those that peft makes for these layers",
        where=str(file.path),
        fix="use an OFT of peft's kind with blocks of one size, and without shared blocks",
    )


def _shape(columns: int, size: int) -> tuple[int, int]:
    size = oft_block_size(columns, size)
    return columns // size, size * (size - 1) // 2


def _block_size(numbers: int) -> int:
    """Return the edge of a block with this many numbers above its diagonal."""
    return (1 + math.isqrt(1 + 8 * numbers)) // 2
