"""The tensors of a cache entry as JSON, in the files of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from functools import lru_cache
from typing import Any

from pipeline.cache.store import TensorSpec


def tensors_json(tensors: Mapping[str, TensorSpec]) -> str:
    """Serialize an entry's tensors for `tensors_from_json`: name to dtype, shape and raggedness."""
    return json.dumps({name: astuple(tensor) for name, tensor in tensors.items()})


def tensors_from_json(value: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Convert the parsed JSON of `tensors_json` back to tensor specifications."""
    return {name: TensorSpec(dtype, tuple(shape), ragged) for name, (dtype, shape, ragged) in value.items()}


@lru_cache(maxsize=1_024)
def parsed_tensors(text: str) -> dict[str, TensorSpec]:
    """Parse the text of `tensors_json`; the distinct texts are as few as buckets and caption lengths."""
    return tensors_from_json(json.loads(text))


def shapes_text(texts: str) -> str:
    """Return `CxHxW CxHxW` for lines of `tensors_json`, one per entry."""
    shapes = [next(iter(parsed_tensors(text).values())).shape for text in texts.splitlines()]
    return " ".join("x".join(map(str, shape)) for shape in shapes)
