from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import BriaFibo2Pipeline
from diffusers.pipelines.bria_fibo2 import pipeline_bria_fibo2 as fibo2
from PIL import Image
from transformers import AutoTokenizer, BatchFeature

from demo.tiny_models import make_tiny_bria_fibo2
from pipeline.errors import BucketError
from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.trained_lora.worker.loader import MicroInput
from tests.pipeline.models.families.complete_job import TOLERANCE, Case

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

JSON_CAPTION = """{
    "short_description": "a red cat",
    "objects": [{"description": "a cat", "location": ""}, {}],
    "lighting": {"conditions": "sun", "direction": null},
    "aesthetics": {"aesthetic_score": "high"},
    "preference_score": "low"
}"""
CLEANED = (
    '{"short_description":"a red cat","objects":[{"description":"a cat"}],"lighting":{"conditions":"sun"}}'
)


class Processor:
    """The real tokenizer, called as `Qwen3VLProcessor` documents for captions without images."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, text: list[str], images: None, **options: Any) -> BatchFeature:
        assert images is None
        return BatchFeature({**self.tokenizer(text, **options)})


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
            ).sample
            predictions.append(pipe._patchify_latents(prediction))
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{module.replace('.', '_')}" for module in MODULES}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(Fibo2Case())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[WorkerFamily, Any]:
    """Return the tiny model and its complete pipeline."""
    folder = tmp_path_factory.mktemp("base")
    make_tiny_bria_fibo2(folder)
    pipe = Fibo2Case().pipeline(folder)
    pipe.set_progress_bar_config(disable=True)
    return load_family(folder), pipe


def conditions(family: WorkerFamily, caption: str) -> dict[str, Any]:
    encoders = family.text.load("float32", "cpu")
    return family.text.stack([family.text.encode_caption(encoders, caption).tensors])


def calls_of(pipe: Any, prompt: str, **arguments: Any) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Draw a picture, and return arguments and result of each call of the transformer."""
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    hook = pipe.transformer.register_forward_hook(
        lambda _, __, given, result: calls.append((given, result[0])), with_kwargs=True
    )
    size = {"height": 64, "width": 96, "num_inference_steps": 3}
    pipe(prompt, **size, generator=torch.Generator().manual_seed(1), **arguments)
    hook.remove()
    return calls


@pytest.mark.parametrize("caption", ["a cat", JSON_CAPTION, "a <|image_pad|> cat", '["a list"]'])
def test_training_calls_the_transformer_as_each_step_of_the_pipeline_does(
    loaded: tuple[WorkerFamily, Any], caption: str
) -> None:
    family, pipe = loaded
    drawn = calls_of(pipe, caption, guidance_scale=1.0)
    assert len(drawn) == 3
    for given, result in drawn:
        ours: list[dict[str, Any]] = []
        hook = pipe.transformer.register_forward_pre_hook(
            lambda _, __, its, ours=ours: ours.append(its), with_kwargs=True
        )
        noisy = pipe._patchify_latents(given["hidden_states"])
        with torch.no_grad():
            prediction = family.denoiser.predict(
                pipe.transformer, noisy, 1000 * given["timestep"], conditions(family, caption)
            )
        hook.remove()
        (own,) = ours
        assert own.keys() == given.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, given[name], rtol=0.0, atol=1e-5)
        torch.testing.assert_close(prediction, pipe._patchify_latents(result), **TOLERANCE)

    levels = torch.linspace(1, 1 / 3, 3, dtype=torch.float64)
    timesteps = family.noise.timesteps(family.noise.load_scheduler(), levels, (32, 4, 6))
    torch.testing.assert_close(timesteps, pipe.scheduler.timesteps)


def test_the_empty_caption_is_the_negative_prompt_of_the_pipeline(loaded: tuple[WorkerFamily, Any]) -> None:
    family, pipe = loaded
    _, (guiding, _), *_ = calls_of(pipe, "a cat", guidance_scale=5.0)
    given = family.text.prompt_tensors(conditions(family, ""))
    torch.testing.assert_close(given["prompt_embeds"], guiding["encoder_hidden_states"], **TOLERANCE)


def test_a_json_caption_is_cleaned_as_in_the_pipeline(loaded: tuple[WorkerFamily, Any]) -> None:
    family, _ = loaded
    embeddings = [conditions(family, each)["text_embedding"] for each in (JSON_CAPTION, CLEANED)]
    assert torch.equal(*embeddings)
    assert json.loads(JSON_CAPTION) != json.loads(CLEANED)


def test_texts_in_a_json_caption_are_encoded_as_words_only(loaded: tuple[WorkerFamily, Any]) -> None:
    """The pipeline by default also shows the language model a picture of each text."""
    family, pipe = loaded
    caption = '{"short_description":"a page","text_render":[{"text":"cat"}]}'
    ((given, _), *_) = calls_of(pipe, caption, guidance_scale=1.0, render_text_images=False)
    ours = family.text.prompt_tensors(conditions(family, caption))["prompt_embeds"]
    torch.testing.assert_close(ours, given["encoder_hidden_states"], **TOLERANCE)


def test_sizes_are_limited_by_the_positions_of_the_transformer(loaded: tuple[WorkerFamily, Any]) -> None:
    family, _ = loaded
    assert family.size_multiple() == 16
    assert family.latent_shape(Size(64, 96)) == (32, 4, 6)
    assert family.latent_shape(Size(16, 2048)) == (32, 1, 128)
    with pytest.raises(BucketError, match="no edge may be longer than 2048 px"):
        family.latent_shape(Size(16, 2064))
