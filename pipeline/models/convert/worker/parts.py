"""Components of a single file, read by diffusers and saved as a diffusers folder has them; needs torch."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeline.errors import ModelError
from pipeline.models.convert.job import Order, PartOrder
from pipeline.models.convert.like import family_in, is_component
from pipeline.models.worker.loading import component_class, pipeline_class

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.families import Family

_UNET_PREFIX = "model.diffusion_model."
"""Without it diffusers does not know a UNet's names; a transformer's it knows without any."""


def convert_parts(order: Order, progress: Callable[[int, int, str], None]) -> None:
    """Write each component that the order names, one after the other, so that one at a time is in memory.

    Its configuration is that of the model it is made like, byte for byte.

    Args:
        order: What to write, and where.
        progress: Is told how many are done, of how many, and which comes next.

    Raises:
        ModelError: A component is not of the shape that the configuration says, or lacks weights.
    """
    family = family_in(order.like)
    for done, (role, part) in enumerate(order.parts.items()):
        progress(done, len(order.parts), role)
        network = _read(order, family, role, part)
        _require_whole(network, order, role, part)
        target = order.folder / role
        network.save_pretrained(target)
        shutil.copyfile(order.like / role / "config.json", target / "config.json")
        del network
        gc.collect()
    progress(len(order.parts), len(order.parts), "components")


def _read(order: Order, family: Family, role: str, part: PartOrder) -> Any:
    import torch
    from diffusers.loaders.single_file_utils import SingleFileComponentError

    dtype = getattr(torch, part.dtype)
    common: dict[str, Any] = {"config": str(order.like), "local_files_only": True, "dtype": dtype}
    try:
        if part.how == "text_encoder":
            others = {name: None for name, said in family.index.items() if is_component(said)}
            del others[role]
            pipeline = pipeline_class(family).from_single_file(str(order.file), **common, **others)
            return getattr(pipeline, role)
        return component_class(family, role).from_single_file(_tensors(order, part), subfolder=role, **common)
    except NotImplementedError as err:  # of torch, when weights that no tensor was found for are converted
        raise _misfit(order, role, "the file lacks some of the weights") from err
    except (ValueError, KeyError, IndexError, RuntimeError, SingleFileComponentError) as err:
        reason = str(err).strip().splitlines() or [type(err).__name__]
        raise _misfit(order, role, f"diffusers says: {reason[0]}") from err


def _tensors(order: Order, part: PartOrder) -> dict[str, Tensor]:
    """The component's tensors, as diffusers' function for it wants them named; read when they are used."""
    from safetensors import safe_open

    with safe_open(order.file, framework="pt") as opened:
        names = [name for name in opened.keys() if name.startswith(part.prefix)]  # noqa: SIM118 - no mapping
        if part.how == "vae":
            return {name: opened.get_tensor(name) for name in names}
        bare = {name.removeprefix(part.prefix): opened.get_tensor(name) for name in names}
    before = _UNET_PREFIX if "input_blocks.0.0.weight" in bare else ""
    return {before + name: tensor for name, tensor in bare.items()}


def _require_whole(network: Any, order: Order, role: str, part: PartOrder) -> None:
    """Nothing, when the network got all its weights, and all of the file's found a place in it.

    Raises:
        ModelError: Some did not.
    """
    if hasattr(network, "tie_weights"):  # transformers' networks
        network.tie_weights()
    state: dict[str, Tensor] = network.state_dict()
    empty = [name for name, tensor in state.items() if tensor.is_meta]
    if empty:
        raise _misfit(order, role, f"the file has no weights for {', '.join(empty[:3])}")
    taken = sum(tensor.numel() for tensor in state.values())
    if part.num_values is not None and part.num_values != taken:
        raise _misfit(order, role, f"the file has {part.num_values:,} values, and the {role} takes {taken:,}")


def _misfit(order: Order, role: str, reason: str) -> ModelError:
    return ModelError(
        f"the file's {role} is not of the architecture that --like's configuration says: {reason}",
        where=f"{order.file}, {order.like / role / 'config.json'}",
        fix="name in --like the model that the file was made from",
    )
