"""kohya's and ComfyUI's layouts: an adapter's tensors, and a file's effects by its reader's formulas.

`pipeline.trained_lora.export.lora_files` describes the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import TrainingError, counted
from pipeline.trained_lora.export.lora_files import Layout, LoraModule, factors, stored_magnitudes

Effects: TypeAlias = Mapping[str, Callable[[], Tensor]]
"""Functions that compute an adapter's effects, one at a time to save memory.

The key "<module>" gives the delta weight. With DoRA, "<module> rows" gives the factors that the rows of base
plus delta weight are multiplied by.
"""

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
    for module in modules:
        for key, shape in module.shapes(layout).items():
            tensors.setdefault(key, torch.zeros(shape))

        # `factors` returns views of the module's part of a fused layer.
        down, up = factors(tensors, module, layout)
        down.copy_(state[f"{module.name}.lora_A.weight"])
        up.copy_(state[f"{module.name}.lora_B.weight"])

        down_key, _, alpha_key = module.keys(layout)
        assert alpha_key is not None
        num_parts = tensors[down_key].shape[0] // module.rank
        tensors[alpha_key] = torch.tensor(module.alpha * num_parts)

        if module.magnitude:
            magnitude = state[f"{module.name}.lora_magnitude_vector"].flatten()
            base_norms, adapted_norms = norms[module.name]
            if layout == "comfyui":
                magnitude = magnitude * (base_norms / adapted_norms)
            stored_magnitudes(tensors, module, layout).copy_(magnitude)
    return tensors


def combine_effects(
    deltas: Mapping[str, Callable[[], Tensor]], magnitudes: Mapping[str, Tensor], norms: RowNorms
) -> Effects:
    """Return the effects of an adapter from its delta weights and DoRA's magnitudes."""
    rows = {
        f"{name} rows": partial(torch.div, magnitude, norms[name][1])
        for name, magnitude in magnitudes.items()
    }
    return {**deltas, **rows}


def file_effects(path: Path, modules: list[LoraModule], layout: Layout, norms: RowNorms) -> Effects:
    """Return the effects of a file in kohya's or ComfyUI's layout by its reader's formulas.

    Raises:
        TrainingError: The file lacks a key or has an unknown one.
    """
    tensors = load_file(path)
    expected_keys = {key for module in modules for key in module.shapes(layout)}
    if set(tensors) != expected_keys:
        unmatched = sorted(set(tensors) ^ expected_keys)
        raise TrainingError(
            f"{counted(len(unmatched), 'key is', 'keys are')} missing or unexpected, "
            f"the first is {unmatched[0]}",
            where=str(path),
            fix=DEFECT_FIX,
        )

    effects: dict[str, Callable[[], Tensor]] = {}
    for module in modules:
        effects[module.name] = partial(_file_delta, tensors, module, layout)
        if module.magnitude:
            base_norms, adapted_norms = norms[module.name]
            divisor = base_norms if layout == "comfyui" else adapted_norms
            stored = stored_magnitudes(tensors, module, layout)
            effects[f"{module.name} rows"] = partial(torch.div, stored, divisor)
    return effects


def _file_delta(tensors: Mapping[str, Tensor], module: LoraModule, layout: Layout) -> Tensor:
    down, up = factors(tensors, module, layout)
    down_key, _, alpha_key = module.keys(layout)
    assert alpha_key is not None
    scale = float(tensors[alpha_key]) / tensors[down_key].shape[0]
    return scale * (up.flatten(1) @ down.flatten(1))
