"""The LoRA file in `training.lora.start_from`, checked without torch before anything is encoded.

The trainer later compares every tensor with the adapter (`worker/adapter/warm_start.py`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.errors import TrainingError, counted
from pipeline.models.size_multiple import local_family
from pipeline.recipe.isolation import START_KEY
from pipeline.recipe.settings import one_of
from pipeline.trained_lora.export.lora_files import LAYOUTS, Layout, is_magnitude, layout_file, lora_file
from pipeline.trained_lora.run_folder import ADAPTER_FILE, OPTIMIZER_FILE

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import LoraSettings, Recipe

MAX_PARTS = 4
"""Maximum number of modules that one layer of kohya's or ComfyUI's layout combines, in any family."""

_DOWN_KEYS: Mapping[Layout, re.Pattern[str]] = {
    "diffusers": re.compile(
        r"(?P<network>unet|transformer|text_encoder(_\d)?)\.(?P<path>.+)\.lora_A\.weight"
    ),
    "kohya": re.compile(r"lora_(?P<network>unet|te\d?)_(?P<path>.+)\.lora_down\.weight"),
    "comfyui": re.compile(r"(?P<network>text_encoders|\w+)\.(?P<path>.+)\.lora_down\.weight"),
}
"""Keys of down matrices by layout."""

_UP_ENDINGS = {".lora_A.weight": ".lora_B.weight", ".lora_down.weight": ".lora_up.weight"}


_OTHER_KINDS = {
    ".hada_w1_a": "LoHa",
    ".lokr_w1": "LoKr",
    ".lokr_w1_a": "LoKr",
    ".oft_diag": "OFT",
    ".oft_blocks": "OFT",
    ".oft_R.weight": "OFT",
}
"""Kinds of adapters that are not a LoRA, by an ending of their keys."""

_NUMPY_DTYPES = frozenset(["F16", "F32", "F64"])
"""Float dtypes of safetensors files that NumPy has too."""


class _Difference(NamedTuple):
    what: str
    fix: str


@dataclass(frozen=True)
class _Module:
    """One down matrix of the file, of shape (rank, in) or (rank, in, height, width).

    The path is a dotted path of diffusers only in the diffusers layout.
    """

    network: str
    path: str
    shape: tuple[int, ...]

    @property
    def is_text(self) -> bool:
        # "te", "te1" and "te2" in kohya's layout, "text_encoder" or "text_encoders" in the layouts of
        # diffusers and ComfyUI.
        return self.network.startswith("te")

    @property
    def is_convolution(self) -> bool:
        # A convolution over one pixel is a linear layer, and the recipe counts it as one.
        return max(self.shape[2:], default=1) > 1


@dataclass(frozen=True)
class _Contents:
    """Contents of a LoRA file; `modules` lacks the ones that are zero."""

    layout: Layout
    modules: list[_Module]
    dora: bool


def require_start_file(recipe: Recipe) -> None:
    """Raise TrainingError unless the recipe's `start_from` is null or a LoRA file of its kind and ranks.

    The base model is examined only if it is in a local folder.
    """
    path, lora = recipe.training.lora.start_from, recipe.training.lora
    if path is None:
        return

    where = f"{recipe.source}, {START_KEY}: {path}"
    _require_file(path, where)
    _require_no_checkpoint_state(path, where)
    contents = _read(path, where)
    family = local_family(recipe)
    differences = [*_kind_differences(contents, lora, family), *_rank_differences(contents, lora, family)]
    if differences:
        what = "; ".join(each.what for each in differences)
        fix = "\n".join(dict.fromkeys(each.fix for each in differences))
        raise TrainingError(f"the LoRA to start from does not match the recipe: {what}", where=where, fix=fix)


def _require_file(path: Path, where: str) -> None:
    if path.is_dir():
        file = lora_file(path)
        name = file if file.is_file() else f"a .safetensors file, such as {layout_file('diffusers', '')}"
        raise TrainingError(
            "the LoRA to start from is a folder", where=where, fix=f"set {START_KEY} to {name}"
        )
    if path.exists():
        return

    names = [each.name for each in path.parent.glob("*.safetensors")] if path.parent.is_dir() else []
    closest = difflib.get_close_matches(path.name, names, n=1)
    fix = f"set {START_KEY} to an existing LoRA file, relative to the project root"
    if closest:
        fix = f"did you mean {path.with_name(closest[0])}?"
    raise TrainingError("the LoRA to start from does not exist", where=where, fix=fix)


def _require_no_checkpoint_state(path: Path, where: str) -> None:
    # The keys of the state differ from the keys of the LoRA files next to it.
    if path.name != ADAPTER_FILE or not path.with_name(OPTIMIZER_FILE).exists():
        return

    file = lora_file(path.parent)
    if file.is_file():
        fix = f"set {START_KEY} to {file}"
    else:
        fix = (
            "use the LoRA that the run has published; checkpoints of Latentline 0.2 and earlier contain none"
        )
    raise TrainingError(
        "the file to start from is the resume state of a run, not a LoRA", where=where, fix=fix
    )


def _read(path: Path, where: str) -> _Contents:
    from safetensors import SafetensorError, safe_open

    try:
        # Only the header is read, and the few matrices that may be zero.
        with safe_open(path, framework="np") as opened:
            keys = list(opened.keys())
            shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in keys}
            layout = _layout_of(shapes, where)
            matches = {key: match for key in shapes if (match := _DOWN_KEYS[layout].fullmatch(key))}
            _require_matrices({key: shapes[key] for key in matches}, where)
            modules = [
                _Module(match["network"], match["path"], shapes[key])
                for key, match in matches.items()
                if (up := _up_key(key)) not in shapes or not _is_zero(opened, up)
            ]
    except (OSError, SafetensorError) as err:
        raise TrainingError(
            f"the LoRA to start from cannot be read: {err}",
            where=where,
            fix=f"set {START_KEY} to a complete .safetensors file of a LoRA, and make sure that your user "
            "may read it",
        ) from err
    return _Contents(layout, modules, dora=any(is_magnitude(key) for key in shapes))


def _require_matrices(shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    for key, shape in shapes.items():
        if len(shape) < 2:
            what = f"the tensor {key} of the LoRA to start from must be a matrix, got shape {list(shape)}"
            fix = f"set {START_KEY} to a LoRA file as Latentline, another trainer or diffusers writes it"
            raise TrainingError(what, where=where, fix=fix)


def _layout_of(keys: Mapping[str, Any], where: str) -> Layout:
    """Return the layout with the most down matrices, or raise TrainingError if the file has none."""
    counts = {layout: sum(map(bool, map(down.fullmatch, keys))) for layout, down in _DOWN_KEYS.items()}
    layout = max(LAYOUTS, key=counts.__getitem__)
    if counts[layout]:
        return layout

    kinds = sorted(
        {kind for ending, kind in _OTHER_KINDS.items() if any(key.endswith(ending) for key in keys)}
    )
    if kinds:
        what = f"the file to start from is a {one_of(kinds)}, but only a LoRA can be continued"
    else:
        example = f"; its first tensor is {min(keys)}" if keys else ""
        what = f"the file to start from has no LoRA under the names of diffusers, kohya or ComfyUI{example}"
    fix = f"set {START_KEY} to a LoRA file such as {layout_file('diffusers', '')}, in one of these layouts"
    raise TrainingError(what, where=where, fix=fix)


def _up_key(down_key: str) -> str:
    ending = next(ending for ending in _UP_ENDINGS if down_key.endswith(ending))
    return down_key.removesuffix(ending) + _UP_ENDINGS[ending]


def _is_zero(opened: Any, key: str) -> bool:
    # kohya's tools write zeros for the layers of a text encoder that the embeddings do not depend on.
    if not key.startswith(("lora_te", "text_encoder")):
        return False
    # Matrices in dtypes that NumPy lacks cannot be read here, and count as different from zero.
    return opened.get_slice(key).get_dtype() in _NUMPY_DTYPES and not opened.get_tensor(key).any()


def _kind_differences(
    contents: _Contents, lora: LoraSettings, family: Family | None
) -> Iterator[_Difference]:
    if contents.dora != lora.dora:
        held = "is a DoRA" if contents.dora else "is not a DoRA"
        wanted = str(contents.dora).lower()
        yield _Difference(f"it {held}", f"set training.lora.dora: {wanted}, or use another file")

    has_text = any(module.is_text for module in contents.modules)
    if has_text and lora.text_encoders is None:
        fix = "set training.lora.text_encoders: {}, or use a file without text encoders"
        yield _Difference("it also adapts text encoders", fix)
    if not has_text and lora.text_encoders is not None:
        fix = "remove training.lora.text_encoders, or use a file with text encoders"
        yield _Difference("it adapts no text encoder", fix)

    has_convolution = any(module.is_convolution for module in contents.modules)
    if has_convolution and lora.conv_rank is None and not lora.modules:
        rank = next(module.shape[0] for module in contents.modules if module.is_convolution)
        yield _Difference(
            "it also adapts convolutions", f"set training.lora.conv_rank: {rank}, or use another file"
        )
    if not has_convolution and lora.conv_rank is not None:
        yield _Difference("it adapts no convolution", "remove training.lora.conv_rank, or use another file")

    # Only diffusers' keys distinguish a UNet from a transformer: kohya's begin with lora_unet for both.
    networks = {module.network for module in contents.modules if not module.is_text}
    if family is not None and contents.layout == "diffusers" and networks - {family.spec.denoiser_name}:
        spec = family.spec
        what = f"it adapts a {one_of(sorted(networks))}, but {spec.name} has a {spec.denoiser_name}"
        yield _Difference(what, f"use a LoRA of {spec.name}")


def _rank_differences(
    contents: _Contents, lora: LoraSettings, family: Family | None
) -> Iterator[_Difference]:
    wrong = [module for module in contents.modules if not _has_rank(module, contents.layout, lora, family)]
    if not wrong:
        return

    ranks = sorted({module.shape[0] for module in wrong})
    shown = f"rank {one_of(ranks)}"
    expected = sorted({rank for module in wrong for rank in _ranks_of(module, contents.layout, lora)})
    subject = f"{counted(len(wrong), 'module')} of {len(contents.modules):,} have"
    if len(wrong) == len(contents.modules) and len(ranks) == 1:
        subject = "it has"
    key = "training.lora.rank, conv_rank, ranks or text_encoders.rank"
    if len(ranks) == 1 and not any(module.is_text or module.is_convolution for module in wrong):
        key = "training.lora.rank" if not lora.ranks else "training.lora.rank or ranks"
    what = f"{subject} {shown} instead of {one_of(expected)}"
    yield _Difference(what, f"set {key} to the file's rank, or use another file")


def _has_rank(module: _Module, layout: Layout, lora: LoraSettings, family: Family | None) -> bool:
    # A layer that combines several modules stacks their matrices, or has one dense matrix for all of them.
    num_parts = range(1, _max_parts(module, layout, family) + 1)
    ranks = _ranks_of(module, layout, lora)
    return any(module.shape[0] == rank * number for rank in ranks for number in num_parts)


def _ranks_of(module: _Module, layout: Layout, lora: LoraSettings) -> set[int]:
    """Return the ranks that the recipe may give to the module, exactly one in the diffusers layout."""
    if module.is_text:
        # Without trained text encoders, `_kind_differences` already reports the module, so its rank counts as
        # right.
        return {each.rank for each in [lora.of_text_encoders] if each is not None} or {module.shape[0]}
    default = lora.size_of(module.path, conv=module.is_convolution)[0]
    if layout == "diffusers":
        return {default}
    # Other layouts rename modules, so any pattern of `training.lora.ranks` may apply.
    return {default, *(each.rank for each in lora.ranks)}


def _max_parts(module: _Module, layout: Layout, family: Family | None) -> int:
    if layout == "diffusers" or module.is_text or module.is_convolution:
        return 1
    return MAX_PARTS if family is None else family.spec.lora.max_parts
