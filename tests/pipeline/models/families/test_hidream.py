from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import HiDreamImagePipeline

from demo.tiny_models import make_tiny_hidream
from demo.tiny_models.parts import write_json
from pipeline.errors import BucketError, FamilyError
from pipeline.images.geometry import Size
from pipeline.models.diffusers_folder import read_json
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case
from tests.tensor_differences import differing_tensors

BROUGHT = ("tokenizer_4", "text_encoder_4")
LAYERS = ("to_q", "to_k", "to_v", "to_out")


class Sized(HiDreamImagePipeline):
    """A pipeline that draws the requested size instead of scaling it to its default area."""

    def __call__(self, *args: Any, height: int, width: int, **options: Any) -> Any:
        self.default_sample_size = math.sqrt(height * width) / 8 * 1.000001
        return super().__call__(*args, height=height, width=width, **options)


class HiDreamCase(Case):
    pipeline_class = Sized
    targets: ClassVar[list[str]] = [f"attn1.{layer}{side}" for layer in LAYERS for side in ("", "_t")]

    def make(self, folder: Path) -> None:
        make_tiny_hidream(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        t5, _, llama, _, pooled, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False)
        return {
            "text_embedding": t5,
            "llama_embeddings": llama.transpose(0, 1),
            "pooled_text_embedding": pooled,
        }

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, and negate the output as the pipeline does."""
        predictions = []
        for index, llama in enumerate(micro.conditions["llama_embeddings"]):
            one = slice(index, index + 1)
            prediction = pipe.transformer(
                noisy[one],
                micro.timesteps[one],
                micro.conditions["text_embedding"][one],
                torch.stack([layer[None] for layer in llama]),
                micro.conditions["pooled_text_embedding"][one],
            )
            predictions.append(-prediction.sample)
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        double, single = (
            [f"{kind}_stream_blocks.{block}.block.attn1.{layer}" for block in range(2) for layer in LAYERS]
            for kind in ("double", "single")
        )
        modules = [*double, *(f"{module}_t" for module in double), *single]
        return {f"lora_unet_{module.replace('.', '_')}" for module in modules}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(HiDreamCase())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hidream")
    make_tiny_hidream(folder)
    return folder


@pytest.mark.parametrize("size", [(64, 64), (32, 96)], ids=str)
def test_training_mode_predicts_the_same_and_experts_get_gradients(tiny: Path, size: tuple[int, int]) -> None:
    family = load_family(tiny)
    denoiser = family.denoiser.load("float32", "cpu")
    random = torch.Generator().manual_seed(1)
    noisy = torch.randn(2, 16, size[0] // 8, size[1] // 8, generator=random, requires_grad=True)
    shapes = {name: (2, *shape) for name, shape in family.text_shapes().items()}
    conditions = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    expected = family.denoiser.predict(denoiser, noisy, torch.tensor([300.0, 700.0]), conditions)
    denoiser.train()
    actual = family.denoiser.predict(denoiser, noisy, torch.tensor([300.0, 700.0]), conditions)
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-5)
    experts = {name: module for name, module in denoiser.named_modules() if name.endswith("ff_i.experts")}
    weights = [weight for module in experts.values() for weight in module.parameters()]
    for weight in weights:
        weight.requires_grad_(True)
    family.denoiser.predict(denoiser, noisy, torch.tensor([300.0, 700.0]), conditions).sum().backward()
    assert experts
    assert [
        name for name, module in experts.items() if all(w.grad is None for w in module.parameters())
    ] == []


def test_a_published_model_requires_a_user_provided_llama(tiny: Path, tmp_path: Path) -> None:
    base, llama = shutil.copytree(tiny, tmp_path / "base"), tmp_path / "llama"
    index = read_json(base / "model_index.json")
    for role in BROUGHT:
        shutil.move(base / role, llama / role)
        index[role] = [None, None]
    write_json(base / "model_index.json", index)
    expected = r"(?s)lack tokenizer_4.*model\.components\.tokenizer_4.*Llama-3\.1"
    with pytest.raises(FamilyError, match=expected):
        load_family(base).fingerprint_parts("text")
    family = load_family(base, {role: llama / role for role in BROUGHT})
    assert [part.role for part in family.fingerprint_parts("text")] == [
        part.role for part in load_family(tiny).fingerprint_parts("text")
    ]
    encoders = [each.text.load("float32", "cpu") for each in (family, load_family(tiny))]
    from_folder, complete = (
        each.text.encode_caption(pipe, "a cat").tensors
        for each, pipe in zip((family, load_family(tiny)), encoders, strict=True)
    )
    assert differing_tensors(from_folder, complete) == []


def test_images_that_are_not_square_must_fit_the_padded_sequence(tiny: Path) -> None:
    family = load_family(tiny)
    assert family.latent_shape(Size(256, 256)) == (16, 32, 32)
    assert family.latent_shape(Size(64, 256)) == (16, 8, 32)
    message = r"(?s)128x256 \(height x width\) is too large.*set it to at most 128"
    with pytest.raises(BucketError, match=message):
        family.latent_shape(Size(128, 256))
