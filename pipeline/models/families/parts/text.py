"""Text embeddings: their shapes and lengths, and the tokenizers and text encoders that make them.

Letters of shapes: T tokens, D embedding width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, Literal, TypeAlias

from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import ModelFolder, is_text_encoder, is_tokenizer
from pipeline.models.families.parts.lora_keys import ClipLora

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Shapes of one sample's tensors, by tensor name."""

WITH_FTFY = ", ftfy" if find_spec("ftfy") else ""
"""End of `TextSpec.method` where the pipeline cleans prompts: with ftfy, if it is installed."""

TextPadding = Literal["stored", "zeros", "masked"]
"""The denoiser's view of padding:

"stored": the encoders' hidden states of padding tokens; entries contain them and all have one length.
"zeros": zeros; an entry contains only the caption's own tokens.
"masked": nothing, because `text_mask` hides it; an entry contains only the caption's own tokens.
"""


MAX_CLIP_TOKENS = 10_000
"""Most tokens that captions are padded to."""


def clip_length(model: ModelFolder, role: str = "tokenizer") -> int:
    """Return `model_max_length` of a tokenizer, the length that diffusers pads CLIP's captions to.

    Raises:
        ModelError: The tokenizer has no limit.
    """
    length = int(model.config(role).get("model_max_length") or 1e30)
    if length > MAX_CLIP_TOKENS:
        what = f"model_max_length of CLIP's tokenizer must be at most {MAX_CLIP_TOKENS:,}, got {length:.3g}"
        fix = "set it to the number of positions of the text encoder, which is 77 for CLIP"
        raise ModelError(what, where=str(model.config_file(role)), fix=fix)
    return length


@dataclass(frozen=True)
class TextSpec(ABC):
    """Tokenizers, text encoders and the tensors of one caption.

    Attributes:
        method: Name of the way from captions to embeddings, part of each text key. Change it when the
            embeddings change.
        conditioner: Import path of the text conditioner below `pipeline.models.worker`.
        padding: The denoiser's view of padding; see `TextPadding`.
        adds_special_tokens: Whether the tokenizer adds start and end marks to the prompt; False if the
            prompt template contains them.
    """

    method: str
    conditioner: str
    padding: TextPadding = "stored"
    adds_special_tokens: bool = True

    trains_encoders: ClassVar[bool] = False
    """Whether a LoRA may adapt the text encoders; see `trainable_encoders`."""

    @abstractmethod
    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        """Return the tokens that each tokenizer's encoder takes, start and end marks included."""

    @abstractmethod
    def shapes(self, model: ModelFolder) -> Shapes:
        """Return the shapes of one caption's tensors; unless `padding` is "stored", T is the maximum."""

    def max_length(self, model: ModelFolder) -> int:
        """Return the number of tokens that the encoder with the highest limit takes."""
        return max(self.token_limits(model).values())

    def roles(self, model: ModelFolder, components: Iterable[str]) -> tuple[str, ...]:
        """Return the tokenizers and text encoders that the base model has, in the order of `components`."""
        text_roles = (role for role in components if is_tokenizer(role) or is_text_encoder(role))
        return tuple(role for role in text_roles if model.has(role))

    def trainable_encoders(self, model: ModelFolder) -> Mapping[str, ClipLora]:
        """Return the text encoders that a LoRA may adapt, by component."""
        return {}


@dataclass(frozen=True)
class LanguageModelText(TextSpec):
    """Hidden states of one language model, `text_encoder`, for captions of any length.

    Attributes:
        tokens: Largest number of tokens in an embedding.
        template_tokens: Tokens that the prompt template adds to the tokenizer's limit.
        layers: Number of hidden states that are concatenated along the embedding width.
    """

    padding: TextPadding = "masked"
    tokens: int = 512
    template_tokens: int = 0
    layers: int | Callable[[ModelFolder], int] = 1

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        return {"tokenizer": self.tokens + self.template_tokens}

    def hidden_size(self, model: ModelFolder) -> int:
        """Return the width of one hidden state, which T5's configuration calls `d_model`."""
        config = model.config("text_encoder")
        config = config.get("text_config", config)
        return int(config["d_model" if "d_model" in config else "hidden_size"])

    def shapes(self, model: ModelFolder) -> Shapes:
        layers = self.layers if isinstance(self.layers, int) else self.layers(model)
        return {"text_embedding": (self.tokens, layers * self.hidden_size(model))}
