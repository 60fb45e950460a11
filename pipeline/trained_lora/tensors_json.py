"""The tensors of a cache entry as JSON, in the files of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from pipeline.cache.store import TensorSpec


def tensors_json(tensors: Mapping[str, TensorSpec]) -> str:
    """Serialize an entry's tensors for `tensors_from_json`: name to dtype, shape and raggedness."""
    return json.dumps({name: astuple(tensor) for name, tensor in tensors.items()})


def tensors_from_json(value: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Convert the parsed JSON of `tensors_json` back to tensor specifications."""
    return {name: TensorSpec(dtype, tuple(shape), ragged) for name, (dtype, shape, ragged) in value.items()}
