"""kohya's and ComfyUI's layouts: an adapter's tensors, and a file's weights by its reader's formulas.

`pipeline.trained_lora.export.lora_files` describes the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import TrainingError, counted
from pipeline.trained_lora.export.lora_files import (
    Layout,
    LoraModule,
    factors,
    folded,
    stored_alphas,
    stored_magnitudes,
)


@dataclass(frozen=True)
class ModuleWeights:
    """One module's LoRA, as it was trained or as a program reads it from a file.

    The delta weight is scale * up @ down, with `down` (rank, in) and `up` (out, rank). A convolution's
    factors are flattened to matrices. With DoRA, `row_factors` (out,) multiply the rows of base plus delta
    weight.
    """

    down: Tensor
    up: Tensor
    scale: float
    row_factors: Tensor | None = None

    def delta(self) -> Tensor:
        """Return the delta weight (out, in)."""
        return self.scale * (self.up @ self.down)


LoraWeights: TypeAlias = Mapping[str, ModuleWeights]
"""Weights by module name."""

RowNorms: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
"""Norms of each weight's rows without and with the delta weight, by module; empty without DoRA."""

DEFECT_FIX = "report a defect, with the versions of diffusers and peft; the last checkpoint is kept"


def layout_tensors(
    layout: Layout, modules: list[LoraModule], state: Mapping[str, Tensor], norms: RowNorms
) -> dict[str, Tensor]:
    """Return the tensors of a file in the layout "kohya" or "comfyui"; diffusers writes its own layout.

    `state` is the result of `lora_state`, and `norms` are the row norms of the same adapter.
    """
    tensors: dict[str, Tensor] = {}
    alphas = stored_alphas(modules, layout)
    for module in modules:
        for key, shape in module.shapes(layout).items():
            # In a fused layer, the blocks of parts without an adapter stay zero.
            tensors.setdefault(key, torch.zeros(shape))

        # `factors` returns views of the module's part of a fused layer.
        stored_down, stored_up = factors(tensors, module, layout)
        down, up = state[f"{module.name}.lora_A.weight"], state[f"{module.name}.lora_B.weight"]
        down, up = folded(down, up, module.alpha / alphas[module.name])
        stored_down.copy_(down)
        stored_up.copy_(up)

        down_key, _, alpha_key = module.keys(layout)
        assert alpha_key is not None

        # Readers divide alpha by the rank in the file, which is the sum of the ranks of fused modules.
        tensors[alpha_key] = torch.tensor(alphas[module.name] * (tensors[down_key].shape[0] / module.rank))

        if module.magnitude:
            magnitude = state[f"{module.name}.lora_magnitude_vector"].flatten()
            base_norms, adapted_norms = norms[module.name]

            # ComfyUI divides a magnitude by the base weight's norm, other readers by the adapted weight's.
            if layout == "comfyui":
                magnitude = magnitude * (base_norms / adapted_norms)
            stored_magnitudes(tensors, module, layout).copy_(magnitude)
    return tensors


def trained_weights(modules: list[LoraModule], state: Mapping[str, Tensor], norms: RowNorms) -> LoraWeights:
    """Return the weights that every file must hold; see `layout_tensors` for `state` and `norms`."""
    weights: dict[str, ModuleWeights] = {}
    for module in modules:
        down, up = state[f"{module.name}.lora_A.weight"], state[f"{module.name}.lora_B.weight"]
        rows = None
        if module.magnitude:
            rows = state[f"{module.name}.lora_magnitude_vector"].flatten() / norms[module.name][1]
        weights[module.name] = ModuleWeights(down.flatten(1), up.flatten(1), module.alpha / module.rank, rows)
    return weights


def stored_weights(
    trained: LoraWeights, modules: list[LoraModule], layout: Layout, dtype: torch.dtype
) -> LoraWeights:
    """Return the weights that a file in the layout holds for those that `trained_weights` returns."""
    alphas = stored_alphas(modules, layout)
    weights: dict[str, ModuleWeights] = {}
    for module in modules:
        own, alpha = trained[module.name], alphas[module.name]
        down, up = folded(own.down, own.up, module.alpha / alpha)
        weights[module.name] = replace(
            own, down=down.to(dtype).float(), up=up.to(dtype).float(), scale=alpha / module.rank
        )
    return weights


def file_weights(path: Path, modules: list[LoraModule], layout: Layout, norms: RowNorms) -> LoraWeights:
    """Return the weights in a file of kohya's or ComfyUI's layout, by the formulas of its readers.

    Raises:
        TrainingError: The file cannot be read, or its keys or shapes differ from the modules'.
    """
    tensors = read_same_tensors(path, modules, layout)
    _require_block_diagonal(path, tensors, modules, layout)

    weights: dict[str, ModuleWeights] = {}
    for module in modules:
        down, up = (factor.float() for factor in factors(tensors, module, layout))
        down_key, _, alpha_key = module.keys(layout)
        assert alpha_key is not None
        scale = float(tensors[alpha_key]) / tensors[down_key].shape[0]

        rows = None
        if module.magnitude:
            base_norms, adapted_norms = norms[module.name]
            divisor = base_norms if layout == "comfyui" else adapted_norms
            rows = stored_magnitudes(tensors, module, layout) / divisor
        weights[module.name] = ModuleWeights(down.flatten(1), up.flatten(1), scale, rows)
    return weights


def read_same_tensors(path: Path, modules: list[LoraModule], layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a file.

    Raises:
        TrainingError: The file cannot be read, or its keys or shapes differ from the modules'.
    """
    tensors = _read_tensors(path)
    expected_shapes = {key: shape for module in modules for key, shape in module.shapes(layout).items()}
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    unmatched = sorted(
        key for key in {*expected_shapes, *shapes} if expected_shapes.get(key) != shapes.get(key)
    )
    if unmatched:
        raise TrainingError(
            f"{counted(len(unmatched), 'key is', 'keys are')} missing, unexpected or of another shape, "
            f"the first is {unmatched[0]}",
            where=str(path),
            fix=DEFECT_FIX,
        )
    return tensors


def _require_block_diagonal(
    path: Path, tensors: Mapping[str, Tensor], modules: list[LoraModule], layout: Layout
) -> None:
    # A reader multiplies the complete matrix, so that such numbers would change other modules.
    num_nonzero: dict[str, int] = {}
    for module in modules:
        _, up_key, _ = module.keys(layout)
        _, up = factors(tensors, module, layout)
        num_nonzero[up_key] = num_nonzero.get(up_key, 0) + int(up.count_nonzero())

    for key, number in num_nonzero.items():
        if int(tensors[key].count_nonzero()) != number:
            raise TrainingError(
                f"{key} has numbers other than zero outside of the blocks of its modules",
                where=str(path),
                fix=DEFECT_FIX,
            )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as err:
        raise TrainingError(f"the file cannot be read: {err}", where=str(path), fix=DEFECT_FIX) from err
