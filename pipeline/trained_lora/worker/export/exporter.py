"""The trained adapter as files in the layouts of diffusers, kohya and ComfyUI, each read back at once.

`pipeline.trained_lora.export.lora_files` draws the three layouts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import diffusers
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.errors import TrainingError, counted
from pipeline.models.diffusers_folder import read_json
from pipeline.storage.os_errors import attach_path
from pipeline.trained_lora.export.lora_files import LAYOUTS, LoraModule, layout_file
from pipeline.trained_lora.worker.adapter.lora import (
    ADAPTER,
    FROZEN_ADAPTER,
    Networks,
    adapted_networks,
    collect,
    delta_weights,
    frozen_delta_sizes,
    magnitudes,
    row_lengths,
)
from pipeline.trained_lora.worker.adapter.to_lora import lora_state
from pipeline.trained_lora.worker.export.layouts import (
    DEFECT,
    Effects,
    Lengths,
    describe_all,
    effects,
    effects_by_rule,
    layout_tensors,
)

if TYPE_CHECKING:
    from pipeline.models.families import Family

RELOAD_TOLERANCE = 1e-6
"""Largest difference of a delta weight, relative to the largest delta weight of its module: the files hold
the very float32 factors, so only the order of a product's additions may differ. Of a LoHa or LoKr, whose
files hold products of its factors, ten times as much. Of an adapter that began as a part of the base weights,
ten times as much relative to the largest weight of that part, which the sum takes off again."""


NO_ENCODERS: Mapping[str, nn.Module] = MappingProxyType({})


@dataclass(frozen=True)
class ExportedFile:
    """One file, verified.

    Attributes:
        name: In the folder.
        max_error: Largest relative difference of a delta weight read back, see `RELOAD_TOLERANCE`.
        num_modules: Modules whose delta weights were compared; all of them.
    """

    name: str
    max_error: float
    num_modules: int


class Exporter:
    """Writes and verifies the files of one run."""

    def __init__(self, family: Family, recipe_name: str, metadata: Mapping[str, str]) -> None:
        """Keep what all three files share.

        Args:
            family: Names the modules in each layout.
            recipe_name: Part of two file names.
            metadata: Put into each file's header beside the adapter's own.
        """
        self._family = family
        self._name = recipe_name
        self._metadata = dict(metadata)
        class_name = read_json(family.folder / "model_index.json")["_class_name"]
        self._pipeline: Any = getattr(diffusers, class_name)
        self._component = family.denoiser_name

    def modules(
        self, denoiser: nn.Module, text_encoders: Mapping[str, nn.Module] = NO_ENCODERS
    ) -> list[LoraModule]:
        """The modules that have an adapter, with their names in each layout; arguments as of `export`."""
        return describe_all(self._family, adapted_networks(denoiser, text_encoders))

    def export(
        self, denoiser: nn.Module, folder: Path, text_encoders: Mapping[str, nn.Module] = NO_ENCODERS
    ) -> list[ExportedFile]:
        """Write the three files into `folder`, which is emptied first, and read each of them back.

        Args:
            denoiser: With its adapter.
            folder: Made with its parents.
            text_encoders: Those that have adapters, by component.

        Raises:
            TrainingError: A file does not give back the delta weights in memory (FAILURES R06), or a layout
                cannot hold them.
            OSError: The disk is full, or `folder` cannot be written, which it names.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        networks = adapted_networks(denoiser, text_encoders)
        state = collect(networks, lora_state)
        modules = describe_all(self._family, networks)
        lengths = row_lengths(denoiser) if magnitudes(denoiser) else {}
        with attach_path(folder):
            self._save_diffusers(folder, networks, modules, state)
            for layout in ("kohya", "comfyui"):
                tensors = layout_tensors(layout, modules, state, lengths)
                save_file(tensors, folder / layout_file(layout, self._name), metadata=self._metadata)
        return self._verified(networks, modules, folder, lengths)

    def _save_diffusers(
        self, folder: Path, networks: Networks, modules: list[LoraModule], state: dict[str, Tensor]
    ) -> None:
        given: dict[str, Any] = {}
        for prefix, network in networks.items():
            component = prefix.removesuffix(".") or self._component
            own = [module for module in modules if module.diffusers.startswith(f"{component}.")]
            keys = {module.name: module.diffusers.removeprefix(f"{component}.") for module in own}
            given[f"{component}_lora_layers"] = {
                keys[module] + end: tensor
                for module, end, tensor in map(_parted, state.items())
                if module in keys
            }
            config = cast("Any", network).peft_config[ADAPTER] if _is_one_lora(network) else _equal(own)
            given[f"{component}_lora_adapter_metadata"] = _plain(config.to_dict())
        self._pipeline.save_lora_weights(save_directory=folder, **given)
        path = folder / layout_file("diffusers", self._name)
        header = _metadata_of(path)
        save_file(load_file(path), path, metadata={**self._metadata, **header})

    def _verified(
        self, networks: Networks, modules: list[LoraModule], folder: Path, lengths: Lengths
    ) -> list[ExportedFile]:
        denoiser = networks[""]
        trained = effects(collect(networks, delta_weights), magnitudes(denoiser), lengths)
        # Of kohya's layout diffusers leaves out DoRA's lengths, and a network's alphas but the commonest.
        alphas = {(module.diffusers.partition(".")[0], module.alpha) for module in modules}
        plain = not lengths and len(alphas) == len(networks)
        paths = [folder / layout_file(layout, self._name) for layout in LAYOUTS]
        found: list[tuple[Path, Effects]] = []
        for layout, path in zip(LAYOUTS, paths, strict=True):
            if layout != "diffusers":
                found.append((path, effects_by_rule(path, modules, layout, lengths)))
            if layout == "diffusers" or (layout == "kohya" and self._family.kohya_loads() and plain):
                found.append((path, self._effects_by_loader(path, networks, lengths)))
        tolerance = RELOAD_TOLERANCE * (1 if _is_one_lora(denoiser) else 10)
        errors = _errors(found, trained, parts=frozen_delta_sizes(denoiser), tolerance=tolerance)
        return [ExportedFile(path.name, errors[path], len(modules)) for path in paths]

    def _effects_by_loader(self, path: Path, networks: Networks, lengths: Lengths) -> Effects:
        """What diffusers' own loader makes of the file, on networks whose base weights take no memory."""
        skeletons = {
            prefix: _skeleton(network, "_from_config" if prefix else "from_config")
            for prefix, network in networks.items()
        }
        skeleton = skeletons[""]
        try:
            # The families of a UNet answer with alphas in between, the others do not.
            state, *alphas, metadata = self._pipeline.lora_state_dict(
                path.parent, weight_name=path.name, unet_config=skeleton.config, return_lora_metadata=True
            )
            told = {
                "network_alphas": alphas[0] if alphas else None,
                "metadata": metadata,
                "adapter_name": "reloaded",
            }
            skeleton.load_lora_adapter(state, prefix=self._component, **told)
            for prefix, encoder in skeletons.items():
                if prefix:
                    self._pipeline.load_lora_into_text_encoder(
                        state, text_encoder=encoder, prefix=prefix.removesuffix("."), **told
                    )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as err:
            raise TrainingError(f"diffusers cannot load it: {err}", where=str(path), fix=DEFECT) from err
        found = collect(skeletons, partial(delta_weights, adapter="reloaded"))
        return effects(found, magnitudes(skeleton, "reloaded"), lengths)


