"""Writing the three LoRA files of a run and verifying each of them.

`pipeline.trained_lora.export.lora_files` describes the layouts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import diffusers
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.models.diffusers_folder import read_json
from pipeline.storage.os_errors import attach_path
from pipeline.trained_lora.export.lora_files import LAYOUTS, LoraModule, layout_file
from pipeline.trained_lora.worker.adapter.lora import (
    ADAPTER,
    FROZEN_ADAPTER,
    Networks,
    collect,
    delta_weights,
    frozen_delta_sizes,
    magnitudes,
    row_norms,
)
from pipeline.trained_lora.worker.adapter.to_lora import lora_state
from pipeline.trained_lora.worker.export.layouts import (
    Effects,
    RowNorms,
    combine_effects,
    file_effects,
    layout_tensors,
)
from pipeline.trained_lora.worker.export.modules import describe_networks
from pipeline.trained_lora.worker.export.read_back import largest_errors, loaded_effects

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily

RELOAD_TOLERANCE = 1e-6
"""Largest allowed error of a delta weight, relative to the largest delta weight of its module.

The files hold the trained float32 factors, so only the summation order of the product differs. The tolerance
is ten times as large for adapters that are converted to a LoRA, whose factors are products.
"""


@dataclass(frozen=True)
class ExportedFile:
    """A verified file.

    Attributes:
        name: File name.
        max_error: Largest relative error of a delta weight, see `RELOAD_TOLERANCE`.
        num_modules: Number of adapted modules, all of which were compared.
    """

    name: str
    max_error: float
    num_modules: int


class Exporter:
    """Writes and verifies the LoRA files of one run."""

    def __init__(self, family: WorkerFamily, recipe_name: str, metadata: Mapping[str, str]) -> None:
        """Take what the three files have in common; `metadata` is added to each file's header."""
        self._family = family
        self._recipe_name = recipe_name
        self._metadata = dict(metadata)
        pipeline_class = read_json(family.folder / "model_index.json")["_class_name"]
        self._pipeline: Any = getattr(diffusers, pipeline_class)

    def export(self, networks: Networks, folder: Path) -> list[ExportedFile]:
        """Replace the contents of `folder` by the three files, and verify each of them.

        The folder is created with its parents.

        Raises:
            TrainingError: A file does not reproduce the delta weights (FAILURES R06), or a layout cannot hold
                them.
            OSError: Writing failed; the error names `folder`.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        denoiser, state = networks[""], collect(networks, lora_state)
        modules = describe_networks(self._family, networks)
        norms = row_norms(denoiser) if magnitudes(denoiser) else {}

        with attach_path(folder):
            self._save_diffusers(folder, networks, modules, state)
            for layout in ("kohya", "comfyui"):
                tensors = layout_tensors(layout, modules, state, norms)
                save_file(tensors, folder / layout_file(layout, self._recipe_name), metadata=self._metadata)
        return self._verify(networks, modules, folder, norms)

    def _save_diffusers(
        self, folder: Path, networks: Networks, modules: list[LoraModule], state: dict[str, Tensor]
    ) -> None:
        """Write diffusers' layout with the pipeline's `save_lora_weights`."""
        arguments: dict[str, Any] = {}
        for prefix, network in networks.items():
            component = prefix.removesuffix(".") or self._family.denoiser_name
            network_modules = [module for module in modules if module.diffusers.startswith(f"{component}.")]
            keys = {module.name: module.diffusers.removeprefix(f"{component}.") for module in network_modules}
            layers: dict[str, Tensor] = {}
            for name, tensor in state.items():
                module, weight = _split_weight_name(name)
                if module in keys:
                    layers[keys[module] + weight] = tensor
            config = (
                cast("Any", network).peft_config[ADAPTER]
                if _is_plain_lora(network)
                else _lora_config(network_modules)
            )
            arguments[f"{component}_lora_layers"] = layers
            arguments[f"{component}_lora_adapter_metadata"] = _json_values(config.to_dict())
        self._pipeline.save_lora_weights(save_directory=folder, **arguments)

        # `save_lora_weights` takes no metadata of its caller.
        path = folder / layout_file("diffusers", self._recipe_name)
        with safe_open(path, framework="pt") as file:
            adapter_metadata = dict(file.metadata() or {})
        save_file(load_file(path), path, metadata={**self._metadata, **adapter_metadata})

    def _verify(
        self, networks: Networks, modules: list[LoraModule], folder: Path, norms: RowNorms
    ) -> list[ExportedFile]:
        """Compare the effects of each file with those of the adapter in memory."""
        denoiser = networks[""]
        expected = combine_effects(collect(networks, delta_weights), magnitudes(denoiser), norms)

        # Of kohya's layout, diffusers ignores DoRA's magnitudes and all but the most common alpha of a
        # network.
        alphas = {(module.diffusers.partition(".")[0], module.alpha) for module in modules}
        diffusers_reads_kohya = self._family.kohya_loads() and not norms and len(alphas) == len(networks)

        paths = [folder / layout_file(layout, self._recipe_name) for layout in LAYOUTS]
        reloaded: list[tuple[Path, Effects]] = []
        for layout, path in zip(LAYOUTS, paths, strict=True):
            if layout != "diffusers":
                reloaded.append((path, file_effects(path, modules, layout, norms)))
            if layout == "diffusers" or (layout == "kohya" and diffusers_reads_kohya):
                effects = loaded_effects(
                    path, self._pipeline, networks, norms, denoiser_name=self._family.denoiser_name
                )
                reloaded.append((path, effects))

        tolerance = RELOAD_TOLERANCE * (1 if _is_plain_lora(denoiser) else 10)
        errors = largest_errors(
            reloaded, expected, frozen_sizes=frozen_delta_sizes(denoiser), tolerance=tolerance
        )
        return [ExportedFile(path.name, errors[path], len(modules)) for path in paths]


def _is_plain_lora(network: nn.Module) -> bool:
    """Return whether the files hold the adapter's own weights, without conversion to a LoRA."""
    configs = cast("Any", network).peft_config
    return FROZEN_ADAPTER not in configs and isinstance(configs[ADAPTER], LoraConfig)


def _lora_config(modules: list[LoraModule]) -> LoraConfig:
    """Return peft's configuration of a LoRA on these modules."""
    patterns = {f"^{re.escape(module.name)}": module for module in modules}
    return LoraConfig(
        r=modules[0].rank,
        lora_alpha=cast("int", modules[0].alpha),
        target_modules=[module.name for module in modules],
        rank_pattern={pattern: module.rank for pattern, module in patterns.items()},
        alpha_pattern=cast("dict[str, int]", {pattern: module.alpha for pattern, module in patterns.items()}),
    )


def _split_weight_name(name: str) -> tuple[str, str]:
    """Split "<module>.lora_A.weight" into ("<module>", ".lora_A.weight")."""
    module, separator, weight = name.rpartition(".lora_")
    return module, separator + weight


def _json_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that JSON can hold; sets become sorted lists."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        json_value = sorted(value) if isinstance(value, set) else value
        try:
            json.dumps(json_value)
        except TypeError:
            continue
        values[name] = json_value
    return values
