"""Qwen-Image-Edit 2509 and later."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import BatchFeature, Qwen2VLImageProcessorPil

from pipeline.models.worker.families.qwen_image import QwenConditioner
from pipeline.models.worker.text import SeenImage, count_within_template, token_spans

_IMAGE_MARK = re.compile(r"<\|image_pad\|>")


class CaptionImageProcessor:
    """Tokenizer and image processor, called as `Qwen2VLProcessor`, which would require torchvision."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor

    def __call__(self, *, text: Sequence[str], images: Any = None, **options: Any) -> BatchFeature:
        pixels: dict[str, Any] = {}
        if images is not None:
            pixels = dict(self.image_processor(images=images, return_tensors=options.get("return_tensors")))

            # The prompt has one mark for each image, and the model expects one for each of its tokens.
            patches = [int(grid.prod()) for grid in pixels["image_grid_thw"]]
            counts = iter([number // self.image_processor.merge_size**2 for number in patches])
            text = [_IMAGE_MARK.sub(lambda mark: mark[0] * next(counts), each, len(patches)) for each in text]
        return BatchFeature({**self.tokenizer(list(text), **options), **pixels})


class QwenImageEditConditioner(QwenConditioner):
    """A Qwen2.5-VL that sees the references in front of the caption; the system message is dropped."""

    def load_tokenizer(self, role: str) -> CaptionImageProcessor:
        images = Qwen2VLImageProcessorPil(**self.family.image_processor_settings())
        return CaptionImageProcessor(super().load_tokenizer(role), images)

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        # The end of the template must not be cut.
        def spans_of(text: str) -> list[tuple[int, int]]:
            return token_spans(encoders.processor.tokenizer, self.prompt(encoders, text))

        limit, caption_start = self.token_limit(encoders, role), encoders.prompt_template_encode.index("{}")
        return count_within_template(spans_of, caption, caption_start=caption_start, limit=limit)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        return self.embed_with_images(encoders, caption, ())

    def embed_with_images(
        self, encoders: Any, caption: str, images: Sequence[SeenImage]
    ) -> dict[str, Tensor]:
        # The pipeline itself cuts nothing.
        _, _, cut_from = self.count_tokens(encoders, "processor", caption)
        resize = encoders.image_processor.resize
        seen = [resize(each.image, each.size.height, each.size.width) for each in images]
        embedding, _ = encoders.encode_prompt(
            caption[:cut_from], image=seen or None, device=encoders.text_encoder.device
        )
        return {"text_embedding": embedding}
