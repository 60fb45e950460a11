"""Contents of a single file: the model's layout, its components and their dtypes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pipeline.errors import ModelError
from pipeline.models.convert.header import Header, Tensor, read_header
from pipeline.models.convert.layouts import (
    SD2_REFERENCE,
    Layout,
    find_layout,
    is_quantized,
    require_complete_model,
    require_unquantized,
    unknown_layout_error,
)

# Floating-point dtypes, safetensors name to torch name.
_DTYPES = MappingProxyType({"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"})

_UNET_INPUT = "input_blocks.0.0.weight"
_FLUX_INPUT = "img_in.weight"
_WAN_INPUT = "patch_embedding.weight"
_SD2_TEXT_WIDTH = 1024
_WAN_CHANNELS = 16
_REFINER_MARK = "conditioner.embedders.0.model.text_projection"
_EDM_MARKS = ("edm_mean", "edm_vpred.sigma_max")

# Minimum number of tensors for a group of them to be reported as ignored.
_MIN_IGNORED_TENSORS = 4


@dataclass(frozen=True)
class Part:
    """A component in the file.

    Attributes:
        prefix: Prefix of its tensors' names.
        dtype: Torch name of a dtype that holds the values of all its tensors without loss.
        others: Other dtypes among its tensors.
        without: Longer prefixes of other components.
    """

    prefix: str
    dtype: str
    others: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contents:
    """Contents of a file.

    Attributes:
        layout: Layout of its denoiser.
        parts: Components other than the denoiser, by role.
        ignored: Name prefixes of tensors that are not converted.
        reference: Hub id of the model that such a file is usually made from.
    """

    header: Header
    layout: Layout
    denoiser: Part
    parts: Mapping[str, Part]
    ignored: tuple[str, ...]
    reference: str


def read_contents(file: Path) -> Contents:
    """Return the contents of a file that can be converted, from its header.

    Raises:
        ModelError: The file cannot be converted. The message names its kind.
    """
    header = read_header(file)
    require_complete_model(header)
    match = find_layout(header)
    if match is None:
        raise unknown_layout_error(header)
    layout, prefix = match
    require_unquantized(header, prefix)
    _require_text_to_image(header, layout, prefix)

    parts = {role: part for role, places in layout.parts.items() if (part := _find_part(header, places))}
    without = tuple(part.prefix for part in parts.values() if part.prefix.startswith(prefix))
    unused = {prefix + name for name in layout.unused}
    denoiser = Part(prefix, *_dtypes(header.with_prefix(prefix, without), unused), without)
    converted = (prefix, *(part.prefix for part in parts.values()))
    # A denoiser without a prefix claims every name.
    ignored = _ignored_prefixes(header, converted) if prefix else ()
    return Contents(header, layout, denoiser, parts, ignored, _reference(header, layout, prefix))


def _find_part(header: Header, places: Iterable[tuple[str, str]]) -> Part | None:
    """Return the component at the first of its possible places; None if it is missing or quantized."""
    for prefix, mark in places:
        if prefix + mark in header.tensors:
            tensors = header.with_prefix(prefix)
            is_part_quantized = any(is_quantized(tensor.dtype) for tensor in tensors.values())
            return None if is_part_quantized else Part(prefix, *_dtypes(tensors))

    for prefix, _ in places:
        if prefix.startswith(("cond_stage_model.", "conditioner.")) and (names := header.with_prefix(prefix)):
            raise ModelError(
                "the file contains a text encoder in a layout that diffusers cannot read",
                where=f"{header.file}, {min(names)}",
                fix="convert the file that the model's author published, or set model.base to a diffusers "
                "folder of the model",
            )
    return None


def _dtypes(tensors: Mapping[str, Tensor], unused: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    # Scalars, such as CLIP's temperature, and empty tensors are not weights.
    weights = [
        tensor for name, tensor in tensors.items() if name not in unused and tensor.shape not in ((), (0,))
    ]
    dtypes = {_DTYPES[tensor.dtype] for tensor in weights if tensor.dtype in _DTYPES}

    # float16 has the finer steps and bfloat16 the larger range, so only float32 holds the values of both.
    narrow = dtypes - {"float32", "float64"}
    widest = max(dtypes - narrow, default="float32" if len(narrow) != 1 else min(narrow))
    return widest, tuple(sorted(dtypes - {widest}))


def _ignored_prefixes(header: Header, converted: tuple[str, ...]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for name in header.names:
        if not name.startswith(converted):
            depth = 2 if name.startswith(("text_encoders.", "conditioner.")) else 1
            group = ".".join(name.split(".")[:depth])
            counts[group] = counts.get(group, 0) + 1
    return tuple(group for group, count in counts.items() if count >= _MIN_IGNORED_TENSORS)


def _reference(header: Header, layout: Layout, prefix: str) -> str:
    if layout.name != "Stable Diffusion 1.x":
        return layout.reference

    # Version 2 has the same names of tensors, and wider text embeddings.
    widths = [
        tensor.shape[-1]
        for name, tensor in header.with_prefix(f"{prefix}input_blocks.").items()
        if name.endswith("attn2.to_k.weight")
    ]
    return SD2_REFERENCE if _SD2_TEXT_WIDTH in widths else layout.reference


def _require_text_to_image(header: Header, layout: Layout, prefix: str) -> None:
    # These models have the layout of a base model, and some of their inputs or their noise differ.
    unet_input, flux_input, wan_input = (
        header.tensors.get(prefix + name) for name in (_UNET_INPUT, _FLUX_INPUT, _WAN_INPUT)
    )
    model = None
    if unet_input is not None and unet_input.shape[1] in (8, 9):
        model = "an inpainting or editing model: its UNet has additional inputs"
    elif flux_input is not None and flux_input.shape[1] in (128, 384) and layout.family == "FLUX.1":
        model = "FLUX.1 Fill, Canny or Depth: its transformer has additional inputs"
    elif wan_input is not None and wan_input.shape[1] != _WAN_CHANNELS:
        model = "a Wan model that starts from an image, or the small model of Wan 2.2"
    elif _REFINER_MARK in header.tensors:
        model = "the refiner of Stable Diffusion XL"
    elif any(mark in header.tensors for mark in _EDM_MARKS):
        model = "a model with EDM's noise schedule, such as Playground 2.5"

    if model is not None:
        what = f"expected a text-to-image base model, got {model}"
        raise ModelError(what, where=str(header.file), fix="name the base model that it was made from")
