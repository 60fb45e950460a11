"""The expected results of Bria FIBO 2, with and without references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import BriaFibo2Pipeline
from diffusers.pipelines.bria_fibo2 import pipeline_bria_fibo2 as fibo2
from diffusers.pipelines.bria_fibo2.image_processor import BriaFibo2ImageProcessor
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, Qwen2VLImageProcessorPil

from demo.tiny_models import make_tiny_bria_fibo2
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import EntrySpec
from pipeline.images.geometry import Size
from pipeline.models.families.parts import references
from pipeline.models.families.parts.references import FIBO2_REFERENCES
from pipeline.models.worker.family import WorkerFamily
from pipeline.models.worker.text import SeenImage
from pipeline.text_embeddings.caption_rows import file_images
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import TOLERANCE, settings
from tests.pipeline.models.families.references_case import pictures

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
BLOCK = (*(f"attention.{layer}" for layer in ATTENTION), *(f"feed_forward.w{each}" for each in (1, 2, 3)))
CROSS = tuple(f"cross_attention.{layer}" for layer in ATTENTION)
MODULES = [
    f"{blocks}.{layer}"
    for blocks in ("noise_refiner.0", *(f"layers.{n}" for n in range(6)))
    for layer in BLOCK
]
MODULES += [
    f"{blocks}.{layer}"
    for blocks in ("perceiver.layers.0", *(f"layers.{n}" for n in range(5)))
    for layer in CROSS
]
WIDTH = 16

AREA_PX = 96 * 96
"""Area of references in this file, in place of a megapixel."""


class Processor:
    """The real tokenizer and image processor, combined as `Qwen3VLProcessor` documents."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def __call__(self, text: list[str], images: list[Any] | None, **options: Any) -> BatchFeature:
        if images is None:
            return BatchFeature({**self.tokenizer(text, **options)})
        (prompt,) = text
        features = dict(self.images(images=images, return_tensors="pt"))
        start, *parts = prompt.split("<|image_pad|>")
        numbers = [int(height * width) // 4 for _, height, width in features["image_grid_thw"]]
        marks = ["<|image_pad|>" * number for number in numbers]
        prompt = start + "".join(mark + part for mark, part in zip(marks, parts, strict=True))
        tokens = self.tokenizer([prompt], **options)
        is_image = tokens["input_ids"] == self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        return BatchFeature({**tokens, **features, "mm_token_type_ids": is_image.int()})


def seen(images: list[Image.Image]) -> list[SeenImage]:
    assert FIBO2_REFERENCES.in_text is not None
    size = FIBO2_REFERENCES.in_text.size
    return [SeenImage(each, size(Size(each.height, each.width))) for each in images]


@contextmanager
def small_references() -> Iterator[None]:
    """Give references a smaller area in the pipeline and in the family."""
    of_pipeline = BriaFibo2ImageProcessor.get_image_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "_FIBO2_PX", AREA_PX)
        patch.setattr(
            BriaFibo2ImageProcessor,
            "get_image_size",
            lambda self, aspect_ratio, area: of_pipeline(self, aspect_ratio, AREA_PX),
        )
        yield


