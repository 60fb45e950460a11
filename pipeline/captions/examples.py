"""Examples of captions that a vision-language model gets before each image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.captions.given_size import given_size
from pipeline.errors import DatasetError
from pipeline.images.colour import Background
from pipeline.images.decode import hash_bytes, load_pixels, read_bytes, read_header
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Crop, Geometry, Size
from pipeline.recipe import in_project

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pipeline.recipe import CaptionSettings

EXAMPLES = "examples"
"""Name of the examples in the settings of a launch, in keys and in the metadata of entries."""


def examples_of(settings: CaptionSettings, *, where: str) -> list[dict[str, Any]]:
    """Return the examples of a dataset, in order, as a worker gets them.

    Each has its `caption`, and `image` with path, content hash, original size and given size, or None.

    Raises:
        DatasetError: An image is missing or cannot be opened.
    """
    examples: list[dict[str, Any]] = []
    for index, example in enumerate(settings.examples):
        image = None
        if example.image is not None:
            key = f"{where}.examples[{index}].image"
            image = _image(in_project(example.image), settings.resolution, where=key)
        examples.append({"caption": example.caption, "image": image})
    return examples


def example_inputs(examples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the key has of the examples: captions, and content and given size of images, no paths."""
    inputs: list[dict[str, Any]] = []
    for each in examples:
        image = each["image"]
        if image is not None:
            image = {"content_hash": image["content_hash"], "size": image["given_size"]}
        inputs.append({"caption": each["caption"], "image": image})
    return inputs


def example_pixels(image: dict[str, Any], background: Background) -> npt.NDArray[np.uint8]:
    """Return the image of an example as the model gets it, a uint8 array (H, W, 3).

    Raises:
        ImageError: The image has changed, or does not decode.
    """
    given = Size(*image["given_size"])
    geometry = Geometry(Size(*image["size"]), given, Crop(0, 0, *given))
    return load_pixels(Path(image["path"]), geometry, background, content_hash=image["content_hash"])


def _image(path: Path, resolution: int, *, where: str) -> dict[str, Any]:
    try:
        data = read_bytes(path)
        size = read_header(data).size
    except ImageError as err:
        raise DatasetError(
            f"the image of an example cannot be used: {err.detail}", where=f"{where}\n{path}", fix=err.fix
        ) from err
    return {
        "path": str(path),
        "content_hash": hash_bytes(data),
        "size": list(size),
        "given_size": list(given_size(size, resolution)),
    }
