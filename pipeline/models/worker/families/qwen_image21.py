"""Qwen-Image 2.1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchFeature, ProcessorMixin, Qwen2VLImageProcessorPil

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.families.qwen_image_edit import CaptionImageProcessor
from pipeline.models.worker.inference import PipelineDrawing
from pipeline.models.worker.loading import component_class
from pipeline.models.worker.text import SeenImage, TextConditioner, count_within_template, token_spans
from pipeline.models.worker.vae import FrameCodec, Posterior

# Number of image tokens that one position of the transformer's `img_mask` stands for.
_SLOT_TOKENS = 4

_IMAGE_MARK = "<|image_pad|>"


class CaptionProcessor(ProcessorMixin):
    """Tokenizer and image processor, called as `Qwen3VLProcessor`, which would require torchvision."""

    def __init__(
        self,
        tokenizer: Any = None,
        chat_template: str | None = None,
        load_images: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(tokenizer, chat_template=chat_template)
        self._load_images = load_images

    def __call__(self, *args: Any, images: Any = None, text: Any = None, **options: Any) -> BatchFeature:
        if images is None:
            return super().__call__(*args, text=text, **options)
        assert self._load_images is not None
        both = CaptionImageProcessor(self.tokenizer, self._load_images())
        features = both(text=text, images=images, **options)
        is_image = features["input_ids"] == self.tokenizer.convert_tokens_to_ids(_IMAGE_MARK)
        return BatchFeature({**features, "mm_token_type_ids": is_image.long()})

    def apply_chat_template(self, conversation: Any, *args: Any, **options: Any) -> Any:
        # A batch also for a single conversation, as `Qwen3VLProcessor` returns it.
        return super().apply_chat_template([conversation], *args, **options)


class QwenImage21Conditioner(TextConditioner):
    """A Qwen3-VL behind the pipeline's template; the hidden states of the system message are dropped."""

    def load_tokenizer(self, role: str) -> CaptionProcessor:
        tokenizer = super().load_tokenizer(role)
        return CaptionProcessor(tokenizer, tokenizer.chat_template, self._load_images)

    def _load_images(self) -> Any:
        return Qwen2VLImageProcessorPil(**self.family.image_processor_settings())

    def prompt(self, encoders: Any, caption: str) -> str:
        # The pipeline replaces an empty caption by a space.
        return encoders.prompt_template_t2i.format(caption or " ")

    def token_limit(self, encoders: Any, role: str) -> int:
        # The system message is not part of the embedding, so its tokens do not count.
        system_message, *_ = encoders.prompt_template_t2i.partition("<|im_start|>user")
        num_dropped = len(encoders.processor.tokenizer(system_message).input_ids)
        return super().token_limit(encoders, role) + num_dropped

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        # The end of the template must not be cut.
        def spans_of(text: str) -> list[tuple[int, int]]:
            return token_spans(encoders.processor.tokenizer, self.prompt(encoders, text))

        limit, caption_start = self.token_limit(encoders, role), encoders.prompt_template_t2i.index("{}")
        return count_within_template(spans_of, caption, caption_start=caption_start, limit=limit)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        # The pipeline itself cuts nothing.
        _, _, cut_from = self.count_tokens(encoders, "processor", caption)
        embedding, *_ = encoders.encode_prompt(caption[:cut_from], device=encoders.text_encoder.device)
        return {"text_embedding": embedding}

    def embed_with_images(
        self, encoders: Any, caption: str, images: Sequence[SeenImage]
    ) -> dict[str, Tensor]:
        _, _, cut_from = self.count_tokens(encoders, "processor", caption)
        resize = encoders.image_processor.resize
        seen = [resize(each.image, each.size.height, each.size.width) for each in images]
        embedding, _, is_image = encoders.encode_prompt(
            caption[:cut_from], image=seen, device=encoders.text_encoder.device
        )

        # The transformer puts latents in place of the hidden states of images.
        return {"text_embedding": embedding[:, ~is_image[0]]}

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], negative_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        tokenizer, slot_px = pipeline.processor.tokenizer, (2 * self.family.vae_factor) ** 2

        # The pipeline accepts no positions of images with the embeddings, so `encode_prompt` inserts them.
        def encode_prompt(*, image: Any, prompt_embeds: Tensor, **_: Any) -> tuple[Tensor, None, Tensor]:
            counts = [each.width * each.height // slot_px for each in image or ()]
            starts = _image_starts(tokenizer, len(counts))
            embedding, is_image = _with_image_slots(prompt_embeds, starts, counts)
            return embedding, None, is_image

        pipeline.encode_prompt = encode_prompt
        return super().prompt_arguments(pipeline, text, negative_text)

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        (length,) = text["text_lengths"]
        return {"prompt_embeds": text["text_embedding"][:, :length]}

    def guidance_arguments(self, scale: float) -> dict[str, Any]:
        # `true_cfg_scale` scales the guidance away from the negative prompt.
        return {"true_cfg_scale": scale}


def _with_image_slots(text: Tensor, starts: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Insert `counts` slots for each image behind `starts` tokens into text embeddings (B, T, D).

    Returns the embeddings with zeros in the slots, and Boolean (B, T + slots) that is true in the slots.
    """
    parts, is_image, end = list[Tensor](), list[bool](), 0
    for start, count in zip(starts, counts, strict=True):
        parts += [text[:, end:start], text.new_zeros(len(text), count, text.shape[2])]
        is_image += [False] * (start - end) + [True] * count
        end = start
    parts.append(text[:, end:])
    is_image += [False] * (text.shape[1] - end)
    return torch.cat(parts, dim=1), torch.tensor(is_image, device=text.device).expand(len(text), -1)


def _image_starts(tokenizer: Any, number: int) -> list[int]:
    """Return the number of text tokens before each image of a prompt, not counting the system message."""
    marks = (f"<image{index}><|vision_start|>{_IMAGE_MARK}<|vision_end|>" for index in range(1, number + 1))
    tokens: list[int] = tokenizer(f"<|im_start|>user\n{' '.join(marks)}").input_ids
    image_token = tokenizer.convert_tokens_to_ids(_IMAGE_MARK)
    positions = [position for position, token in enumerate(tokens) if token == image_token]
    return [position - num_before for num_before, position in enumerate(positions)]


class QwenImage21Call(DenoiserCall):
    """The transformer over the text with the references in it, then the latent's values, row by row."""

    @cached_property
    def _tokenizer(self) -> Any:
        folder = self.family.model.component("processor")
        return component_class(self.family, "processor").from_pretrained(folder, local_files_only=True)

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        text, lengths = conditions["text_embedding"], conditions["text_lengths"]
        images = [*(each.to(noisy.dtype) for each in conditions.get("references", ())), noisy]
        sigma = timesteps / self.num_timesteps
        if len(set(lengths)) == 1:
            return self._predict(denoiser, images, sigma, text[:, : lengths[0]])

        # The transformer counts padding when it places the image behind the caption, so the prediction of a
        # padded caption would depend on the batch's longest one.
        predictions: list[Tensor] = []
        for index, length in enumerate(lengths):
            sample = slice(index, index + 1)
            own_images = [image[sample] for image in images]
            predictions.append(self._predict(denoiser, own_images, sigma[sample], text[sample, :length]))
        return torch.cat(predictions)

    def _predict(self, denoiser: nn.Module, images: Sequence[Tensor], sigma: Tensor, text: Tensor) -> Tensor:
        """Return the prediction for the last image, for captions of one length."""
        batch, shapes = len(text), [(1, *image.shape[2:]) for image in images]
        tokens = [image.flatten(2).transpose(1, 2) for image in images]
        *counts, num_slots = (each.shape[1] // _SLOT_TOKENS for each in tokens)
        starts = _image_starts(self._tokenizer, len(counts)) if counts else ()
        text, is_image = _with_image_slots(text, starts, counts)
        prediction = denoiser(
            hidden_states=torch.cat(tokens, dim=1),
            timestep=sigma,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=None,
            img_shapes=[shapes] * batch,
            img_mask=torch.cat([is_image, is_image.new_ones(batch, num_slots)], dim=1),
            return_dict=False,
        )[0]
        return prediction[:, -tokens[-1].shape[1] :].transpose(1, 2).reshape(images[-1].shape)


class OpaqueFrameCodec(FrameCodec):
    """A VAE for frames with an alpha channel: images are opaque, and decoded transparency is dropped."""

    def _encode(self, vae: Any, pixels: Tensor) -> Posterior:
        alpha = torch.ones_like(pixels[:, :1])
        return super()._encode(vae, torch.cat([pixels, alpha], dim=1))

    def _decode(self, vae: Any, raw_latent: Tensor) -> Tensor:
        return super()._decode(vae, raw_latent)[:, :3]


class QwenImage21Drawing(PipelineDrawing):
    """The pipeline with its processor."""

    def further_components(self) -> dict[str, Any]:
        # The pipeline reads its template's length from the processor even if prompts are embeddings.
        return {"processor": self.text.load_tokenizer("processor")}
