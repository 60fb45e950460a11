"""Text encoders that are trained beside the denoiser: captions are encoded in each step, with their graph.

    cached    caption -> entry of the store -> denoiser            no text encoder in the process
    trained   caption -> text encoders with adapters -> denoiser   one graph and optimizer, two learning rates

With a fresh adapter, whose delta weights are zero, both give the denoiser the same embeddings.

B is the number of captions.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import diffusers
from torch import Tensor, nn

from pipeline.trained_lora.plan.seeding import hash_bits
from pipeline.trained_lora.worker.adapter.lora import add_lora
from pipeline.trained_lora.worker.base_model import BASE_DTYPES

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe


class TextEncoders:
    """The text encoders of a base model with fresh adapters."""

    def __init__(self, family: WorkerFamily, recipe: Recipe, device: str) -> None:
        """Load them, and adapt those that the family lets be trained.

        Args:
            family: With `trainable_text_encoders`.
            recipe: With `training.lora.text_encoders`.
            device: Where they lie.

        Raises:
            ModelError: A file of them is missing.
        """
        settings, own = recipe.training.lora.of_text_encoders, recipe.training.lora.text_encoders
        assert settings is not None
        assert own is not None
        self._family = family
        self._encoders = family.text.load(BASE_DTYPES[recipe.accelerate.mixed_precision], device)
        self.networks: dict[str, nn.Module] = {}
        for role, clip in family.trainable_text_encoders().items():
            network = family.text.network(self._encoders, role)
            seed = hash_bits(32, recipe.training.seed, role)
            add_lora(cast("Any", network), settings, targets=clip.targets(own.targets), seed=seed)
            self.networks[role] = network

    def embed(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """The tensors of `Family.text_shapes` with B in front, as the adapters make them by now."""
        with _nothing_said():
            return self._family.text.embed_captions(self._encoders, captions)


class JointModel(nn.Module):
    """Text encoders and denoiser as one network, so that gradients of both are exchanged together."""

    def __init__(self, family: WorkerFamily, denoiser: nn.Module, text: TextEncoders) -> None:
        """Hold the very networks that are given."""
        super().__init__()
        self.denoiser = denoiser
        self.text_encoders = nn.ModuleDict(text.networks)
        self._family = family
        self._text = text

    def forward(
        self, noisy: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor], captions: Sequence[str]
    ) -> Tensor:
        """`Family.predict` for what the encoders make of the captions, and the other conditions."""
        told = {**conditions, **self._text.embed(captions)}
        return self._family.denoiser.predict(self.denoiser, noisy, timesteps, told)


@contextmanager
def _nothing_said() -> Generator[None]:
    """A caption that is too long was reported when it was cached; diffusers would say it in each step."""
    before = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers.utils.logging.set_verbosity(before)
