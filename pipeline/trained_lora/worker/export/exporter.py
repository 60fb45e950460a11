"""Writing the three LoRA files of a run and verifying each of them.

`pipeline.trained_lora.export.lora_files` describes the layouts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import diffusers
import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.errors import TrainingError
from pipeline.storage.atomic import allow_readers
from pipeline.storage.os_errors import attach_path
from pipeline.trained_lora.export.lora_files import (
    LAYOUTS,
    ROTATION,
    ROTATION_LAYOUTS,
    Layout,
    LoraModule,
    is_factor,
    layout_file,
    native_file_name,
)
from pipeline.trained_lora.export.metadata import at_step, readers_note
from pipeline.trained_lora.worker.adapter.lora import (
    ADAPTER,
    FROZEN_ADAPTER,
    Networks,
    adapter_state,
    collect,
    delta_weights,
    frozen_delta_sizes,
    has_magnitude,
    lora_modules,
    row_norms,
)
from pipeline.trained_lora.worker.adapter.to_lora import lora_state
from pipeline.trained_lora.worker.export.layouts import (
    LoraWeights,
    RowNorms,
    file_weights,
    layout_tensors,
    stored_weights,
    trained_weights,
)
from pipeline.trained_lora.worker.export.modules import describe_networks
from pipeline.trained_lora.worker.export.native import native_delta, native_tensors, require_native_file
from pipeline.trained_lora.worker.export.read_back import (
    empty_copy,
    largest_error,
    loaded_weights,
    module_error,
    relative_difference,
    require_tolerable,
)
from pipeline.trained_lora.worker.export.rotations import (
    file_rotations,
    load_rotations,
    rotation_error,
    rotation_matrices,
    rotation_tensors,
    rotations,
)

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily

RELOAD_TOLERANCE = 1e-6
"""Largest allowed error of a module's LoRA, relative to its size.

The files hold the trained factors in `lora.save_dtype`, and are compared with these. In float32, only a scale
that a reader moves into the factors is rounded.
"""


@dataclass(frozen=True)
class ExportedFile:
    """A verified file.

    Attributes:
        name: File name.
        max_error: Largest relative error of a module, including the rounding to `lora.save_dtype`; 0 if all
            factors are the trained ones.
        num_modules: Number of adapted modules; all were compared.
    """

    name: str
    max_error: float
    num_modules: int


@dataclass(frozen=True)
class _TrainedLora:
    """The LoRA to export.

    Attributes:
        state: Result of `lora_state` for all networks.
        norms: Row norms of the denoiser's weights; empty without DoRA.
    """

    networks: Networks
    modules: list[LoraModule]
    state: dict[str, Tensor]
    norms: RowNorms

    def rounded(self, dtype: torch.dtype) -> _TrainedLora:
        """Return the LoRA with the numbers that files of `dtype` hold, as float32."""
        state = {
            name: weight.to(dtype).float() if is_factor(name) else weight
            for name, weight in self.state.items()
        }
        return replace(self, state=state)

    @property
    def is_rotation(self) -> bool:
        """Whether the adapter is an OFT."""
        return self.modules[0].rotation

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of the files."""
        return ROTATION_LAYOUTS if self.is_rotation else LAYOUTS

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        """Return the tensors of a file in the layout "kohya" or "comfyui"."""
        if self.is_rotation:
            return rotation_tensors(layout, self.modules, self.state)
        return layout_tensors(layout, self.modules, self.state, self.norms)

    @staticmethod
    def of(family: WorkerFamily, networks: Networks) -> _TrainedLora:
        denoiser = networks[""]
        return _TrainedLora(
            networks,
            describe_networks(family, networks),
            collect(networks, lora_state),
            row_norms(denoiser) if any(has_magnitude(module) for _, module in lora_modules(denoiser)) else {},
        )


