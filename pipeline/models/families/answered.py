"""Pipelines that take no embeddings of a caption: while they draw, their `encode_prompt` has the answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.models.families.diffusers_family import DiffusersFamily

if TYPE_CHECKING:
    from torch import Tensor


class AnsweredPrompts(DiffusersFamily):
    """A family whose pipeline is called with a prompt, and asks its own `encode_prompt` what it means."""

    @abstractmethod
    def prompt_answer(
        self,
        pipeline: Any,
        text: Mapping[str, Tensor],
        empty_text: Mapping[str, Tensor],
        asked: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        """What the pipeline's `encode_prompt` says of a caption whose tensors are at hand.

        Args:
            pipeline: From `load_pipeline`: without text encoders.
            text: The caption's conditions, a batch of one, on the denoiser's device, in its dtype.
            empty_text: The empty caption's; as long as the caption's.
            asked: The arguments of `encode_prompt`.
        """

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Any prompt: this pipeline's `encode_prompt` answers with the tensors until it is called anew."""
        pipeline.encode_prompt = lambda **asked: self.prompt_answer(pipeline, text, empty_text, asked)
        return {"prompt": ""}
