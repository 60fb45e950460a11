"""Kolors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeline.models.worker.text import PooledConditioner


class ChatGlmConditioner(PooledConditioner):
    """The hidden states of a ChatGLM."""

    def embed(self, encoders: Any, caption: str | list[str]) -> dict[str, Tensor]:
        embedding, _, pooled, _ = self.encode_prompt(encoders, caption, do_classifier_free_guidance=False)
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        # ChatGLM's tokenizer has no offsets, but the pieces of its SentencePiece model have.
        tokenizer, limit = encoders.tokenizer, self.token_limit(encoders, role)
        pieces = tokenizer.tokenizer.sp_model.encode(caption, return_type="proto").pieces
        num_marks = len(tokenizer.get_prefix_tokens())
        num_tokens = num_marks + len(pieces)
        if num_tokens <= limit:
            return num_tokens, 0, None
        return num_tokens, num_tokens - limit, int(pieces[limit - num_marks].begin)
