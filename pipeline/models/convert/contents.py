"""What a single file holds: a model's layout, which of its components, and in which number formats."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pipeline.errors import ModelError
from pipeline.models.convert.foreign import is_packed, refuse_adapter, refuse_packed, refuse_unknown
from pipeline.models.convert.header import Header, Tensor, read_header
from pipeline.models.convert.layouts import SD2_LIKE, Layout, find_layout

_DTYPES = MappingProxyType({"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"})

_UNET_INPUT = "input_blocks.0.0.weight"
_FLUX_INPUT = "img_in.weight"
_SD2_TEXT_WIDTH = 1024
_REFINER_MARK = "conditioner.embedders.0.model.text_projection"
_EDM_MARKS = ("edm_mean", "edm_vpred.sigma_max")


@dataclass(frozen=True)
class Part:
    """A component that the file holds.

    Attributes:
        prefix: Of its tensors' names in the file.
        dtype: The widest of its number formats, as torch names it: nothing is lost in it.
        others: Its narrower ones.
    """

    prefix: str
    dtype: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contents:
    """What is in a file.

    Attributes:
        header: Of the file.
        layout: Of its denoiser.
        denoiser: The denoiser.
        parts: Components beside it, by name.
        left: Prefixes of what the file holds beside and is not taken.
        like: Hub id of the model that such a file is usually made from.
    """

    header: Header
    layout: Layout
    denoiser: Part
    parts: Mapping[str, Part]
    left: tuple[str, ...]
    like: str


def read_contents(file: Path) -> Contents:
    """What can be taken from the file, by its header alone.

    Raises:
        ModelError: It is none that can be converted; the text says what it is.
    """
    header = read_header(file)
    refuse_adapter(header)
    found = find_layout(header)
    if found is None:
        raise refuse_unknown(header)
    layout, prefix = found
    refuse_packed(header, prefix)
    _refuse_variant(header, layout, prefix)
    parts = {role: part for role, places in layout.parts.items() if (part := _part(header, places))}
    taken = (prefix, *(part.prefix for part in parts.values()))
    return Contents(
        header,
        layout,
        Part(prefix, *_dtypes(header.below(prefix), {prefix + name for name in layout.unused})),
        parts,
        _left(header, taken) if prefix else (),
        _like(header, layout, prefix),
    )


def _part(header: Header, places: Iterable[tuple[str, str]]) -> Part | None:
    """The component at the first place where it is; None where it is at none, or packed.

    Raises:
        ModelError: Something lies there, in a layout that diffusers does not read.
    """
    for prefix, mark in places:
        if prefix + mark in header.tensors:
            tensors = header.below(prefix)
            if any(is_packed(each.dtype) for each in tensors.values()):
                return None
            return Part(prefix, *_dtypes(tensors))
    for prefix in {
        prefix for prefix, _ in places if prefix.startswith(("cond_stage_model.", "conditioner."))
    }:
        if found := header.below(prefix):
            raise ModelError(
                "the file holds a text encoder in a layout that diffusers does not read",
                where=f"{header.file}, {min(found)}",
                fix="take a file of this model as it was published, or a diffusers folder",
            )
    return None


def _dtypes(tensors: Mapping[str, Tensor], unused: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    """(the format that holds all values of floating-point tensors, the others among them).

    Single numbers beside the weights, such as CLIP's temperature, and marks of no values do not count.
    """
    weights = [each for name, each in tensors.items() if name not in unused and each.shape not in ((), (0,))]
    met = {_DTYPES[each.dtype] for each in weights if each.dtype in _DTYPES}
    narrow = met - {"float32", "float64"}
    widest = max(met - narrow, default="float32" if len(narrow) != 1 else min(narrow))
    return widest, tuple(sorted(met - {widest}))


def _left(header: Header, taken: tuple[str, ...]) -> tuple[str, ...]:
    """First parts of names that are below none of the prefixes taken, of more than a few tensors."""
    counts: dict[str, int] = {}
    for name in header.names:
        if not name.startswith(taken):
            first = ".".join(
                name.split(".")[: 2 if name.startswith(("text_encoders.", "conditioner.")) else 1]
            )
            counts[first] = counts.get(first, 0) + 1
    return tuple(name for name, count in counts.items() if count > 3)


def _like(header: Header, layout: Layout, prefix: str) -> str:
    if layout.name != "Stable Diffusion 1.x":
        return layout.like
    keys = [
        tensor.shape[-1]
        for name, tensor in header.below(f"{prefix}input_blocks.").items()
        if name.endswith("attn2.to_k.weight")
    ]
    return SD2_LIKE if _SD2_TEXT_WIDTH in keys else layout.like


def _refuse_variant(header: Header, layout: Layout, prefix: str) -> None:
    """Nothing, where the denoiser does what a LoRA is trained for here.

    Raises:
        ModelError: It fills in, edits, refines, or has EDM's noise schedule.
    """
    what = None
    unet, flux = (header.tensors.get(prefix + name) for name in (_UNET_INPUT, _FLUX_INPUT))
    if unet is not None and unet.shape[1] in (8, 9):
        what = "a model that fills in or edits pictures (inpainting): its UNet sees more than noise and text"
    elif flux is not None and flux.shape[1] in (128, 384) and layout.family == "FLUX.1":
        what = "FLUX.1 Fill, Canny or Depth, whose transformer sees more than noise and text"
    elif _REFINER_MARK in header.tensors:
        what = "Stable Diffusion XL's refiner, which is no model of its own"
    elif any(mark in header.tensors for mark in _EDM_MARKS):
        what = "a model with EDM's noise schedule, such as Playground 2.5, which cannot be trained here"
    if what is not None:
        fix = "name the base model that draws from text alone"
        raise ModelError(f"that is {what}", where=str(header.file), fix=fix)
