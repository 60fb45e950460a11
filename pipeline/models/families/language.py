"""Language models as text encoders: chat templates, and captions of any length in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.models.families.base import Shapes
from pipeline.models.families.flow_transformer import FlowTransformer

if TYPE_CHECKING:
    from torch import Tensor


class LanguageTransformer(FlowTransformer):
    """A flow transformer told by one language model, `text_encoder`, whose hidden states are its embedding.

    It sees the tokens of a caption and no padding; where that is otherwise, `text_padding` says so.
    """

    text_padding = "masked"

    def text_width(self) -> int:
        """Of the language model's hidden states, wherever its configuration has it."""
        config = self.config("text_encoder")
        return int(config.get("text_config", config)["hidden_size"])

    def text_shapes(self) -> Shapes:
        """The hidden states of as many tokens as the pipeline takes."""
        return {"text_embedding": (self.max_length(), self.text_width())}

    def stack_texts(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """With zeros behind the tokens of the shorter captions, and `text_mask` (B, T)."""
        if self.text_padding != "masked":
            return super().stack_texts(texts)
        from torch.nn.utils.rnn import pad_sequence

        embeddings = [text["text_embedding"] for text in texts]
        tokens = [embedding.new_ones(len(embedding)) for embedding in embeddings]
        return {
            "text_embedding": pad_sequence(embeddings, batch_first=True),
            "text_mask": pad_sequence(tokens, batch_first=True),
        }


def own_tokens(embedding: Tensor, mask: Tensor) -> Tensor:
    """An embedding (1, T, D) without its padding: the tokens at which the mask (1, T) is not 0."""
    return embedding[:, mask[0].bool()]


def unpadded(embedding: Tensor, mask: Tensor) -> list[Tensor]:
    """Of each sample of a batch its own tokens alone, (T, D)."""
    return [each[keep] for each, keep in zip(embedding, mask.bool(), strict=True)]


def chat(tokenizer: Any, caption: str | list[dict[str, str]], **template: Any) -> str:
    """The caption, or its parts, as a conversation's only message, in the tokenizer's template."""
    messages = [{"role": "user", "content": caption}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
