"""The expected results of Qwen-Image 2.1, from its pipeline and by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import QwenImage21Pipeline
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21 as qwenimage21
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, ProcessorMixin, Qwen2VLImageProcessorPil

from demo.tiny_models import make_tiny_qwen_image21
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import EntrySpec
from pipeline.images.geometry import Size
from pipeline.models.families.parts import references as declared
from pipeline.models.families.parts.references import QWEN_IMAGE21_REFERENCES
from pipeline.models.worker.text import SeenImage
from pipeline.text_embeddings.caption_rows import file_images
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import settings
from tests.pipeline.models.families.references_case import pictures

LAYERS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
LAYERS += ["img_mlp.gate_layer", "img_mlp.proj", "img_mlp.out"]
MODULES = [f"transformer_blocks.{block}.{layer}" for block in range(2) for layer in LAYERS]


REFERENCE_PX = 96 * 96
"""Area of references in `small_references`, in place of a megapixel."""

TEXT_IMAGES = QWEN_IMAGE21_REFERENCES.in_text
assert TEXT_IMAGES is not None


class Processor(ProcessorMixin):
    """The real tokenizer and image processor, combined as `Qwen3VLProcessor` documents.

    `image_token` makes the base class return a batch for one conversation.
    """

    image_token = "<|image_pad|>"

    def __init__(self, tokenizer: Any = None, folder: Path | None = None) -> None:
        super().__init__(tokenizer, chat_template=tokenizer.chat_template)
        self.pictures = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def __call__(self, *args: Any, text: Any = None, images: Any = None, **options: Any) -> BatchFeature:
        if images is None:
            return super().__call__(*args, text=text, **options)
        (prompt,) = text
        features = dict(self.pictures(images=images, return_tensors="pt"))
        start, *parts = re.split(r"<\|image_pad\|>", prompt)
        numbers = [int(height * width) // 4 for _, height, width in features["image_grid_thw"]]
        marks = [self.image_token * number for number in numbers]
        prompt = start + "".join(mark + part for mark, part in zip(marks, parts, strict=True))
        tokens = self.tokenizer([prompt], **options)
        is_image = tokens["input_ids"] == self.tokenizer.encode(self.image_token)[0]
        return BatchFeature({**tokens, **features, "mm_token_type_ids": is_image.int()})


@contextmanager
def small_references() -> Iterator[None]:
    """Shrink references to `REFERENCE_PX` here and in the pipeline, where a megapixel takes long on a CPU."""
    of_area = qwenimage21.calculate_dimensions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(declared, "QWEN_PX", REFERENCE_PX)
        patch.setattr(qwenimage21, "calculate_dimensions", lambda area, ratio: of_area(REFERENCE_PX, ratio))
        yield


def seen(images: list[Image.Image]) -> list[SeenImage]:
    assert TEXT_IMAGES is not None
    return [SeenImage(each, TEXT_IMAGES.size(Size(each.height, each.width))) for each in images]


class QwenImage21Case(Case):
    pipeline_class = QwenImage21Pipeline
    targets: ClassVar[list[str]] = LAYERS

    def __init__(self, *, turbo: bool = False) -> None:
        self.turbo = turbo

    def make(self, folder: Path) -> None:
        make_tiny_qwen_image21(folder, turbo=self.turbo)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        processor = Processor(AutoTokenizer.from_pretrained(folder / "processor"), folder / "processor")
        return super().pipeline(folder, processor=processor, **parts)

    def guidance_arguments(self, scale: float) -> dict[str, Any]:
        return {"true_cfg_scale": scale}

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, mask, is_image = pipe.encode_prompt(caption)
        assert mask is None
        assert not is_image.any()
        return {"text_embedding": embedding, "text_mask": torch.ones(embedding.shape[:2])}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Encode an opaque picture as the pipeline encodes its condition images."""
        picture = pixels[0].permute(1, 2, 0).add(1).mul(127.5).round().numpy().astype(np.uint8)
        rgba = pipe.image_processor.preprocess(Image.fromarray(picture).convert("RGBA"))
        torch.testing.assert_close(rgba[:, :3], pixels)
        return pipe._encode_vae_image(rgba.unsqueeze(2), generator=None)[:, :, 0]

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone; one slot of the mask stands for four tokens, which are latent values."""
        channels, height, width = noisy.shape[1:]
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            tokens = pipe.transformer(
                noisy[index].reshape(1, channels, -1).mT,
                text[None, :length],
                micro.timesteps[index : index + 1] / 1000,
                [[(1, height, width)]],
                torch.tensor([[False] * length + [True] * (height * width // 4)]),
            ).sample
            predictions.append(tokens[:, length:].mT.reshape(1, channels, height, width))
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{module.replace('.', '_')}" for module in MODULES}


class QwenImage21EditCase(QwenImage21Case):
    """Qwen-Image 2.1 with two references, which are the same for all samples."""

    drawing: ClassVar[dict[str, Any]] = {"image": pictures(2)}

    def __init__(self) -> None:
        super().__init__()
        self.seen = seen(pictures(2))

    def sections(self, folder: Path, photos: Path) -> dict[str, Any]:
        names = ("before", "style")
        self.references = [folder / name / "cat.png" for name in names]
        for name, image in zip(names, pictures(2), strict=True):
            (folder / name).mkdir()
            for path in photos.iterdir():
                image.save(folder / name / f"{path.stem}.png")
        references = [{"path": str(folder / name)} for name in names]
        dataset = {"name": "photos", "path": str(photos), "references": references}
        training = settings(folder, photos, folder)["training"]
        prompt = {"prompt": "a cat", "references": [str(each) for each in self.references]}
        return {"datasets": [dataset], "training": {**training, "sample_prompts": [prompt]}}

    def text_spec(self, entries: RecipeEntries, caption: str) -> EntrySpec:
        images, _ = file_images(entries, self.references)
        return entries.text_spec(caption, images=images)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        """Return the embeddings without those of images, which the transformer replaces."""
        images = [pipe.image_processor.resize(each.image, *each.size) for each in self.seen]
        embedding, mask, is_image = pipe.encode_prompt(caption, image=images)
        assert mask is None
        embedding = embedding[~is_image][None]
        return {"text_embedding": embedding, "text_mask": torch.ones(embedding.shape[:2])}

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, with the pipeline's positions of images."""
        images = [pipe.image_processor.resize(each.image, *each.size) for each in self.seen]
        _, _, is_image = pipe.encode_prompt("a cat", image=images)
        num_before = int(is_image[0].nonzero().max()) + 1
        predictions: list[torch.Tensor] = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            sample = slice(index, index + 1)
            latents = [*(each[sample] for each in micro.conditions["references"]), noisy[sample]]
            length = int(micro.conditions["text_mask"][index].sum())
            length += int(is_image.sum())
            mask = torch.zeros(1, length, dtype=torch.bool)
            mask[:, :num_before] = is_image[:, :num_before]
            joint = torch.ones(1, length, text.shape[1])  # any values where the images are
            joint[~mask] = text[: int((~mask).sum())]
            slots = mask.new_ones(1, noisy[0, 0].numel() // 4)
            tokens = pipe.transformer(
                torch.cat([each.flatten(2).mT for each in latents], dim=1),
                joint,
                micro.timesteps[sample] / 1000,
                [[(1, *each.shape[2:]) for each in latents]],
                torch.cat([mask, slots], dim=1),
            ).sample[:, -noisy[0, 0].numel() :]
            predictions.append(tokens.mT.reshape(1, *noisy.shape[1:]))
        return torch.cat(predictions)
