"""Conversion of the components of a single file, which diffusers loads and saves in its own layout."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeline.errors import ModelError
from pipeline.models.convert.job import ComponentJob, ConversionJob
from pipeline.models.convert.reference import is_component
from pipeline.models.families import detect
from pipeline.models.worker.loading import component_class, pipeline_class

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.families import Family

# diffusers does not recognise a UNet without this prefix, but it does recognise transformers.
_UNET_PREFIX = "model.diffusion_model."


def convert_components(job: ConversionJob, progress: Callable[[int, int, str], None]) -> None:
    """Write the components of a job one at a time, so that only one is in memory.

    `progress` receives the number of finished components, their total, and what happens next.

    Raises:
        ModelError: A component lacks weights, or its shape differs from the configuration.
    """
    family = detect(job.reference)
    for index, (role, component) in enumerate(job.components.items()):
        progress(index, len(job.components), f"converting {role}")
        network = _load(job, family, role, component)
        _require_complete(network, job, role, component)

        target = job.folder / role
        network.save_pretrained(target)

        # The configuration is a byte-equal copy of the reference model's, not the one of save_pretrained.
        shutil.copyfile(job.reference / role / "config.json", target / "config.json")
        del network
        gc.collect()
    progress(len(job.components), len(job.components), "components converted")


def _load(job: ConversionJob, family: Family, role: str, component: ComponentJob) -> Any:
    import torch
    from diffusers.loaders.single_file_utils import SingleFileComponentError

    dtype = getattr(torch, component.dtype)
    common: dict[str, Any] = {"config": str(job.reference), "local_files_only": True, "dtype": dtype}
    try:
        if component.network == "text_encoder":
            # Only the pipeline converts text encoders, so all its other components are disabled.
            others = {name: None for name, entry in family.model.index.items() if is_component(entry)}
            del others[role]
            pipeline = pipeline_class(family).from_single_file(str(job.file), **common, **others)
            return getattr(pipeline, role)
        tensors = _read_tensors(job, component)
        network_class = component_class(family, role)
        if component.network == "same_names":
            network = network_class.from_config(family.model.config(role))
            network.load_state_dict(tensors, assign=True)
            return network.to(dtype)
        return network_class.from_single_file(tensors, subfolder=role, **common)
    except (ValueError, KeyError, IndexError, RuntimeError, SingleFileComponentError) as err:
        reason, *_ = str(err).strip().splitlines() or [type(err).__name__]
        # diffusers leaves a weight that the file lacks as a meta tensor, which torch cannot copy.
        is_incomplete = "meta tensor" in reason
        reason = "the file lacks some of the weights" if is_incomplete else f"error of diffusers: {reason}"
        raise _mismatch_error(job, role, reason) from err


def _read_tensors(job: ConversionJob, component: ComponentJob) -> dict[str, Tensor]:
    """Return the tensors of a component under the names that diffusers recognises, memory-mapped."""
    from safetensors import safe_open

    without = tuple(component.without)
    with safe_open(job.file, framework="pt") as opened:
        names = [name for name in opened.keys() if name.startswith(component.prefix)]  # noqa: SIM118 - no mapping
        names = [name for name in names if not name.startswith(without)]
        if component.network == "vae":
            return {name: opened.get_tensor(name) for name in names}
        tensors = {name.removeprefix(component.prefix): opened.get_tensor(name) for name in names}
    prefix = _UNET_PREFIX if "input_blocks.0.0.weight" in tensors else ""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _require_complete(network: Any, job: ConversionJob, role: str, component: ComponentJob) -> None:
    """Raise ModelError unless the network has all its weights and uses all weights of the file."""
    # Tied weights are stored once, and would count as missing.
    if hasattr(network, "tie_weights"):  # networks of transformers
        network.tie_weights()
    state: dict[str, Tensor] = network.state_dict()
    empty = [name for name, tensor in state.items() if tensor.is_meta]
    if empty:
        raise _mismatch_error(job, role, f"the file lacks weights for {', '.join(empty[:3])}")

    num_used = sum(tensor.numel() for tensor in state.values())
    if component.num_values is not None and component.num_values != num_used:
        reason = f"the file has {component.num_values:,} values, the {role} uses {num_used:,}"
        raise _mismatch_error(job, role, reason)


def _mismatch_error(job: ConversionJob, role: str, reason: str) -> ModelError:
    return ModelError(
        f"the file's {role} does not match the configuration of the model in --like: {reason}",
        where=f"{job.file}, {job.reference / role / 'config.json'}",
        fix="name the model that the file was made from in --like",
    )
