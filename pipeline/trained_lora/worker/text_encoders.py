"""Training text encoders together with the denoiser.

    cached    caption -> cache entry -> denoiser                   no text encoder in the process
    trained   caption -> text encoders with adapters -> denoiser   one graph, one optimizer

With fresh adapters, both give the denoiser the same embeddings.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from diffusers.utils import logging
from torch import Tensor, nn

from pipeline.trained_lora.plan.random_streams import hash_bits
from pipeline.trained_lora.worker.adapter.lora import add_lora
from pipeline.trained_lora.worker.base_model import base_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe


class TextEncoders:
    """The text encoders of a base model.

    Attributes:
        networks: The encoders that can have adapters, by component.
    """

    def __init__(self, family: WorkerFamily, recipe: Recipe, device: str) -> None:
        """Load the text encoders, without adapters."""
        self._family = family
        self._encoders = family.text.load(base_dtype(family, recipe), device)
        self.networks: dict[str, nn.Module] = {
            role: getattr(self._encoders, role) for role in family.trainable_text_encoders()
        }

    def embed(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors of `Family.text_shapes`, stacked over the captions, with their graph."""
        with _without_warnings():
            return self._family.text.embed_captions(self._encoders, captions)


def trained_text_encoders(family: WorkerFamily, recipe: Recipe, device: str) -> TextEncoders | None:
    """Return the text encoders with the fresh adapters that the recipe trains; None if it trains none."""
    lora = recipe.training.lora
    settings, text_settings = lora.of_text_encoders, lora.text_encoders
    if settings is None or text_settings is None:
        return None

    text = TextEncoders(family, recipe, device)
    for role, clip in family.trainable_text_encoders().items():
        network = cast("PreTrainedModel", text.networks[role])

        # A seed of its own, so that encoders of equal shapes do not begin with equal weights.
        seed = hash_bits(32, recipe.training.seed, role)
        add_lora(network, settings, targets=clip.targets(text_settings.targets), seed=seed)
    return text


class JointModel(nn.Module):
    """Text encoders and denoiser as one module, so that DDP exchanges the gradients of both."""

    def __init__(self, family: WorkerFamily, denoiser: nn.Module, text: TextEncoders) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.text_encoders = nn.ModuleDict(text.networks)
        self._family = family
        self._text = text

    def forward(
        self, noisy: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor], captions: Sequence[str]
    ) -> Tensor:
        """Return `DenoiserCall.predict` for the encoded captions and the other conditions."""
        conditions = {**conditions, **self._text.embed(captions)}
        return self._family.denoiser.predict(self.denoiser, noisy, timesteps, conditions)


@contextmanager
def _without_warnings() -> Generator[None]:
    # diffusers would report each truncated caption in every step.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
