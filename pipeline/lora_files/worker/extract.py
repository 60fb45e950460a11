"""The closest LoRA to the difference of two models, layer by layer.

The difference of a layer's weights is approximated by its largest singular values (Eckart and Young 1936).
Weights are read one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import LoraFileError
from pipeline.lora_files.combine import ORIGIN_KEY
from pipeline.lora_files.extract import RESULT_FILE, Extracted, ExtractionJob
from pipeline.models.diffusers_folder import weight_files
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.loading import pipeline_class
from pipeline.recipe import LoraSettings
from pipeline.storage.atomic import write_text
from pipeline.trained_lora.export.lora_files import LAYOUTS, LoraModule, is_factor, layout_file
from pipeline.trained_lora.export.metadata import base_model_metadata, readers_note
from pipeline.trained_lora.worker.adapter.lora import add_lora
from pipeline.trained_lora.worker.export.layouts import (
    file_weights,
    layout_tensors,
    stored_weights,
    trained_weights,
)
from pipeline.trained_lora.worker.export.modules import describe_networks
from pipeline.trained_lora.worker.export.read_back import largest_error, loaded_weights
from pipeline.trained_lora.worker.memory.skeletons import skeleton

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin
    from torch import nn

_EXACT_SIZE = 1024
"""Shorter side up to which all singular values of a weight are computed."""

_MORE_VALUES, _ITERATIONS = 2, 6
"""Singular values of a larger weight, relative to the rank, and power iterations of the randomized method of
Halko, Martinsson and Tropp (https://arxiv.org/abs/0909.4061)."""


def extract_lora(job: ExtractionJob, result_folder: Path, progress: Callable[[int, int, str], None]) -> None:
    """Write the LoRA of a job in three layouts, verify the files, and write `RESULT_FILE`.

    Raises:
        LoraFileError: The models have other weights or shapes, or do not differ in the layers of the LoRA.
        TrainingError: A file does not hold the LoRA.
    """
    family = load_family(job.base)
    network = _adapted(family, job)
    modules = describe_networks(family, {"": network})
    with ExitStack() as stack:
        base, tuned = (_Weights(load_family(folder), stack) for folder in (job.base, job.tuned))
        if base.keys() != tuned.keys():
            different = sorted(base.keys() ^ tuned.keys())
            raise LoraFileError(
                f"the models have different weights, such as {different[0]}",
                where=f"{job.base}\n{job.tuned}",
                fix="pass the model that the other one was made from as BASE",
            )
        state, result = _decompose(job, modules, base, tuned, progress)
    _write(job, family, modules, state)
    _verify(job, family, network, modules, state)
    write_text(result_folder / RESULT_FILE, json.dumps(asdict(result)))


def _adapted(family: WorkerFamily, job: ExtractionJob) -> nn.Module:
    """Return the denoiser with the LoRA's layers, without memory for weights."""
    rank, conv_rank = job.settings.rank, job.settings.conv_rank
    settings = LoraSettings(
        rank=rank, alpha=rank, targets=job.settings.targets, conv_rank=conv_rank, conv_alpha=conv_rank
    )
    network = skeleton(family, family.spec.denoiser_name, "float32")
    with torch.device("meta"):
        add_lora(cast("ModelMixin", network), settings, targets=family.lora_targets(), seed=0)
    return network


class _Weights:
    """The denoiser's weights of a model, read when they are needed."""

    def __init__(self, family: WorkerFamily, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        for path in weight_files(family.model.component(family.spec.denoiser_name)):
            if path.suffix == ".bin":
                fix = "convert the model to safetensors with save_pretrained of diffusers"
                raise LoraFileError("the weights are in pickle files", where=str(path), fix=fix)
            if path.suffix == ".safetensors":
                opened = stack.enter_context(safe_open(path, framework="pt"))
                self._files |= dict.fromkeys(opened.keys(), opened)

    def keys(self) -> set[str]:
        return set(self._files)

    def __getitem__(self, key: str) -> Tensor:
        return self._files[key].get_tensor(key).float()


def _decompose(
    job: ExtractionJob,
    modules: list[LoraModule],
    base: _Weights,
    tuned: _Weights,
    progress: Callable[[int, int, str], None],
) -> tuple[dict[str, Tensor], Extracted]:
    by_weight = {f"{module.name}.weight": module for module in modules}
    state: dict[str, Tensor] = {}
    changes: dict[str, float] = {}
    kept: dict[str, float] = {}
    for index, key in enumerate(sorted(base.keys())):
        progress(index, len(base.keys()), "comparing weights")
        before, after = base[key], tuned[key]
        if before.shape != after.shape:
            raise LoraFileError(
                f"{key} has the shape {tuple(after.shape)}, and {tuple(before.shape)} in the other model",
                where=f"{job.tuned}\n{job.base}",
                fix="pass the model that the other one was made from as BASE",
            )
        change = after - before
        changes[key] = float(change.double().square().sum())
        if (module := by_weight.get(key)) is not None:
            down, up = _factors(change.flatten(1), module.rank)
            kept[key] = float((up.double() @ down.double()).square().sum())
            state[f"{module.name}.lora_A.weight"] = down.reshape(module.rank, *change.shape[1:])
            state[f"{module.name}.lora_B.weight"] = up.reshape(*up.shape, *(1 for _ in module.kernel))

    inside, total = sum(changes[key] for key in by_weight), sum(changes.values())
    if not inside:
        other = max(changes, key=changes.__getitem__)
        text = f"; they differ in {other}" if total else ""
        raise LoraFileError(
            f"the models are equal in all layers that the LoRA would have{text}",
            where=f"{job.tuned}\n{job.base}",
            fix="pass two different models, or --targets blocks",
        )
    parts = {key: kept[key] / changes[key] for key in by_weight if changes[key]}
    least = min(parts, key=parts.__getitem__)
    others = {key: change for key, change in changes.items() if change and key not in by_weight}
    return state, Extracted(
        num_layers=len(modules),
        energy=sum(kept.values()) / inside,
        least=(least.removesuffix(".weight"), parts[least]),
        outside=sum(others.values()) / total,
        largest_outside=max(others, key=others.__getitem__, default=""),
    )


def _factors(change: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return down (rank, in) and up (out, rank) with the product closest to `change` (out, in)."""
    if min(change.shape) <= max(_EXACT_SIZE, _MORE_VALUES * rank):
        left, values, right = torch.linalg.svd(change, full_matrices=False)
    else:
        # Its random numbers must not differ from run to run.
        torch.manual_seed(0)
        left, values, transposed = torch.svd_lowrank(change, q=_MORE_VALUES * rank, niter=_ITERATIONS)
        right = transposed.T
    root = values[:rank].sqrt()

    # A small layer has fewer singular values than the LoRA has ranks.
    down, up = change.new_zeros(rank, change.shape[1]), change.new_zeros(change.shape[0], rank)
    down[: len(root)] = root[:, None] * right[:rank]
    up[:, : len(root)] = left[:, :rank] * root
    return down, up


def _write(
    job: ExtractionJob, family: WorkerFamily, modules: list[LoraModule], state: Mapping[str, Tensor]
) -> None:
    metadata = base_model_metadata(family) | {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(job.settings.rank),
        "ss_network_alpha": str(job.settings.rank),
        "ss_output_name": job.name,
        ORIGIN_KEY: json.dumps({"model": job.tuned.name, "minus": job.base.name}),
    }
    dtype = getattr(torch, job.settings.dtype)
    for layout in LAYOUTS:
        if layout == "diffusers":
            tensors = {
                f"{module.diffusers}.{matrix}.weight": state[f"{module.name}.{matrix}.weight"]
                for module in modules
                for matrix in ("lora_A", "lora_B")
            }
        else:
            tensors = layout_tensors(layout, modules, state, {})
        save_file(
            {key: each.to(dtype) if is_factor(key) else each for key, each in tensors.items()},
            job.folder / layout_file(layout, job.name),
            metadata=metadata | readers_note(layout, modules, family.spec.lora),
        )


def _verify(
    job: ExtractionJob,
    family: WorkerFamily,
    network: nn.Module,
    modules: list[LoraModule],
    state: Mapping[str, Tensor],
) -> None:
    """Compare each file, as its readers read it, with the numbers that it must hold."""
    dtype = getattr(torch, job.settings.dtype)
    expected = trained_weights(modules, {key: each.to(dtype).float() for key, each in state.items()}, {})
    tolerance = 4 * torch.finfo(dtype).eps
    for layout in LAYOUTS:
        path = job.folder / layout_file(layout, job.name)
        if layout == "diffusers":
            name = family.spec.denoiser_name
            weights = loaded_weights(path, pipeline_class(family), {"": network}, {}, denoiser_name=name)
            largest_error(path, weights, expected, exact=True, tolerance=tolerance)
        else:
            weights = file_weights(path, modules, layout, {})
            in_file = stored_weights(expected, modules, layout, dtype)
            largest_error(path, weights, in_file, exact=True, tolerance=tolerance)
