"""What a LoRA file contains: its layers, ranks and sizes, and what its metadata says of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.log import Log, discard
from pipeline.lora_files.arithmetic import decompose
from pipeline.lora_files.layers import network_of, read_layers
from pipeline.reporting.progress import progress
from pipeline.trained_lora.export.lora_files import lora_file

ENERGY = 0.99
"""Energy for which a summary states the rank."""

_ABOUT = {
    "base model": ("modelspec.architecture", "ss_base_model_version"),
    "trained on": ("ss_sd_model_name",),
    "title": ("modelspec.title", "ss_output_name"),
    "trigger": ("modelspec.trigger_phrase",),
    "steps": ("ss_steps",),
    "run": ("latentline.run",),
    "made from": ("latentline.made_from",),
}
"""Keys of the metadata by what they tell; the first one that a file has is shown."""


@dataclass(frozen=True)
class LayerSummary:
    """One layer of a LoRA.

    Attributes:
        network: Part of the model that has the layer, such as "unet", "lora_te1" or "transformer".
        scale: alpha / rank.
        norm: Frobenius norm of the delta weight.
        rank_for_energy: Smallest rank that keeps `ENERGY` of it.
    """

    key: str
    network: str
    shape: tuple[int, ...]
    rank: int
    scale: float
    norm: float
    rank_for_energy: int


@dataclass(frozen=True)
class LoraSummary:
    """Contents of a LoRA file.

    Attributes:
        naming: "lora_A and lora_B" or "lora_down and lora_up", after the keys of the matrices.
        about: Facts of the metadata by name, such as "base model".
        layers: Layers in the order of their keys.
    """

    path: Path
    num_bytes: int
    naming: str
    dtype: str
    about: Mapping[str, str]
    layers: tuple[LayerSummary, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the values that JSON can hold."""
        return {**asdict(self), "path": str(self.path)}


def summarize(path: Path, *, log: Log = discard) -> LoraSummary:
    """Return the summary of the LoRA file at `path`, found as in `lora_file`; errors as in `read_layers`."""
    path = lora_file(path)
    file = read_layers(path)
    layers: list[LayerSummary] = []
    with progress(lambda: len(layers), len(file.layers), "layers measured", log=log):
        for key, layer in file.layers.items():
            singular = decompose(layer)
            layers.append(
                LayerSummary(
                    key,
                    network_of(key),
                    layer.weight_shape,
                    layer.rank,
                    layer.scale,
                    singular.norm,
                    singular.rank_for(ENERGY),
                )
            )
    about = {
        name: next(file.metadata[key] for key in keys if key in file.metadata)
        for name, keys in _ABOUT.items()
        if any(key in file.metadata for key in keys)
    }
    naming = "lora_A and lora_B" if file.is_diffusers else "lora_down and lora_up"
    return LoraSummary(path, path.stat().st_size, naming, file.dtype, about, tuple(layers))