def _skeleton(network: nn.Module, make: str) -> Any:
    """The network's modules as configured, each weight a single zero seen from everywhere.

    Args:
        network: Of diffusers or transformers.
        make: Their name of the method that makes one of a configuration.
    """
    with torch.device("meta"):
        skeleton = getattr(type(network), make)(cast("Any", network).config)
    for module in skeleton.modules():
        for name, weight in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(_zeros_like(weight), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, _zeros_like(buffer))
    return skeleton


def _zeros_like(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _equal(modules: list[LoraModule]) -> LoraConfig:
    """Peft's configuration of a LoRA of these modules."""
    keys = {f"^{re.escape(module.name)}": module for module in modules}
    return LoraConfig(
        r=modules[0].rank,
        lora_alpha=cast("int", modules[0].alpha),
        target_modules=[module.name for module in modules],
        rank_pattern={key: module.rank for key, module in keys.items()},
        alpha_pattern=cast("dict[str, int]", {key: module.alpha for key, module in keys.items()}),
    )


def _is_one_lora(network: nn.Module) -> bool:
    """Whether the adapter's own weights are what the files hold."""
    have = cast("Any", network).peft_config
    return FROZEN_ADAPTER not in have and isinstance(have[ADAPTER], LoraConfig)


def _parted(item: tuple[str, Tensor]) -> tuple[str, str, Tensor]:
    """(module, rest of the name, weight) of one of peft's."""
    module, mark, end = item[0].rpartition(".lora_")
    return module, mark + end, item[1]


def _errors(
    found: Sequence[tuple[Path, Effects]],
    trained: Effects,
    *,
    parts: Mapping[str, float],
    tolerance: float,
) -> dict[Path, float]:
    """The largest relative difference of each file; to a module's entry in `parts` where that is larger.

    Of a large model all delta weights together are larger than the model: one trained and one read back are
    in memory at a time.
    """
    for path, reloaded in found:
        if set(trained) != set(reloaded):
            odd = sorted(set(trained) ^ set(reloaded))
            modules = counted(len(odd), "module is", "modules are")
            what = f"{modules} not in both the file and the adapter, the first is {odd[0]}"
            raise TrainingError(what, where=str(path), fix=DEFECT)
    worst = {path: 0.0 for path, _ in found}
    for name in trained:
        largest = _differences(name, found, trained[name](), parts.get(name, 0.0))
        for path, error in largest:
            if not error <= tolerance:
                what = f"{name} comes back with delta weights that differ by {error:.2g} of the largest"
                raise TrainingError(what, where=str(path), fix=DEFECT)
            worst[path] = max(worst[path], error)
    return worst


def _differences(
    name: str, found: Sequence[tuple[Path, Effects]], delta: Tensor, part: float
) -> list[tuple[Path, float]]:
    """Of one module, file by file."""
    scale = max(float(delta.abs().max()), part) or 1.0
    return [
        (path, float((delta - reloaded[name]().reshape(delta.shape)).abs().max()) / scale)
        for path, reloaded in found
    ]


def _metadata_of(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of peft as JSON can hold it: sets sorted, what is not data left out."""
    plain: dict[str, Any] = {}
    for name, value in config.items():
        kept = sorted(value) if isinstance(value, set) else value
        try:
            json.dumps(kept)
        except TypeError:
            continue
        plain[name] = kept
    return plain
