"""LoRA files: their names, the keys and shapes of each layout, and reading them without torch.

A module's adapter adds (alpha / rank) * up @ down to its weight. For a linear layer `down` is (rank, in) and
`up` is (out, rank). For a convolution they are (rank, in, height, width) and (out, rank, 1, 1), multiplied as
matrices of (rank, in * height * width) and (out, rank). With DoRA (https://arxiv.org/abs/2402.09353) each row
of the adapted weight is then divided by its norm and multiplied by a trained magnitude.

    layout     down                                up                                  alpha
    diffusers  <denoiser>.<module>.lora_A.weight   <denoiser>.<module>.lora_B.weight   in the file's metadata
    kohya      <kohya key>.lora_down.weight        <kohya key>.lora_up.weight          <kohya key>.alpha
    comfyui    <comfyui key>.lora_down.weight      <comfyui key>.lora_up.weight        <comfyui key>.alpha

DoRA magnitudes are <denoiser>.<module>.lora_magnitude_vector in the diffusers layout, as in peft, and
<key>.dora_scale (out, 1) otherwise. ComfyUI divides a row by its norm in the base model instead of the
adapted one (`weight_decompose` in comfy/weight_adapter/base.py). Its file therefore stores each magnitude
multiplied by the base norm over the adapted norm, which gives the same weights.

<denoiser> is unet or transformer. Text encoder adapters are stored in the same files: in the diffusers layout
their prefix is text_encoder or text_encoder_2, in kohya's lora_te_, lora_te1_ or lora_te2_, and in ComfyUI's
text_encoders (the generic keys of `model_lora_keys_clip`).

Kohya's layout follows the models' original code, where several diffusers modules may be parts of one layer,
such as query, key and value. The layer's down matrix (sum of ranks, in) stacks those of its parts. Its up
matrix (sum of outs, sum of ranks) is block diagonal. Its alpha / rank is theirs, which must be one number. A
part that was not trained has zero blocks of the others' rank, or of rank 0 if their ranks differ. The same
applies to ComfyUI where its key equals kohya's.

diffusers does not use every alpha: it takes one for a whole UNet in kohya's layout, and alpha = rank for
FLUX.1 in ComfyUI's. So the separate layers in a file of kohya's layout have the alpha of the first one, and
ComfyUI's file has alpha = rank. `folded` moves the rest of the scale into the factors.

OFT (https://arxiv.org/abs/2306.07280) rotates a layer's inputs, and has one tensor per module in two layouts:

    diffusers  <denoiser>.<module>.oft_R.weight   peft reads it, with its configuration in the metadata
    comfyui    <comfyui key>.oft_R.weight         ComfyUI reads it with github.com/Koratahiu/ComfyUI-OFTv2

The tensor has a row for each block of inputs, with the numbers above the diagonal of a skew-symmetric matrix
Q. The layer gets x R instead of x, where a block of R is I + 2 Q + 2 Q^2 + 2 Q^3 + Q^4, the first terms of
(I + Q) (I - Q)^-1 (`OFTRotationModule` in peft/tuners/oft/layer.py). ComfyUI alone, LyCORIS and sd-scripts
read another OFT, which rotates a layer's outputs (`oft_blocks`).

ComfyUI accepts any weight of its own model by name, without ".weight" (the generic keys of
`model_lora_keys_unet` in comfy/lora.py of github.com/comfyanonymous/ComfyUI), and scales by alpha / rank
(`LoRAAdapter.calculate_weight` in comfy/weight_adapter/lora.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pipeline.errors import TrainingError
from pipeline.storage.regular_files import open_regular

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pipeline.recipe import LoraSettings, Recipe

Layout = Literal["diffusers", "kohya", "comfyui"]

LAYOUTS: tuple[Layout, ...] = ("diffusers", "kohya", "comfyui")

ROTATION_LAYOUTS: tuple[Layout, ...] = ("diffusers", "comfyui")
"""Layouts of OFT. No program reads it under kohya's names, and kohya's layers that join query, key and value
have one input, which cannot have three rotations."""

NATIVE_MATRICES = (
    *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    *("lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
)
"""Endings of the matrices of LoHa and LoKr in their own format, as in peft."""

ROTATION = ".oft_R.weight"
"""Ending of the keys of OFT's rotations, in any layout and under peft's names."""

ADAPTER_METADATA_KEY = "lora_adapter_metadata"
"""Key in a file's metadata under which diffusers stores peft's configuration as JSON."""

PROVENANCE_KEY = "latentline.provenance"
"""Key in a file's metadata of the provenance record as JSON, without the results of the run."""