class Fibo2Case(Case):
    pipeline_class = BriaFibo2Pipeline
    targets: ClassVar[list[str]] = MODULES

    def make(self, folder: Path) -> None:
        make_tiny_bria_fibo2(folder)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        pipe = super().pipeline(folder, processor=None, **parts)
        pipe.register_modules(processor=Processor(folder / "processor"))
        return pipe

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        bundles, mask = pipe.encode_prompt(caption or fibo2.DEFAULT_NEGATIVE_PROMPT)
        assert mask is None
        assert torch.equal(bundles[:, 0], bundles[:, 3])
        embedding = torch.cat(list(bundles[:, 1:].unbind(1)), dim=2)
        return {"text_embedding": embedding, "text_mask": torch.ones(embedding.shape[:2])}

    def pixels(self, pipe: Any, image: np.ndarray[Any, Any]) -> torch.Tensor:
        height, width = image.shape[:2]
        ((pixels,), _) = pipe.image_processor.preprocess(Image.fromarray(image), height, width)
        return pixels

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        (latent,) = pipe.prepare_image_latents([pixels], 1, "cpu", torch.float32)
        return pipe._patchify_latents(latent)

    def context(self, pipe: Any, micro: MicroInput, sample: slice) -> list[torch.Tensor]:
        """Return the latents of one sample's references."""
        return []

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, without a mask."""
        predictions: list[torch.Tensor] = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            injected = text[:length].split(3 * WIDTH, dim=1)
            latent = pipe._unpatchify_latents(noisy[index : index + 1])
            prediction = pipe.transformer(
                latent,
                micro.timesteps[index : index + 1] / 1000,
                torch.stack([injected[2], *injected])[None],
                context_latents=self.context(pipe, micro, slice(index, index + 1)),
            ).sample
            predictions.append(pipe._patchify_latents(prediction))
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{module.replace('.', '_')}" for module in MODULES}


class Fibo2EditCase(Fibo2Case):
    """Bria FIBO 2 with two references, which are the same for all samples."""

    drawing: ClassVar[dict[str, Any]] = {"image": pictures(2)}

    def __init__(self) -> None:
        self.seen = seen(pictures(2))

    @property
    def seen_in_negative(self) -> list[SeenImage]:
        return []

    def sections(self, folder: Path, photos: Path) -> dict[str, Any]:
        self.files: list[Path] = []
        for number, image in enumerate(pictures(2)):
            (folder / f"{number}").mkdir()
            files = [folder / f"{number}" / f"{photo.stem}.png" for photo in photos.iterdir()]
            for file in files:
                image.save(file)
            self.files.append(files[0])
        its_references = [{"path": str(file.parent), "resolution": 96} for file in self.files]
        dataset = {"name": "photos", "path": str(photos), "references": its_references}
        training = settings(folder, photos, folder)["training"]
        prompt = {"prompt": "a cat", "references": [str(file) for file in self.files]}
        return {"datasets": [dataset], "training": {**training, "sample_prompts": [prompt]}}

    def text_spec(self, entries: RecipeEntries, caption: str) -> EntrySpec:
        images, _ = file_images(entries, self.files)
        return entries.text_spec(caption, images=images if caption else None)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        if not caption:
            return super().embed(pipe, caption)
        _, copies = pipe.image_processor.preprocess(pictures(2))
        bundles, _ = pipe.encode_prompt(caption, image=copies)
        embedding = torch.cat(list(bundles[:, 1:].unbind(1)), dim=2)
        return {"text_embedding": embedding, "text_mask": torch.ones(embedding.shape[:2])}

    def context(self, pipe: Any, micro: MicroInput, sample: slice) -> list[torch.Tensor]:
        return [pipe._unpatchify_latents(each[sample]) for each in micro.conditions["references"]]


def conditions(family: WorkerFamily, caption: str, images: list[Image.Image] | None = None) -> dict[str, Any]:
    encoders = family.text.load("float32", "cpu")
    return family.text.stack([family.text.encode_caption(encoders, caption, seen(images or [])).tensors])


def calls_of(pipe: Any, prompt: str, **arguments: Any) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Draw a picture, and return arguments and result of each call of the transformer."""
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    hook = pipe.transformer.register_forward_hook(
        lambda _, __, given, result: calls.append((given, result[0])), with_kwargs=True
    )
    size = {"height": 64, "width": 96, "num_inference_steps": 3, **arguments}
    pipe(prompt, **size, generator=torch.Generator().manual_seed(1))
    hook.remove()
    return calls


def check_calls(
    family: WorkerFamily, pipe: Any, drawn: list[tuple[dict[str, Any], torch.Tensor]], given: dict[str, Any]
) -> None:
    """Training calls the transformer with the arguments of the pipeline, and returns its prediction."""
    for arguments, result in drawn:
        ours: list[dict[str, Any]] = []
        hook = pipe.transformer.register_forward_pre_hook(
            lambda _, __, own, ours=ours: ours.append(own), with_kwargs=True
        )
        noisy = pipe._patchify_latents(arguments["hidden_states"])
        with torch.no_grad():
            prediction = family.denoiser.predict(pipe.transformer, noisy, 1000 * arguments["timestep"], given)
        hook.remove()
        (own,) = ours
        assert own.keys() == arguments.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, arguments[name], rtol=0.0, atol=1e-5)
        torch.testing.assert_close(prediction, pipe._patchify_latents(result), **TOLERANCE)
