"""The files of LoHa and LoKr in their own format, which has the trained numbers instead of a larger LoRA.

    LoHa   <key>.hada_w1_a (out, rank)   .hada_w1_b (rank, in)   .hada_w2_a   .hada_w2_b   .alpha
    LoKr   <key>.lokr_w1   .lokr_w2, or .lokr_w2_a and .lokr_w2_b   .alpha

The delta weights are (w1_a @ w1_b) * (w2_a @ w2_b), element by element, and the Kronecker product of w1 and
w2 (`calculate_weight` in comfy/weight_adapter/ of github.com/comfyanonymous/ComfyUI, and lycoris/modules/ of
github.com/KohakuBlueleaf/LyCORIS). Alpha equals the rank. Text encoders have a LoRA, as in the other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.trained_lora.export.lora_files import NATIVE_MATRICES, LoraModule
from pipeline.trained_lora.worker.export.layouts import DEFECT_FIX

if TYPE_CHECKING:
    from pipeline.trained_lora.export.lora_files import Layout


def native_tensors(
    modules: list[LoraModule], state: Mapping[str, Tensor], layout: Layout
) -> dict[str, Tensor]:
    """Return the tensors of the denoiser's modules.

    `state` is the result of `adapter_state`. The keys are those of the layout "kohya" or "comfyui".
    """
    tensors: dict[str, Tensor] = {}
    for module in modules:
        key, scale = module.key(layout), module.alpha / module.rank
        own = {name: state[path] for name in NATIVE_MATRICES if (path := f"{module.name}.{name}") in state}

        # ComfyUI multiplies by alpha / rank once, LyCORIS twice (`get_diff_weight` of `LohaModule` and
        # `LokrModule`), and both not at all if w2 is one matrix. So alpha / rank is 1, and the scale is in a
        # matrix.
        first = "hada_w1_a" if "hada_w1_a" in own else "lokr_w1"
        own[first] = scale * own[first]
        rank = next((len(own[name]) for name in ("hada_w1_b", "lokr_w2_b") if name in own), 1)
        own["alpha"] = torch.tensor(float(rank))
        tensors |= {f"{key}.{name}": tensor.contiguous() for name, tensor in own.items()}
    return tensors


def require_native_file(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Raise TrainingError unless a file holds exactly these tensors, given as float32."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as err:
        raise TrainingError(f"the file cannot be read: {err}", where=str(path), fix=DEFECT_FIX) from err
    if unmatched := sorted({*tensors} ^ {*expected}):
        what = f"{unmatched[0]} is not in both the file and the adapter"
        raise TrainingError(what, where=str(path), fix=DEFECT_FIX)
    if different := [key for key, each in expected.items() if not torch.equal(tensors[key].float(), each)]:
        what = f"{different[0]} in the file differs from the trained one"
        raise TrainingError(what, where=str(path), fix=DEFECT_FIX)


def native_delta(tensors: Mapping[str, Tensor], key: str) -> Tensor:
    """Return the delta weight (out, in) of a layer, in float32; a convolution's kernel is flattened."""
    own = {
        name: each.float() for name in NATIVE_MATRICES if (each := tensors.get(f"{key}.{name}")) is not None
    }
    if "hada_w1_b" in own:
        return (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
    w2 = own["lokr_w2"].flatten(1) if "lokr_w2" in own else own["lokr_w2_a"] @ own["lokr_w2_b"]
    return torch.kron(own["lokr_w1"], w2)
