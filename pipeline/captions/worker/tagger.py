"""Tag images with a tagger of the WD14 family, by ONNX Runtime on the CPU, one image at a time.

Dimensions: B images (always 1), E edge of the model's square input, T tags.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from pipeline.captions.tags import read_tags, tags_of
from pipeline.errors import ModelError
from pipeline.models.captioner_folder import ONNX_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.recipe.captions import TaggerSettings

_WHITE = (255, 255, 255)

_ONLY_ERRORS = 3


class Tagger:
    """A tagger that is ready to be used."""

    def __init__(self, folder: Path, settings: TaggerSettings) -> None:
        """Load the model; raises ModelError if the folder has no tagger, or onnxruntime is not installed."""
        self._folder, self._settings = folder, settings
        self._tags = read_tags(folder)
        self._session = self._load()
        (given,) = self._session.get_inputs()[:1]
        edges, channels = given.shape[1:3], given.shape[3:]
        if given.type != "tensor(float)" or channels != [3] or edges[0] != edges[1] or not _is_size(edges[0]):
            raise self._unusable(f"its input must be float (B, E, E, 3), got {given.type} {given.shape}")
        self._name, self._edge = given.name, int(edges[0])

    def captions(self, images: Sequence[Image.Image]) -> list[tuple[str, int, bool]]:
        """Return for each image the tags with commas, their number, and False: no list is cut off."""
        # The sums of a batch may differ in their last bits from those of one image.
        found = [tags_of(self._tags, self.probabilities(image), self._settings) for image in images]
        return [(", ".join(tags), len(tags), False) for tags in found]

    def probabilities(self, image: Image.Image) -> np.ndarray[Any, Any]:
        """Return the probability of each tag, a float array (T,)."""
        output = self._session.run(None, {self._name: model_input(image, self._edge)})[0]
        probabilities = np.asarray(output, np.float64).reshape(-1)
        if len(probabilities) != len(self._tags):
            raise self._unusable(f"it has {len(probabilities):,} outputs for {len(self._tags):,} tags")
        if not ((probabilities >= 0) & (probabilities <= 1)).all():
            raise self._unusable("its outputs are not probabilities from 0 to 1")
        return probabilities

    def _load(self) -> Any:
        try:
            import onnxruntime
        except ImportError as err:
            raise ModelError(
                "taggers need the package onnxruntime, which is not installed",
                where="captions.tagger",
                fix="pip install onnxruntime",
            ) from err
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ONLY_ERRORS
        # As for torch: the number of threads can change the last bits of results.
        options.intra_op_num_threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory() as nothing:
            # A model can name further files for its weights, which no fingerprint would contain.
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", nothing)
            try:
                data = (self._folder / ONNX_FILE).read_bytes()
                return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            # Its exceptions have no common class but this one.
            except Exception as err:
                raise self._unusable(str(err).strip().splitlines()[0][:300]) from err

    def _unusable(self, reason: str) -> ModelError:
        return ModelError(
            f"the tagger cannot be used: {reason}",
            where=str(self._folder / ONNX_FILE),
            fix="set captions.model to a tagger of the WD14 family with all weights in model.onnx",
        )


def model_input(image: Image.Image, edge: int) -> np.ndarray[Any, Any]:
    """Return the input that these taggers were trained with: a float32 array (1, E, E, 3), BGR in [0, 255].

    The image is centred on a white square, which is resized.
    """
    longest = max(image.size)
    square = Image.new("RGB", (longest, longest), _WHITE)
    square.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
    if longest != edge:
        square = square.resize((edge, edge), Image.Resampling.BICUBIC)
    return np.asarray(square, np.float32)[np.newaxis, :, :, ::-1]


def _is_size(edge: object) -> bool:
    return isinstance(edge, int) and edge > 0