RUN_KEY = "latentline.run"
"""Key in a file's metadata of the run that trained it; files of other programs lack it."""

LORA_FOLDER = "lora"
"""Folder in output_dir with the files of the last finished run."""

PROVENANCE_FILE = "provenance.json"
"""Published with the LoRA files: the run that trained them and its inputs."""

SAMPLES_FILE = "samples.parquet"
"""Published with the LoRA files: the table of the samples they were trained on."""

SHEET_FILE = "samples.jpg"
"""Published with the LoRA files if there are any: the previews of the run on one sheet."""

CARD_FILE = "README.md"
"""Published with the LoRA files: the model card."""


def lora_file(path: Path) -> Path:
    """Return the LoRA file at `path`: the file itself, or the diffusers one in that folder or its `lora/`."""
    if not path.is_dir():
        return path
    name = layout_file("diffusers", "")
    in_lora_folder = path / LORA_FOLDER / name
    return in_lora_folder if in_lora_folder.is_file() and not (path / name).is_file() else path / name


def read_provenance(path: Path) -> dict[str, Any]:
    """Return the provenance record of the LoRA file at `path`, found as in `lora_file`.

    Raises:
        TrainingError: The file is not a LoRA file, was not trained with Latentline, or its record is damaged.
    """
    from safetensors import SafetensorError, safe_open

    file = lora_file(path)
    try:
        # safetensors would wait for the writer of a FIFO.
        open_regular(file).close()
        with safe_open(file, framework="np") as opened:
            text = (opened.metadata() or {}).get(PROVENANCE_KEY)
    except (OSError, SafetensorError) as err:
        raise TrainingError(
            f"the LoRA file cannot be read: {err}",
            where=str(file),
            fix="pass a .safetensors file, or the output folder of a trained recipe",
        ) from err
    if text is None:
        raise TrainingError(
            "the file lacks a provenance record",
            where=str(file),
            fix="pass a LoRA file that was trained with Latentline; other files lack the record",
        )
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as err:  # RecursionError: deep nesting such as [[[[...
        raise damaged_record_error(file, err) from err
    if not isinstance(record, dict):
        raise damaged_record_error(file, TypeError("it must be a JSON object"))
    return cast("dict[str, Any]", record)


def damaged_record_error(file: Path, err: Exception) -> TrainingError:
    """Return the error for a provenance record without the content that Latentline writes."""
    return TrainingError(
        f"the provenance record is damaged: {type(err).__name__}: {err}"[:500],
        where=str(file),
        fix="use the LoRA file as Latentline wrote it: the record was changed or cut off",
    )


def layout_file(layout: Layout, recipe_name: str) -> str:
    """Return the file's name in `lora/`; `load_lora_weights` finds the diffusers one by default."""
    if layout == "diffusers":
        return "pytorch_lora_weights.safetensors"
    return f"{recipe_name}_{layout}.safetensors"


def native_file_name(recipe_name: str) -> str:
    """Return the name of the file with a LoHa or LoKr in its own format."""
    return f"{recipe_name}_lycoris.safetensors"


def layouts_of(lora: LoraSettings) -> tuple[Layout, ...]:
    """Return the layouts of the files that a run with these settings exports."""
    return ROTATION_LAYOUTS if lora.kind == "oft" else LAYOUTS