class Exporter:
    """Writes and verifies the LoRA files of one run."""

    def __init__(
        self,
        family: WorkerFamily,
        recipe_name: str,
        metadata: Mapping[str, str],
        *,
        save_dtype: str = "float32",
        native: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the parts that the files of all steps share; `metadata` is added to each file's header.

        With `native`, a LoHa or LoKr is also written in its own format, with this metadata in addition.
        """
        self._family = family
        self._recipe_name = recipe_name
        self._metadata = dict(metadata)
        self._native = native
        self._dtype: torch.dtype = getattr(torch, save_dtype)
        self._pipeline: Any = getattr(diffusers, family.model.index["_class_name"])
        self._empty_denoiser: Any = None

    def export(self, networks: Networks, folder: Path, *, step: int | None = None) -> list[ExportedFile]:
        """Replace the contents of `folder` by the three files, and verify each of them.

        The headers name `step`, the number of optimizer steps done.

        Raises:
            TrainingError: A file does not reproduce the adapter (FAILURES R06), or a layout cannot hold it.
            OSError: Writing failed; the error names `folder`.
        """
        # Files of an earlier attempt must not be verified or published together with the new ones.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        trained = _TrainedLora.of(self._family, networks)
        stored = trained.rounded(self._dtype)
        metadata = self._metadata if step is None else at_step(self._metadata, step)
        keys = self._family.spec.lora

        with attach_path(folder):
            note = readers_note("diffusers", stored.modules, keys)
            self._save_diffusers(folder, stored, metadata | note)
            for layout in stored.layouts[1:]:  # the diffusers layout is the first one
                tensors = stored.tensors(layout)
                save_file(
                    self._in_dtype(tensors),
                    folder / layout_file(layout, self._recipe_name),
                    metadata=metadata | readers_note(layout, stored.modules, keys),
                )
            if self._native is not None:
                tensors = self._in_dtype(self._native_tensors(trained))
                path = folder / native_file_name(self._recipe_name)
                save_file(tensors, path, metadata={**metadata, **self._native})
            for path in folder.iterdir():
                allow_readers(path)
        return self._verify(folder, trained)

    def verify(self, networks: Networks, folder: Path) -> list[ExportedFile]:
        """Verify the three files in `folder`, which `export` wrote for the same weights."""
        return self._verify(folder, _TrainedLora.of(self._family, networks))

    def _save_diffusers(self, folder: Path, trained: _TrainedLora, metadata: dict[str, str]) -> None:
        # The steps of `save_lora_weights`, which takes no metadata of its caller, and which modular pipelines
        # lack.
        state: dict[str, Tensor] = {}
        adapters: dict[str, Any] = {}
        for prefix, network in trained.networks.items():
            component = prefix.removesuffix(".") or self._family.spec.denoiser_name
            network_modules = [
                module for module in trained.modules if module.diffusers.startswith(f"{component}.")
            ]
            keys = {module.name: module.diffusers.removeprefix(f"{component}.") for module in network_modules}
            layers: dict[str, Tensor] = {}
            for name, tensor in trained.state.items():
                module, weight = _split_weight_name(name)
                if module in keys:
                    layers[keys[module] + weight] = tensor
            state |= self._pipeline.pack_weights(self._in_dtype(layers), component)

            # peft's configuration of another kind of adapter does not describe the LoRA in the file.
            config = (
                cast("Any", network).peft_config[ADAPTER]
                if _is_plain_lora(network) or trained.is_rotation
                else _lora_config(network_modules)
            )
            values = _json_values(config.to_dict())
            adapters |= {f"{component}.{name}": value for name, value in values.items()}

        adapter_metadata = json.dumps(adapters, indent=2, sort_keys=True)
        save_file(
            state,
            folder / layout_file("diffusers", self._recipe_name),
            metadata={**metadata, "format": "pt", LORA_ADAPTER_METADATA_KEY: adapter_metadata},
        )

    def _in_dtype(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: each.to(self._dtype) if is_factor(key) else each for key, each in tensors.items()}

    def _verify(self, folder: Path, trained: _TrainedLora) -> list[ExportedFile]:
        """Compare each file, as its readers read it, with the adapter in memory."""
        if trained.is_rotation:
            return self._verify_rotations(folder, trained)

        # The factors of adapters that are converted to a LoRA are products, with larger rounding errors.
        tolerance = RELOAD_TOLERANCE * (1 if _is_plain_lora(trained.networks[""]) else 10)
        exact_weights = trained_weights(trained.modules, trained.state, trained.norms)
        conversion_error = _conversion_error(trained, exact_weights, where=folder, tolerance=tolerance)
        stored = trained.rounded(self._dtype)
        expected = trained_weights(stored.modules, stored.state, stored.norms)
        if self._dtype != torch.float32:
            rounding_error = _rounding_error(expected, exact_weights, where=folder, dtype=self._dtype)
            conversion_error = max(conversion_error, rounding_error)

            # A reader that moves a scale into the factors rounds them again.
            tolerance = max(tolerance, 4 * torch.finfo(self._dtype).eps)

        # One for all files of all checkpoints, because creating it takes almost half of the time.
        if self._empty_denoiser is None:
            self._empty_denoiser = empty_copy(trained.networks[""])

        files: list[ExportedFile] = []
        for layout in LAYOUTS:
            path = folder / layout_file(layout, self._recipe_name)
            error = conversion_error
            if layout != "diffusers":
                weights = file_weights(path, trained.modules, layout, trained.norms)
                in_file = stored_weights(expected, trained.modules, layout, self._dtype)
                error = max(error, largest_error(path, weights, in_file, exact=True, tolerance=tolerance))
                error = max(error, *(module_error(in_file[name], expected[name]) for name in in_file))

            # Users load this file with diffusers, so diffusers reads it here too.
            if layout == "diffusers" or (layout == "kohya" and self._diffusers_reads_kohya(trained)):
                weights = loaded_weights(
                    path,
                    self._pipeline,
                    trained.networks,
                    trained.norms,
                    denoiser_name=self._family.spec.denoiser_name,
                    empty=self._empty_denoiser,
                )

                # diffusers moves the scales of kohya's layout into the factors for some model families.
                exact = layout == "diffusers"
                error = max(error, largest_error(path, weights, expected, exact=exact, tolerance=tolerance))
            files.append(ExportedFile(path.name, error, len(trained.modules)))
        return [*files, *([] if self._native is None else [self._verify_native(folder, trained)])]

    def _native_tensors(self, trained: _TrainedLora) -> dict[str, Tensor]:
        """Return the tensors of the native file in float32."""
        denoiser, text = self._by_network(trained)
        state = adapter_state(trained.networks[""])
        return {
            **native_tensors(denoiser, state, self._native_layout),
            **layout_tensors(self._native_layout, text, trained.state, {}),
        }

    def _verify_native(self, folder: Path, trained: _TrainedLora) -> ExportedFile:
        path, layout = folder / native_file_name(self._recipe_name), self._native_layout
        denoiser, _ = self._by_network(trained)
        exact = self._native_tensors(trained)
        stored = {key: each.float() for key, each in self._in_dtype(exact).items()}
        require_native_file(path, stored)

        # The file holds the stored numbers, so its error is their rounding.
        deltas = delta_weights(trained.networks[""])
        tolerance = 10 * RELOAD_TOLERANCE
        largest = 0.0
        for module in denoiser:
            key, delta = module.key(layout), deltas[module.name]().flatten(1)
            error = relative_difference(native_delta(exact, key), delta)
            require_tolerable(module.name, error, where=path, tolerance=tolerance)
            largest = max(largest, relative_difference(native_delta(stored, key), delta))
        return ExportedFile(path.name, largest, len(trained.modules))

    @property
    def _native_layout(self) -> Layout:
        # ComfyUI reads kohya's keys of UNets too, and LyCORIS reads no others.
        return "kohya" if self._family.spec.denoiser_name == "unet" else "comfyui"

    def _by_network(self, trained: _TrainedLora) -> tuple[list[LoraModule], list[LoraModule]]:
        """Return the modules of the denoiser, and those of text encoders."""
        prefix = f"{self._family.spec.denoiser_name}."
        in_denoiser = [module.diffusers.startswith(prefix) for module in trained.modules]
        pairs = [*zip(trained.modules, in_denoiser, strict=True)]
        return [module for module, is_in in pairs if is_in], [module for module, is_in in pairs if not is_in]

    def _verify_rotations(self, folder: Path, trained: _TrainedLora) -> list[ExportedFile]:
        stored = trained.rounded(self._dtype)
        exact, expected = (
            {each.name: lora.state[f"{each.name}{ROTATION}"] for each in lora.modules}
            for lora in (trained, stored)
        )
        tolerance = 0.0 if self._dtype == torch.float32 else 4 * torch.finfo(self._dtype).eps
        rounding_error = rotation_error(folder, expected, exact, tolerance=tolerance)

        files: list[ExportedFile] = []
        for layout in trained.layouts:
            path = folder / layout_file(layout, self._recipe_name)
            weights = file_rotations(path, trained.modules, layout)
            error = max(rounding_error, rotation_error(path, weights, expected, tolerance=0.0))
            if layout == "diffusers":
                error = max(error, self._peft_error(path, expected, trained.networks[""]))
            files.append(ExportedFile(path.name, error, len(trained.modules)))
        return files

    def _peft_error(self, path: Path, expected: Mapping[str, Tensor], network: nn.Module) -> float:
        """Return the largest error of a file as peft loads it: of the numbers, and of what they rotate."""
        reader = empty_copy(network)
        load_rotations(path, reader, denoiser_name=self._family.spec.denoiser_name)
        error = rotation_error(path, rotations(reader), expected, tolerance=0.0)

        # Equal numbers rotate in the same way only with the same settings, such as the number of terms.
        tolerance = max(RELOAD_TOLERANCE, 4 * torch.finfo(self._dtype).eps)
        matrices, trained = rotation_matrices(reader), rotation_matrices(network)
        return max(error, rotation_error(path, matrices, trained, tolerance=tolerance))

    def _diffusers_reads_kohya(self, trained: _TrainedLora) -> bool:
        """Return whether diffusers reads this LoRA from kohya's layout with the trained effect."""
        # diffusers ignores DoRA's magnitudes there.
        return self._family.kohya_loads() and not trained.norms


def _rounding_error(rounded: LoraWeights, exact: LoraWeights, *, where: Path, dtype: torch.dtype) -> float:
    """Return the largest relative error of a module's LoRA by rounding its factors."""
    errors: list[float] = []
    for name, weights in rounded.items():
        if not (torch.isfinite(weights.down).all() and torch.isfinite(weights.up).all()):
            raise TrainingError(
                f"a number in the LoRA of {name} is too large for {str(dtype).removeprefix('torch.')}",
                where=str(where),
                fix="set training.lora.save_dtype: bfloat16 or float32, or lower training.learning_rate",
            )

        # Rounding changes every weight; the error of the product is the figure that matters to a user.
        errors.append(module_error(weights, exact[name]))
    return max(errors)


def _conversion_error(
    trained: _TrainedLora, expected: LoraWeights, *, where: Path, tolerance: float
) -> float:
    """Return the largest error of the delta weights of `expected`, compared with the adapter's."""
    denoiser = trained.networks[""]
    deltas = collect(trained.networks, delta_weights)
    frozen_sizes = frozen_delta_sizes(denoiser)

    # The factors of a plain LoRA are exported as they are, so one module of each kind suffices.
    names = _examples(trained.modules) if _is_plain_lora(denoiser) else list(deltas)

    largest = 0.0
    for name in names:
        error = relative_difference(
            expected[name].delta(), deltas[name]().flatten(1), least_scale=frozen_sizes.get(name, 0.0)
        )
        require_tolerable(name, error, where=where, tolerance=tolerance)
        largest = max(largest, error)
    return largest


def _examples(modules: list[LoraModule]) -> list[str]:
    """Return the name of the first module of each kind: network, scale, convolution or not, fused or not."""
    kinds: dict[tuple[object, ...], str] = {}
    for module in modules:
        network = module.diffusers.partition(".")[0]
        kind = (network, module.alpha / module.rank, module.is_convolution, module.kohya_outs != ())
        kinds.setdefault(kind, module.name)
    return list(kinds.values())


def _is_plain_lora(network: nn.Module) -> bool:
    """Return whether the files hold the adapter's own weights, without conversion to a LoRA."""
    configs = cast("Any", network).peft_config
    return FROZEN_ADAPTER not in configs and isinstance(configs[ADAPTER], LoraConfig)


def _lora_config(modules: list[LoraModule]) -> LoraConfig:
    # peft matches the end of a path, so the anchor keeps a path that ends in this one from matching.
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
    if name.endswith(ROTATION):
        return name.removesuffix(ROTATION), ROTATION
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
            # peft's configuration has entries for its own use, such as functions.
            continue
        values[name] = json_value
    return values
