"""Text conditioners: captions to the tensors that the denoiser is conditioned on.

Letters of shapes: B samples, T tokens, D embedding width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from pipeline.models.diffusers_folder import is_tokenizer
from pipeline.models.families import Family
from pipeline.models.worker.loading import (
    component_class,
    empty_components,
    pipeline_class,
    read_text_encoder,
)
from pipeline.models.worker.text_layers import ALL_ON_DEVICE, LayerOffload, place_encoders

if TYPE_CHECKING:
    from PIL.Image import Image

    from pipeline.images.geometry import Size

# Placeholder for a caption, to find where the caption begins in a prompt template.
_MARKER = "\N{OBJECT REPLACEMENT CHARACTER}"

POOLED_PROMPT = {"prompt_embeds": "text_embedding", "pooled_prompt_embeds": "pooled_text_embedding"}
MASKED_PROMPT = {"prompt_embeds": "text_embedding", "prompt_attention_mask": "text_mask"}


@dataclass(frozen=True)
class EncodedCaption:
    """The text embeddings of one caption.

    The encoder that reads furthest into the caption decides the counts.

    Attributes:
        tensors: Tensors as an entry stores them, named as in `TextSpec.shapes`, in the encoders' dtype.
        num_tokens: Number of tokens of the complete caption, with start and end marks but without padding.
        num_cut: Number of tokens beyond the encoder's limit; 0 if the caption fits.
        cut_from: Index of the first character that no encoder sees; None if the caption fits.
    """

    tensors: dict[str, Tensor]
    num_tokens: int
    num_cut: int
    cut_from: int | None


@dataclass(frozen=True)
class SeenImage:
    """A reference image, upright and RGB, and the size that the pipeline gives it for the text encoder."""

    image: Image
    size: Size


class TextConditioner(ABC):
    """The tokenizers and text encoders of a base model; `load` loads them."""

    embeds_batches: ClassVar[bool] = False
    """Whether `embed` accepts a list of captions, which then share one forward pass."""

    is_clip: ClassVar[bool] = False
    """Whether all text encoders are CLIPs, which pad captions to one length."""

    prompt_names: ClassVar[Mapping[str, str]] = {"prompt_embeds": "text_embedding"}
    """The conditions that replace a prompt, by the pipeline's argument."""

    def __init__(self, family: Family) -> None:
        self.family = family

    @abstractmethod
    def embed(self, encoders: Any, caption: Any) -> dict[str, Tensor]:
        """Return an entry's tensors with a leading batch dimension, from the pipeline's `encode_prompt`."""

    def encode_prompt(self, encoders: Any, caption: str | list[str], **options: Any) -> Any:
        """Return the result of the pipeline's `encode_prompt`; the options override its usual arguments."""
        usual = {"device": encoders.text_encoder.device, "max_sequence_length": self.family.max_length()}
        return encoders.encode_prompt(caption, **{**usual, **options})

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pipeline's arguments that replace a prompt.

        `text` is the result of `stack` for one caption, on the denoiser's device and in its dtype.
        """
        return {argument: text[name] for argument, name in self.prompt_names.items()}

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], negative_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the pipeline's arguments that replace a prompt and a negative prompt.

        Both texts are conditions as for `prompt_tensors`, padded to the same length.
        """
        negative = {f"negative_{name}": value for name, value in self.prompt_tensors(negative_text).items()}
        return {**self.prompt_tensors(text), **negative}

    def guidance_arguments(self, scale: float) -> dict[str, Any]:
        """Return the pipeline's arguments that set the guidance scale."""
        return {"guidance_scale": scale}

    def load(self, dtype: str, device: str, offload: LayerOffload = ALL_ON_DEVICE) -> Any:
        """Return the family's diffusers pipeline with only its tokenizers and text encoders, frozen.

        `dtype` is one for all encoders, or "auto" for `Family.text_compute_dtypes`.
        """
        dtypes = self.family.text_compute_dtypes(dtype)
        roles = self.family.text_roles()
        encoders = {
            role: read_text_encoder(self.family, role, dtypes[role])
            for role in roles
            if not is_tokenizer(role)
        }
        place_encoders(encoders, torch.device(device), offload)
        components = {
            role: self.load_tokenizer(role) if is_tokenizer(role) else encoders[role][0] for role in roles
        }
        return self.assemble(components)

    def assemble(self, components: Mapping[str, Any]) -> Any:
        """Return the pipeline with only these components; `embed` gets it as `encoders`."""
        kind = pipeline_class(self.family)
        options = self.family.spec.pipeline_options(self.family.model)
        return kind(**{**empty_components(kind), **components, **options})

    def inputs_of_pass(self, role: str, num_tokens: int) -> dict[str, Any]:
        """Return the arguments of a text encoder's forward pass for one caption, on the meta device."""
        ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
        return {"input_ids": ids, "output_hidden_states": True}

    def load_tokenizer(self, role: str) -> Any:
        """Return the tokenizer, or the processor, that the pipeline's constructor takes as `role`."""
        folder = self.family.model.component(role)
        return component_class(self.family, role).from_pretrained(folder, local_files_only=True)

    def embed_with_images(
        self, encoders: Any, caption: str, images: Sequence[SeenImage]
    ) -> dict[str, Tensor]:
        """Return the tensors of `embed` for a caption with reference images; see `ReferenceSpec.in_text`."""
        raise NotImplementedError(f"the text encoder of {self.family.spec.name} sees no images")

    def encode_caption(self, encoders: Any, caption: str, images: Sequence[SeenImage] = ()) -> EncodedCaption:
        """Return the text embeddings of one prompt, as in the family's diffusers pipeline.

        Tokens beyond the encoders' limits are cut.
        """
        with torch.inference_mode():
            batch = (
                self.embed_with_images(encoders, caption, images) if images else self.embed(encoders, caption)
            )
        return self._encoded(encoders, caption, {name: tensor[0] for name, tensor in batch.items()})

    def encode_captions(self, encoders: Any, captions: Sequence[str]) -> list[EncodedCaption]:
        """Return the text embeddings of prompts in one forward pass; `embeds_batches` must be True.

        They equal the tensors of `encode_caption` up to the arithmetic of a larger batch.
        """
        with torch.inference_mode():
            batch = self.embed(encoders, list(captions))
        return [
            self._encoded(encoders, caption, {name: tensor[index] for name, tensor in batch.items()})
            for index, caption in enumerate(captions)
        ]

    def _encoded(self, encoders: Any, caption: str, tensors: dict[str, Tensor]) -> EncodedCaption:
        # The denoiser sees a caption as far as the encoder that reads the most of it.
        counts = [self.count_tokens(encoders, role, caption) for role in self.family.token_limits]
        return EncodedCaption(tensors, *max(counts, key=lambda count: _reach(count[2])))

    def embed_captions(self, encoders: Any, captions: Sequence[str]) -> dict[str, Any]:
        """Return the conditions of a batch as in `stack`, with their autograd graph.

        They equal the tensors of `encode_caption` up to the arithmetic of a larger batch.
        """
        if self.embeds_batches:
            return self.embed(encoders, list(captions))
        samples = [self.embed(encoders, caption) for caption in captions]
        return self.stack([{name: tensor[0] for name, tensor in sample.items()} for sample in samples])

    def stack(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """Return the conditions of a batch, from the tensors of each sample's entry.

        If padding is masked, embeddings are padded with zeros to the batch's longest, `text_mask` (B, T)
        is 1 at tokens, and `text_lengths` holds the number of tokens of each sample as Python integers.
        If padding is zeros, they follow the tokens up to `max_length`.
        """
        padding = self.family.spec.text.padding
        stacked: dict[str, Any] = {
            name: torch.stack([text[name] for text in texts])
            for name in texts[0]
            if padding == "stored" or name != "text_embedding"
        }
        if padding == "stored":
            return stacked

        embeddings = [text["text_embedding"] for text in texts]
        if padding == "zeros":
            length = self.family.max_length()
            padded = [pad(each, (0, 0, 0, length - len(each))) for each in embeddings]
            stacked["text_embedding"] = torch.stack(padded)
        else:
            tokens = [embedding.new_ones(len(embedding)) for embedding in embeddings]
            stacked["text_embedding"] = pad_sequence(embeddings, batch_first=True)
            stacked["text_mask"] = pad_sequence(tokens, batch_first=True)
            stacked["text_lengths"] = tuple(len(embedding) for embedding in embeddings)
        return stacked

    def prompt(self, encoders: Any, caption: str) -> str:
        """Return the text that the pipeline gives its tokenizer, with the caption in it."""
        return caption

    def token_limit(self, encoders: Any, role: str) -> int:
        """Return the number of tokens of `prompt` that a tokenizer's encoder takes."""
        return self.family.token_limits[role]

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        """Return (number of tokens, number of tokens beyond the limit, index of the first cut character)."""
        prompt, limit = self.prompt(encoders, caption), self.token_limit(encoders, role)
        tokens = getattr(encoders, role)(
            prompt,
            add_special_tokens=self.family.spec.text.adds_special_tokens,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        num_tokens = len(tokens["input_ids"])
        if num_tokens <= limit:
            return num_tokens, 0, None

        # An end mark is never cut; it takes the place of one token.
        first_cut = limit - tokens["special_tokens_mask"][-1]
        caption_start = self.prompt(encoders, _MARKER).index(_MARKER)
        offset = tokens["offset_mapping"][first_cut][0] - caption_start
        return num_tokens, num_tokens - limit, min(max(offset, 0), len(caption))


def token_spans(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Return (first character, last character + 1) of each token."""
    return tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]


def count_within_template(
    spans_of: Callable[[str], list[tuple[int, int]]], caption: str, *, caption_start: int, limit: int
) -> tuple[int, int, int | None]:
    """Return what `TextConditioner.count_tokens` returns if the end of a template must not be cut.

    `spans_of` returns (first character, last character + 1) of each token of a caption in its template, which
    has `caption_start` characters before the caption and is included in `limit`.
    """
    spans = spans_of(caption)
    if len(spans) <= limit:
        return len(spans), 0, None

    num_before_end = sum(start < caption_start + len(caption) for start, _ in spans)
    cut_from = spans[num_before_end - (len(spans) - limit)][0] - caption_start

    # A shorter caption may be split into other tokens, so cut until it fits.
    while (num_kept := len(spans_of(caption[:cut_from]))) > limit:
        cut_from -= 1
    return len(spans), len(spans) - num_kept, cut_from


class CachedPromptConditioner(TextConditioner):
    """A conditioner for pipelines that accept no embeddings: their `encode_prompt` returns cached tensors."""

    @abstractmethod
    def encoded_prompt(
        self,
        pipeline: Any,
        text: Mapping[str, Tensor],
        negative_text: Mapping[str, Tensor],
        arguments: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        """Return the result of the pipeline's `encode_prompt` for its `arguments`; see `prompt_arguments`."""

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        # The pipeline requires a prompt, and the replaced `encode_prompt` ignores it.
        return {"prompt": ""}

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], negative_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Replace the pipeline's `encode_prompt` until the next call of this method."""
        pipeline.encode_prompt = lambda **given: self.encoded_prompt(pipeline, text, negative_text, given)
        return self.prompt_tensors(text)


class GemmaConditioner(TextConditioner):
    """A Gemma 2 behind an instruction; the empty caption is embedded as the negative prompt, without it."""

    def instruction(self, encoders: Any) -> dict[str, Any]:
        """Return the argument of `encode_prompt` with the instruction, empty if it is the default."""
        return {}

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        embedding, mask, negative, negative_mask = self.encode_prompt(
            encoders, caption, do_classifier_free_guidance=not caption, **self.instruction(encoders)
        )
        if not caption:
            embedding, mask = negative, negative_mask
        return {"text_embedding": own_tokens(embedding, mask)}


class PooledConditioner(TextConditioner):
    """A conditioner for Stable Diffusion XL's UNet, with an embedding and a pooled embedding."""

    embeds_batches = True
    prompt_names = POOLED_PROMPT


def own_tokens(embedding: Tensor, mask: Tensor) -> Tensor:
    """Return an embedding (1, T, D) without its padding, which is where the mask (1, T) is 0."""
    return embedding[:, mask[0].bool()]


def unpadded(embedding: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return each sample's own tokens, (T, D) each, from the result of `TextConditioner.stack`."""
    return [sample[:length] for sample, length in zip(embedding, lengths, strict=True)]


def chat_prompt(tokenizer: Any, caption: str | list[dict[str, str]], **template: Any) -> str:
    """Return the caption, or its parts, as the only message of a conversation in the tokenizer's template."""
    messages = [{"role": "user", "content": caption}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)


def _reach(cut_from: int | None) -> float:
    return float("inf") if cut_from is None else cut_from
