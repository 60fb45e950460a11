"""State dicts of a diffusers folder, and functions that rename and fuse their tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

State = dict[str, Tensor]


def weights(folder: Path) -> State:
    """Return the weights in a component's folder, which has a single file."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def with_prefix(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {prefix + name: tensor.contiguous() for name, tensor in state.items()}


def rename(name: str, pairs: Mapping[str, str]) -> str:
    """Replace the first key of `pairs` that is a prefix of the name, up to a dot."""
    for new, old in pairs.items():
        if name.startswith(new + "."):
            return old + name[len(new) :]
    return name


def replace_all(name: str, pairs: Mapping[str, str]) -> str:
    for new, old in pairs.items():
        name = name.replace(new, old)
    return name


def fuse(state: State, parts: list[str], fused_name: str) -> None:
    """Concatenate the tensors of several modules along the rows, as one module of the original."""
    for kind in ("weight", "bias"):
        if f"{parts[0]}.{kind}" in state:
            state[f"{fused_name}.{kind}"] = torch.cat([state.pop(f"{part}.{kind}") for part in parts])


def shift_before_scale(tensor: Tensor) -> Tensor:
    """Swap the halves of a modulation: the original stores the shift first, diffusers the scale."""
    scale, shift = tensor.chunk(2, dim=0)
    return torch.cat([shift, scale], dim=0)
