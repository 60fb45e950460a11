"""The LoRA files that a run leaves: their names, their keys in each layout, and reading them without torch.

A module's adapter adds (alpha / rank) * up @ down to its weight; `down` is (rank, in), `up` (out, rank). Of a
convolution they are (rank, in, height, width) and (out, rank, 1, 1), and their product is that of both
flattened to matrices. With DoRA (https://arxiv.org/abs/2402.09353) each row of the sum is then divided by its
length and multiplied by a trained one.

    layout       a module's down matrix, up matrix, and alpha
    diffusers    <denoiser>.<module>.lora_A.weight <denoiser>.<module>.lora_B.weight  in the file's metadata
    kohya        <kohya key>.lora_down.weight      <kohya key>.lora_up.weight         <kohya key>.alpha
    comfyui      <comfyui key>.lora_down.weight    <comfyui key>.lora_up.weight       <comfyui key>.alpha

DoRA's lengths are <denoiser>.<module>.lora_magnitude_vector in diffusers' layout, as peft keeps them, and
<key>.dora_scale (out, 1) in the two others. In ComfyUI's they are other numbers: ComfyUI divides a row by the
length that it had in the base model (`weight_decompose` in comfy/weight_adapter/base.py), so that each is
multiplied by the base row's length over the adapted row's, which comes to the same weights.

<denoiser> is unet or transformer. Adapters of text encoders are in the same files: in diffusers' layout
text_encoder or text_encoder_2 stands in the denoiser's place, kohya's keys begin with lora_te_, lora_te1_ or
lora_te2_, and ComfyUI's with text_encoders (`model_lora_keys_clip`, the generic ones).

In kohya's layout some modules are parts of one layer, as in the original code: query, key and value, say.
With n parts of rank r the layer's down matrix is theirs one below the other, (n r, in); its up matrix holds
theirs on the diagonal, (sum of outs, n r), and zeros elsewhere; its alpha is n times theirs, so that
alpha / rank stays. A part that was not trained is zeros. Where ComfyUI's key is kohya's, so is its layer.

ComfyUI takes any weight of its own model by its name without ".weight" (`model_lora_keys_unet` in
comfy/lora.py of github.com/comfyanonymous/ComfyUI, its "generic" keys), and scales by alpha / rank
(`LoRAAdapter.calculate_weight` in comfy/weight_adapter/lora.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.errors import TrainingError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Layout = Literal["diffusers", "kohya", "comfyui"]

LAYOUTS: tuple[Layout, ...] = ("diffusers", "kohya", "comfyui")

ADAPTER_METADATA_KEY = "lora_adapter_metadata"
"""Under which diffusers keeps peft's configuration in a file's metadata, as JSON."""

LORA_FOLDER = "lora"
"""In a recipe's output folder: holds the files of its last finished run."""

PROVENANCE_FILE = "provenance.json"
"""Name of the file next to the LoRA files that records which run made them, and of what."""

SAMPLES_FILE = "samples.parquet"
"""Name of the table next to the LoRA files that lists the samples they were trained on."""

PROVENANCE_KEY = "latentline.provenance"
"""Under which the same is in each file's metadata, as JSON, but for what the files themselves came to."""


def lora_file(path: Path) -> Path:
    """The LoRA that `path` names: the file itself, or diffusers' in that folder or in its `lora/`."""
    if not path.is_dir():
        return path
    name = layout_file("diffusers", "")
    inside = path / LORA_FOLDER / name
    return inside if inside.is_file() and not (path / name).is_file() else path / name


def read_provenance(path: Path) -> dict[str, Any]:
    """The record in a LoRA file, or in the folder that holds it, or in that folder's `lora/`.

    Raises:
        TrainingError: It is no LoRA file, or none of Latentline's.
    """
    from safetensors import SafetensorError, safe_open

    file = lora_file(path)
    try:
        with safe_open(file, framework="np") as opened:
            text = (opened.metadata() or {}).get(PROVENANCE_KEY)
    except (OSError, SafetensorError) as err:
        fix = "name a .safetensors file, or the output folder of a recipe that was trained"
        raise TrainingError(f"no LoRA file can be read: {err}", where=str(file), fix=fix) from err
    if text is None:
        fix = "only files that Latentline has trained say what they were made of"
        raise TrainingError("the file holds no provenance record", where=str(file), fix=fix)
    return json.loads(text)


def layout_file(layout: Layout, recipe_name: str) -> str:
    """The file's name; diffusers finds its own without being told."""
    return (
        "pytorch_lora_weights.safetensors" if layout == "diffusers" else f"{recipe_name}_{layout}.safetensors"
    )


