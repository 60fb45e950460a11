"""Conversion between torch tensors and the arrays that the store reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.cache.store import EntrySpec, Store


def as_stored(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the tensor's values as `Store.write` expects them; bfloat16 becomes its bits as uint16."""
    tensor = tensor.detach().cpu().contiguous()

    # NumPy has no bfloat16.
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def read_torch(store: Store, spec: EntrySpec) -> dict[str, Tensor]:
    """Read an entry's tensors by name, on the CPU and in their stored dtype; raises as `Store.read`."""
    return {name: from_stored(values) for name, values in store.read(spec).items()}


def from_stored(values: npt.NDArray[Any]) -> Tensor:
    """Return a copy of the tensor from which `as_stored` returned the values."""
    tensor = torch.from_numpy(values.copy())  # the store's arrays are read-only
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor
