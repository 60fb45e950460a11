"""Convert torch tensors to the arrays that the store writes."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def as_stored(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the tensor's values as `Store.write` expects them; bfloat16 becomes its bits as uint16."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