@dataclass(frozen=True)
class LoraModule:
    """One module that has an adapter.

    Attributes:
        name: Dotted path in the diffusers denoiser; of a text encoder's, in transformers' model, after the
            component's name.
        diffusers: Key in the diffusers layout, without `.lora_A.weight`.
        kohya: Key in kohya's layout, without `.lora_down.weight`.
        comfyui: Key in ComfyUI's.
        in_features: Columns of `down`.
        out_features: Rows of `up`.
        rank: Rows of `down`.
        alpha: The module's scale is alpha / rank.
        kernel: (height, width) of a convolution; empty for a linear layer.
        magnitude: Whether it has DoRA's lengths.
        kohya_part: Which part of its layer it is in kohya's layout.
        kohya_outs: Rows of each part's `up` in that layer; empty where the module is a layer of its own.
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

    @property
    def is_convolution(self) -> bool:
        """Whether it looks at more than one pixel."""
        return max(self.kernel, default=1) > 1

    def keys(self, layout: Layout) -> tuple[str, str, str | None]:
        """(down, up, alpha) as the layout names them; no alpha in diffusers' layout."""
        if layout == "diffusers":
            return f"{self.diffusers}.lora_A.weight", f"{self.diffusers}.lora_B.weight", None
        key = self.kohya if layout == "kohya" else self.comfyui
        return f"{key}.lora_down.weight", f"{key}.lora_up.weight", f"{key}.alpha"

    def magnitude_key(self, layout: Layout) -> str:
        """The key of DoRA's lengths."""
        if layout == "diffusers":
            return f"{self.diffusers}.lora_magnitude_vector"
        return f"{self.kohya if layout == 'kohya' else self.comfyui}.dora_scale"

    def shapes(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        """Key to shape of each tensor that holds the module, or the layer that it is a part of."""
        down, up, alpha = self.keys(layout)
        outs = self._outs(layout)
        rank = self.rank * len(outs)
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

    def place(self, layout: Layout) -> tuple[slice, slice]:
        """Where the module's own factors lie: rows of the `down` in the file, and rows of the `up`.

        The first is also the columns of that `up`.
        """
        outs = self._outs(layout)
        part = self.kohya_part if len(outs) > 1 else 0
        first = sum(outs[:part])
        return slice(part * self.rank, (part + 1) * self.rank), slice(first, first + outs[part])

    def _outs(self, layout: Layout) -> tuple[int, ...]:
        key = {"kohya": self.kohya, "comfyui": self.comfyui}.get(layout)
        return (self.kohya_outs if key == self.kohya else ()) or (self.out_features,)

    def as_json(self) -> dict[str, Any]:
        """The attributes, for `from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LoraModule:
        """The inverse of `as_json`."""
        module = LoraModule(**value)
        return replace(module, kohya_outs=tuple(module.kohya_outs), kernel=tuple(module.kernel))


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file as read.

    Attributes:
        path: Where it lies.
        num_bytes: Its size.
        header_bytes: Of the header and its length: everything before the tensors.
        metadata: Of the header.
        tensors: By key.
    """

    path: Path
    num_bytes: int
    header_bytes: int
    metadata: dict[str, str]
    tensors: dict[str, npt.NDArray[np.float32]]


def read_lora_file(path: Path) -> LoraFile:
    """The whole file, without torch.

    Raises:
        TrainingError: It is missing, or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load_file

    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
        with safe_open(path, framework="np") as opened:
            metadata = dict(opened.metadata() or {})
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as err:
        fix = "delete the file and materialize trained_lora again"
        raise TrainingError(f"the LoRA file cannot be read: {err}", where=str(path), fix=fix) from err
    return LoraFile(path, num_bytes, header_bytes, metadata, tensors)


def factors(tensors: Mapping[str, Any], module: LoraModule, layout: Layout) -> tuple[Any, Any]:
    """(down, up) of one module, of as many dimensions as its weight; arrays or tensors as `tensors` has them.

    Raises:
        KeyError: One of the two is not there.
    """
    down, up, _ = module.keys(layout)
    ranks, outs = module.place(layout)
    return tensors[down][ranks], tensors[up][outs, ranks]


def lengths(tensors: Mapping[str, Any], module: LoraModule, layout: Layout) -> Any:
    """DoRA's lengths of one module's rows as the layout holds them, (out,).

    Raises:
        KeyError: They are not there.
    """
    _, outs = module.place(layout)
    return tensors[module.magnitude_key(layout)].reshape(-1)[outs]


def module_scale(file: LoraFile, module: LoraModule, layout: Layout) -> float:
    """Scale, alpha / rank, of `module` as a reader of the file would find it.

    Raises:
        TrainingError: The file does not say.
    """
    down_key, _, alpha_key = module.keys(layout)
    try:
        if alpha_key is not None:
            return float(file.tensors[alpha_key]) / file.tensors[down_key].shape[0]
        component, _, path = module.diffusers.partition(".")
        prefix = f"{component}."
        adapter = json.loads(file.metadata[ADAPTER_METADATA_KEY])
        own = {key.removeprefix(prefix): value for key, value in adapter.items() if key.startswith(prefix)}
        key = f"^{re.escape(path)}"
        rank = int((own.get("rank_pattern") or {}).get(key, own["r"]))
        alpha = float((own.get("alpha_pattern") or {}).get(key, own["lora_alpha"]))
        return alpha / math.sqrt(rank) if own.get("use_rslora") else alpha / rank
    except (KeyError, ValueError, TypeError, AttributeError) as err:
        what = f"the file does not say alpha and rank of {module.name}: {err}"
        fix = "materialize trained_lora again"
        raise TrainingError(what, where=str(file.path), fix=fix) from err
