"""Language models as text encoders: chat templates, and captions of any length in one shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.families.flow_transformer import FlowTransformer

if TYPE_CHECKING:
    from torch import Tensor


class LanguageTransformer(FlowTransformer):
    """A flow transformer told by one language model, `text_encoder`, whose hidden states are its embedding.

    Captions of different lengths are stored in one shape: zeros behind the last token, and `text_mask` (T,),
    which is 1 where there is one.
    """

    def text_width(self) -> int:
        """Of the language model's hidden states, wherever its configuration has it."""
        config = self.config("text_encoder")
        return int(config.get("text_config", config)["hidden_size"])


def padded(embedding: Tensor, length: int) -> dict[str, Tensor]:
    """`text_embedding` (1, length, D) and `text_mask` (1, length) of an embedding (1, T, D), T <= length."""
    from torch.nn.functional import pad

    lacking = length - embedding.shape[1]
    mask = embedding.new_ones(embedding.shape[:2])
    return {
        "text_embedding": pad(embedding, (0, 0, 0, lacking)),
        "text_mask": pad(mask, (0, lacking)),
    }


def unpadded(embedding: Tensor, mask: Tensor) -> list[Tensor]:
    """The inverse, of each sample: its own tokens alone, (T, D)."""
    return [each[keep] for each, keep in zip(embedding, mask.bool(), strict=True)]


def chat(tokenizer: Any, caption: str, **template: Any) -> str:
    """The caption as the only message of a conversation, in the words of the tokenizer's template."""
    messages = [{"role": "user", "content": caption}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