def lora_file_names(recipe: Recipe) -> list[str]:
    """Return the names of the files that a run of the recipe exports, in the order of their layouts."""
    names = [layout_file(layout, recipe.name) for layout in layouts_of(recipe.training.lora)]
    return [*names, *([native_file_name(recipe.name)] if recipe.training.lora.native_file else [])]


@dataclass(frozen=True)
class LoraModule:
    """One module with an adapter; `diffusers`, `kohya` and `comfyui` are its keys without a matrix's ending.

    Attributes:
        name: Dotted path in the diffusers denoiser, or a text encoder's component name and the dotted path in
            its transformers model.
        in_features: Columns of `down`.
        out_features: Rows of `up`.
        rank: Rows of `down`; of a rotation, its number of blocks.
        alpha: Numerator of the module's scale, alpha / rank.
        kernel: (height, width) of a convolution; empty for a linear layer.
        magnitude: Whether the adapter has DoRA magnitudes.
        rotation: Whether the adapter is a rotation of the inputs (OFT), which has one tensor.
        kohya_part: Index of the module among the parts of its layer in kohya's layout.
        kohya_outs: Rows of each part's `up` in that layer; empty if the module is the entire layer.
        kohya_ranks: Rows of each part's `down` in that layer; empty if all have `rank` rows.
    """

    name: str
    diffusers: str
    kohya: str
    comfyui: str
    in_features: int
    out_features: int
    rank: int
    alpha: float
    kernel: tuple[int, ...] = ()
    magnitude: bool = False
    kohya_part: int = 0
    kohya_outs: tuple[int, ...] = ()
    kohya_ranks: tuple[int, ...] = ()
    rotation: bool = False

    @property
    def is_convolution(self) -> bool:
        """Whether the module is a convolution with a kernel larger than 1x1."""
        return max(self.kernel, default=1) > 1

    def keys(self, layout: Layout) -> tuple[str, str, str | None]:
        """Return the keys of (down, up, alpha); the diffusers layout has no alpha tensor."""
        key = self.key(layout)
        if layout == "diffusers":
            return f"{key}.lora_A.weight", f"{key}.lora_B.weight", None
        return f"{key}.lora_down.weight", f"{key}.lora_up.weight", f"{key}.alpha"

    def magnitude_key(self, layout: Layout) -> str:
        """Return the key of the DoRA magnitudes."""
        suffix = "lora_magnitude_vector" if layout == "diffusers" else "dora_scale"
        return f"{self.key(layout)}.{suffix}"

    def rotation_key(self, layout: Layout) -> str:
        """Return the key of the rotation."""
        return f"{self.key(layout)}{ROTATION}"

    def shapes(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        """Return key to shape of each tensor of the module, or of the layer that contains it."""
        if self.rotation:
            # A block's numbers are those above the diagonal of a skew-symmetric matrix.
            size = self.in_features // self.rank
            return {self.rotation_key(layout): (self.rank, size * (size - 1) // 2)}

        down, up, alpha = self.keys(layout)
        outs, rank = self.outs(layout), sum(self.ranks(layout))
        ones = (1,) * len(self.kernel)
        shapes: dict[str, tuple[int, ...]] = {
            down: (rank, self.in_features, *self.kernel),
            up: (sum(outs), rank, *ones),
        }

        if alpha is not None:
            shapes[alpha] = ()
        if self.magnitude and layout == "diffusers":
            shapes[self.magnitude_key(layout)] = (1, sum(outs), *ones) if ones else (sum(outs),)
        elif self.magnitude:
            shapes[self.magnitude_key(layout)] = (sum(outs), 1, *ones)
        return shapes

    def slices(self, layout: Layout) -> tuple[slice, slice]:
        """Return the module's rows in the file's `down` and `up`; rows of `down` are also columns of `up`."""
        outs = self.outs(layout)
        part = self.kohya_part if len(outs) > 1 else 0
        first_rank, first_out = sum(self.ranks(layout)[:part]), sum(outs[:part])
        return slice(first_rank, first_rank + self.rank), slice(first_out, first_out + outs[part])

    def outs(self, layout: Layout) -> tuple[int, ...]:
        """Return the rows of each part's `up` in the layer that contains the module."""
        is_part = layout != "diffusers" and self.key(layout) == self.kohya
        return (self.kohya_outs if is_part else ()) or (self.out_features,)

    def ranks(self, layout: Layout) -> tuple[int, ...]:
        """Return the rows of each part's `down` in the layer that contains the module."""
        outs = self.outs(layout)
        return (self.kohya_ranks if len(outs) > 1 else ()) or (self.rank,) * len(outs)

    def key(self, layout: Layout) -> str:
        """Return the key of the module or of the layer that contains it, without a tensor's ending."""
        return {"diffusers": self.diffusers, "kohya": self.kohya, "comfyui": self.comfyui}[layout]

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LoraModule:
        """Rebuild the module from its `dataclasses.asdict`, after a round trip through JSON."""
        module = LoraModule(**value)
        return replace(
            module,
            kernel=tuple(module.kernel),
            kohya_outs=tuple(module.kohya_outs),
            kohya_ranks=tuple(module.kohya_ranks),
        )


@dataclass(frozen=True)
class LoraFile:
    """Contents of a LoRA file.

    Attributes:
        header_bytes: Number of bytes before the tensors: the header and its length field.
        tensors: Tensors by key, as float32 whatever the file's dtype is.
    """

    path: Path
    num_bytes: int
    header_bytes: int
    metadata: dict[str, str]
    tensors: dict[str, npt.NDArray[np.float32]]


def read_lora_file(path: Path) -> LoraFile:
    """Read a LoRA file completely, without torch."""
    from safetensors import SafetensorError, safe_open

    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            # The format begins with the length of the header, in 8 bytes.
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
        with safe_open(path, framework="np") as opened:
            metadata = dict(opened.metadata() or {})
            dtypes = {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118 - not a dict
        tensors = _read_bfloat16(path) if "BF16" in dtypes else _read_numpy(path)
    except (OSError, SafetensorError, ValueError, KeyError) as err:
        raise TrainingError(
            f"the LoRA file cannot be read: {err}",
            where=str(path),
            fix="delete the file and start the job again",
        ) from err
    return LoraFile(path, num_bytes, header_bytes, metadata, tensors)


def _read_numpy(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    import numpy as np
    from safetensors.numpy import load_file

    return {key: tensor.astype(np.float32, copy=False) for key, tensor in load_file(path).items()}


def _read_bfloat16(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    import numpy as np
    from safetensors import deserialize

    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for key, stored in deserialize(path.read_bytes()):
        if stored["dtype"] == "BF16":
            # A bfloat16 is the upper half of a float32.
            bits = np.frombuffer(stored["data"], np.uint16).astype(np.uint32) << 16
            values = bits.view(np.float32)
        else:
            # Another dtype raises KeyError, and the caller reports the file as unreadable.
            dtype = {"F16": np.float16, "F32": np.float32}[stored["dtype"]]
            values = np.frombuffer(stored["data"], dtype).astype(np.float32)
        tensors[key] = values.reshape(stored["shape"])
    return tensors


def is_factor(key: str) -> bool:
    """Return whether a key, in any layout, names a matrix of a LoRA, LoHa or LoKr, or a rotation."""
    endings = (".lora_A.weight", ".lora_B.weight", ".lora_down.weight", ".lora_up.weight", ROTATION)
    return key.endswith(endings) or key.rpartition(".")[2] in NATIVE_MATRICES


def is_magnitude(key: str) -> bool:
    """Return whether a key, in any layout, names the magnitudes of a DoRA."""
    return key.endswith((".lora_magnitude_vector", ".dora_scale"))


def factors(tensors: Mapping[str, Any], module: LoraModule, layout: Layout) -> tuple[Any, Any]:
    """Return one module's (down, up), of the type in `tensors`; KeyError if one is missing."""
    down, up, _ = module.keys(layout)
    ranks, outs = module.slices(layout)
    return tensors[down][ranks], tensors[up][outs, ranks]


def folded(down: Any, up: Any, factor: float) -> tuple[Any, Any]:
    """Return (down, up) with a product that is `factor` times as large."""
    # The numbers of `down` are the larger ones, so they are the last to underflow in float16.
    return (down * factor, up) if factor < 1.0 else (down, up * factor)


def unfolded(down: Any, up: Any, factor: float) -> tuple[Any, Any]:
    """Undo `folded` with the factor 1 / `factor`."""
    return (down * factor, up) if factor > 1.0 else (down, up * factor)


def stored_alphas(modules: Sequence[LoraModule], layout: Layout) -> dict[str, float]:
    """Return the alpha of each module in a file, by name, for the rank of the module alone."""
    if layout == "comfyui":
        return {module.name: float(module.rank) for module in modules}
    alphas: dict[str, float] = {}
    first: dict[str, float] = {}
    for module in modules:
        # Readers that take one alpha for a network do not know fused layers.
        is_separate = layout == "kohya" and not module.kohya_outs
        network = module.diffusers.partition(".")[0]
        alphas[module.name] = first.setdefault(network, module.alpha) if is_separate else module.alpha
    return alphas


def stored_magnitudes(tensors: Mapping[str, Any], module: LoraModule, layout: Layout) -> Any:
    """Return one module's DoRA magnitudes (out,) as the layout stores them; KeyError if they are missing."""
    _, outs = module.slices(layout)
    return tensors[module.magnitude_key(layout)].reshape(-1)[outs]


def _of_pattern(values: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    for pattern, value in (values or {}).items():
        # As peft does: the first pattern that matches the end of the path decides.
        if _compiled(pattern).match(path):
            return value
    return default


@lru_cache(maxsize=10_000)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def module_scale(file: LoraFile, module: LoraModule, layout: Layout) -> float:
    """Return the module's scale, alpha / rank, as a reader of the file computes it.

    Raises:
        TrainingError: The file lacks alpha or rank.
    """
    down_key, _, alpha_key = module.keys(layout)
    if alpha_key is None:
        return peft_scale(file, module.diffusers)
    try:
        return float(file.tensors[alpha_key]) / file.tensors[down_key].shape[0]
    except (KeyError, ValueError, TypeError) as err:
        raise _without_scale(file, module.name, err) from err


def peft_scale(file: LoraFile, key: str) -> float:
    """Return a module's scale from peft's configuration in a file of the diffusers layout.

    Args:
        file: The file, with or without such a configuration.
        key: Key of the module in the file, without a matrix's ending.

    Raises:
        TrainingError: The file lacks alpha or rank.
    """
    # The configurations of all components are one flat mapping.
    component, _, path = key.partition(".")
    prefix = f"{component}."
    try:
        adapter = json.loads(file.metadata[ADAPTER_METADATA_KEY])
        own = {key.removeprefix(prefix): value for key, value in adapter.items() if key.startswith(prefix)}
        rank = int(_of_pattern(own.get("rank_pattern"), path, own["r"]))
        alpha = float(_of_pattern(own.get("alpha_pattern"), path, own["lora_alpha"]))
    except (KeyError, ValueError, TypeError, AttributeError, re.error) as err:
        raise _without_scale(file, key, err) from err
    # rsLoRA: https://arxiv.org/abs/2312.03732
    return alpha / math.sqrt(rank) if own.get("use_rslora") else alpha / rank


def _without_scale(file: LoraFile, name: str, err: Exception) -> TrainingError:
    return TrainingError(
        f"the file lacks alpha or rank of {name}: {err}",
        where=str(file.path),
        fix="if the file is in lora/, delete it and start the job again; otherwise use another file",
    )
