"""Bria FIBO 2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.pipelines.bria_fibo2.image_processor import BriaFibo2ImageProcessor
from diffusers.pipelines.bria_fibo2.pipeline_bria_fibo2 import DEFAULT_NEGATIVE_PROMPT
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle
from transformers import BatchFeature, Qwen2VLImageProcessorPil

from pipeline.errors import ModelError
from pipeline.models.families.bria_fibo2 import NUM_BUNDLES, PERCEIVER_BUNDLE
from pipeline.models.worker.denoiser import Conditions, DenoiserCall, padding_mask
from pipeline.models.worker.families.qwen_image_edit import CaptionImageProcessor
from pipeline.models.worker.inference import PipelineDrawing
from pipeline.models.worker.text import SeenImage, TextConditioner, token_spans

_PATCH = 2
"""Edge, in values of the VAE's latent, of a patch in the stored latent."""

_IMAGE_MARK = "<|image_pad|>"


class BriaFibo2Processor(CaptionImageProcessor):
    """Tokenizer and image processor, called as `Qwen3VLProcessor`, which would require torchvision."""

    def __call__(self, *, text: Sequence[str], images: Any = None, **options: Any) -> BatchFeature:
        if images is None:
            return super().__call__(text=text, **options)

        # A text with images is never cut.
        max_length = options["max_length"]
        features = super().__call__(text=text, images=images, **{**options, "truncation": False})
        num_tokens = features["input_ids"].shape[1]
        if num_tokens > max_length:
            raise ModelError(
                f"a caption with its references must have at most {max_length} tokens, got {num_tokens}",
                where=text[0][-200:],
                fix="shorten the caption",
            )
        is_image = features["input_ids"] == self.tokenizer.convert_tokens_to_ids(_IMAGE_MARK)
        return BatchFeature({**features, "mm_token_type_ids": is_image.long()})


class BriaFibo2Conditioner(TextConditioner):
    """A Qwen3-VL; JSON captions are cleaned as the pipeline's call does, before `encode_prompt`.

    The empty caption is embedded as the pipeline's default negative prompt, a JSON caption without values.
    """

    def load_tokenizer(self, role: str) -> BriaFibo2Processor:
        images = Qwen2VLImageProcessorPil(**self.family.image_processor_settings())
        return BriaFibo2Processor(super().load_tokenizer(role), images)

    def cleaned(self, encoders: Any, caption: str) -> str:
        """Return the caption as the pipeline's call gives it to `encode_prompt`."""
        if not caption:
            return DEFAULT_NEGATIVE_PROMPT
        content, _ = encoders._parse_prompt(caption)
        if isinstance(content, str):
            return caption
        return json.dumps(content or {}, separators=(",", ":"), ensure_ascii=False)

    def prompt(self, encoders: Any, caption: str) -> str:
        return encoders.prompt_template_encode.format(self.cleaned(encoders, caption))

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        prompt, limit = self.prompt(encoders, caption), self.token_limit(encoders, role)
        spans = token_spans(encoders.processor.tokenizer, prompt)
        if len(spans) <= limit:
            return len(spans), 0, None

        # Counted in the cleaned caption, which may be longer than the caption.
        offset = spans[limit][0] - encoders.prompt_template_encode.index("{}")
        return len(spans), len(spans) - limit, min(max(offset, 0), len(caption))

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        # The pipeline also draws the texts in a JSON caption as images. A caption alone has no images here.
        prompt = self.cleaned(encoders, caption)
        bundles, _ = encoders.encode_prompt(prompt, device=encoders.text_encoder.device)
        return _injected(bundles)

    def embed_with_images(
        self, encoders: Any, caption: str, images: Sequence[SeenImage]
    ) -> dict[str, Tensor]:
        """Raise ModelError if a JSON caption has no instruction; any other caption is the instruction."""
        try:
            encoders.check_inputs(caption, None, None, image=[each.image for each in images])
        except ValueError as err:
            what = f"Bria FIBO 2 cannot edit with this caption: {err}"
            fix = 'write the instruction as text, or add the key "edit_instruction" to the JSON caption'
            raise ModelError(what, where=caption[:60], fix=fix) from err
        crops = [_seen_crop(encoders, each) for each in images]
        bundles, _ = encoders.encode_prompt(caption, image=crops, device=encoders.text_encoder.device)
        return _injected(bundles)

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        (length,) = text["text_lengths"]
        return {"prompt_embeds": _bundles(text)[:, :, :length]}


class BriaFibo2Call(DenoiserCall):
    """The transformer over latents that are not in patches."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        references = [
            pixel_shuffle(each.to(noisy.dtype), _PATCH) for each in conditions.get("references", ())
        ]
        prediction = denoiser(
            hidden_states=pixel_shuffle(noisy, _PATCH),
            timestep=timesteps / self.num_timesteps,
            encoder_hidden_states=_bundles(conditions),
            encoder_attention_mask=padding_mask(conditions),
            context_latents=references or None,
            return_dict=False,
        )[0]
        return pixel_unshuffle(prediction, _PATCH)


class OwnSizeImageProcessor(BriaFibo2ImageProcessor):
    """Crops a single reference by its own aspect ratio, as several references and as in training."""

    def preprocess(
        self, image: Any, height: Any = None, width: Any = None, *args: Any, **options: Any
    ) -> Any:
        return super().preprocess(image, None, None, *args, **options)


class BriaFibo2Drawing(PipelineDrawing):
    """The pipeline with references as in training."""

    def load_pipeline(self, *, denoiser: nn.Module | None = None, dtype: str, device: str) -> Any:
        pipeline = super().load_pipeline(denoiser=denoiser, dtype=dtype, device=device)
        pipeline.image_processor = OwnSizeImageProcessor(pipeline.image_processor.config.vae_scale_factor)
        return pipeline


def _seen_crop(encoders: Any, image: SeenImage) -> Any:
    limit = encoders.text_encoder_image_size
    _, (crop,) = encoders.image_processor.preprocess(
        image.image, image.size.height, image.size.width, text_encoder_image_size=limit
    )
    return crop


def _injected(bundles: Tensor) -> dict[str, Tensor]:
    # The first bundle is the Perceiver's copy of another one, and is not stored; `_bundles` restores it.
    return {"text_embedding": bundles[:, 1:].transpose(1, 2).flatten(2)}


def _bundles(text: Mapping[str, Any]) -> Tensor:
    """Return the bundles of the Perceiver and of each injection block, (B, 6, T, 3 D)."""
    injected = text["text_embedding"].unflatten(2, (NUM_BUNDLES, -1)).transpose(1, 2)
    return torch.cat([injected[:, PERCEIVER_BUNDLE : PERCEIVER_BUNDLE + 1], injected], dim=1)
