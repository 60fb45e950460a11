"""The scorers of Latentline: DINOv2, DINOv3, CLIP and SigLIP through the classes of transformers.

| scorer | of a picture | of a text |
|---|---|---|
| dino | `pooler_output` of the model, the normalized class token | |
| clip, siglip | `get_image_features` | `get_text_features` |
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer

from pipeline.errors import EvaluationError
from pipeline.evaluation.scorers import READS_TEXTS, Features
from pipeline.models.missing_package import install_command

if TYPE_CHECKING:
    from PIL.Image import Image

# Without an answer in advance, transformers asks on the terminal whether to run code of the folder.
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class TransformersScorer:
    """A model of transformers in float32 on one device."""

    def __init__(self, name: str, folder: str, device: str) -> None:
        """Load the model; raises EvaluationError if the folder has none of the expected kind."""
        self.fingerprint = ""
        self.reads_texts = READS_TEXTS[name]
        self._device = device
        with _explained(name, folder):
            # Pillow's processors give the same pixels on all machines; torchvision's resize differs.
            self._processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil", **_LOCAL)
            # A configuration may name any attention implementation, also code in a repository on the Hub.
            # The argument replaces it only if the configuration is given apart.
            model: Any = AutoModel.from_pretrained(
                folder,
                config=AutoConfig.from_pretrained(folder, **_LOCAL),
                attn_implementation="sdpa",
                dtype=torch.float32,
                use_safetensors=True,
                **_LOCAL,
            )
        if self.reads_texts != hasattr(model, "get_text_features"):
            kind = "a model of images and texts" if self.reads_texts else "a model of images alone"
            what = f"the scorer {name} needs {kind}, got {type(model).__name__}"
            raise EvaluationError(what, where=folder, fix="use other weights, or another scorer")
        self._model = model.to(device).eval()
        self._tokenizer: Any = None
        if self.reads_texts:
            with _explained(name, folder):
                self._tokenizer = AutoTokenizer.from_pretrained(folder, **_LOCAL)

    def picture_features(self, images: Sequence[Image]) -> Features:
        """See `Scorer.picture_features`."""
        pixels = self._processor(images=list(images), return_tensors="pt")["pixel_values"].to(self._device)
        with torch.inference_mode():
            if self.reads_texts:
                return _pooled(self._model.get_image_features(pixel_values=pixels))
            return _pooled(self._model(pixel_values=pixels))

    def text_features(self, texts: Sequence[str]) -> Features | None:
        """See `Scorer.text_features`."""
        if self._tokenizer is None:
            return None
        # The full length, with which SigLIP was trained. CLIP ignores the padding.
        tokens = self._tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=self._model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self._device)

        # SigLIP 2's tokenizer returns no mask, and the model then reads the padding, as in its training.
        names = [name for name in ("input_ids", "attention_mask") if name in tokens]
        with torch.inference_mode():
            return _pooled(self._model.get_text_features(**{name: tokens[name] for name in names}))


@contextmanager
def _explained(name: str, folder: str) -> Generator[None]:
    try:
        yield
    except (ImportError, OSError, ValueError) as err:
        raise EvaluationError(
            f"the scorer {name} cannot be loaded: {str(err).strip().splitlines()[0]}",
            where=folder,
            fix=install_command(err) or "set weights to a model of this kind in the format of transformers",
        ) from err


def _pooled(output: Any) -> Features:
    # Older releases of transformers return the features themselves.
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features.float().cpu().numpy()
