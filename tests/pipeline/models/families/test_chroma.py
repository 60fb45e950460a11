from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ChromaPipeline

from demo.tiny_models import make_tiny_chroma
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.models.worker.inference import PictureSettings
from pipeline.recipe import TimestepSettings, TrainingSettings, project_root
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.noise import make_noise_scheduler, noise_levels
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import draw_picture

# diffusers' Chroma imports a class from a deprecated path.
pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")

DOUBLE = ("img_attn_qkv", "img_attn_proj", "img_mlp_0", "img_mlp_2")
DOUBLE += tuple(layer.replace("img", "txt") for layer in DOUBLE)


class CutPadding(ChromaPipeline):
    """The pipeline without padding or mask: a caption has its own tokens and one padding token."""

    def _get_t5_prompt_embeds(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        embedding, mask = super()._get_t5_prompt_embeds(*args, **kwargs)
        return embedding[:, : int(mask.sum())], None


class ChromaCase(Case):
    pipeline_class = CutPadding
    targets = (
        r"transformer_blocks\.\d+\.(attn\.(to|add)_[qkv](_proj)?|attn\.to_out\.0|attn\.to_add_out"
        r"|ff(_context)?\.net\.(0\.proj|2))|single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out)"
    )

    def make(self, folder: Path) -> None:
        make_tiny_chroma(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, mask = ChromaPipeline._get_t5_prompt_embeds(pipe, caption)
        return {"text_embedding": embedding, "text_mask": mask}

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, without padding; tokens are 2x2 patches by row, channels first."""
        height, width = noisy.shape[2:]
        ids = [[0.0, row, column] for row in range(height // 2) for column in range(width // 2)]
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            patches = torch.nn.functional.unfold(noisy[index : index + 1], 2, stride=2).transpose(1, 2)
            seen = text[: int(micro.conditions["text_mask"][index].sum())]
            tokens = pipe.transformer(
                patches,
                seen[None],
                micro.timesteps[index : index + 1] / 1000,
                torch.tensor(ids),
                torch.zeros(len(seen), 3),
            ).sample
            predictions.append(torch.nn.functional.fold(tokens.transpose(1, 2), (height, width), 2, stride=2))
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        double = {f"lora_unet_double_blocks_{block}_{layer}" for block in range(2) for layer in DOUBLE}
        single = {f"lora_unet_single_blocks_{block}_linear{layer}" for block in range(2) for layer in (1, 2)}
        return double | single


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(ChromaCase())


def test_the_mask_passes_one_padding_token(tmp_path: Path) -> None:
    make_tiny_chroma(tmp_path)
    family = load_family(tmp_path)
    encoded = family.text.encode_caption(family.text.load("float32", "cpu"), "a cat")
    assert encoded.num_tokens == 3
    assert encoded.tensors["text_mask"].tolist() == [1.0] * 4 + [0.0] * 508


def test_a_schedule_with_beta_sigmas_needs_no_additional_package(tmp_path: Path) -> None:
    make_tiny_chroma(tmp_path)
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_beta_sigmas": True}))
    family = load_family(tmp_path)
    assert family.noise.load_scheduler().config.use_beta_sigmas
    encoders = family.text.load("float32", "cpu")
    text, empty = (family.text.encode_caption(encoders, caption).tensors for caption in ("a cat", ""))
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    preview = family.drawing.draw(pipeline, text, empty, PictureSettings(Size(64, 64), steps=2, seed=1))
    pipe = ChromaCase().pipeline(tmp_path)
    expected = draw_picture(ChromaCase(), pipe, guidance_scale=family.spec.guidance_scale)
    np.testing.assert_allclose(np.asarray(preview) / 255, expected, atol=0.6 / 255)
    project = tomllib.loads((project_root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "scipy" in "\n".join(project["dependencies"])  # optional in diffusers


def test_E07_an_added_mask_gives_another_prediction_and_gradient_than_a_boolean_one(tmp_path: Path) -> None:
    make_tiny_chroma(tmp_path)
    family = load_family(tmp_path)
    text = family.text.stack(
        [family.text.encode_caption(family.text.load("float32", "cpu"), "a cat").tensors]
    )
    denoiser = family.denoiser.load("float32", "cpu").requires_grad_(True)
    noisy = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    patches = torch.nn.functional.unfold(noisy, 2, stride=2).transpose(1, 2)
    ids = torch.tensor([[0.0, row, column] for row in range(4) for column in range(4)])

    def call(embedding: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Call the transformer without the family's code."""
        text_ids = torch.zeros(embedding.shape[1], 3)
        time = torch.tensor([0.5])
        tokens = denoiser(patches, embedding, time, ids, text_ids, mask).sample
        return torch.nn.functional.fold(tokens.transpose(1, 2), (8, 8), 2, stride=2)

    def gradient(prediction: torch.Tensor) -> torch.Tensor:
        weight = denoiser.transformer_blocks[0].attn.to_q.weight
        return torch.autograd.grad(prediction.square().sum(), weight, retain_graph=True)[0]

    predicted = family.denoiser.predict(denoiser, noisy, torch.tensor([500.0]), text)
    cut = call(text["text_embedding"][:, :4], None)
    added = call(text["text_embedding"], torch.cat([text["text_mask"], torch.ones(1, len(ids))], dim=1))
    torch.testing.assert_close(predicted, cut, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient(predicted), gradient(cut), rtol=1e-4, atol=1e-6)
    similarity = torch.nn.functional.cosine_similarity
    assert (added - cut).norm() / cut.norm() > 1e-2
    assert similarity(gradient(added).flatten(), gradient(cut).flatten(), dim=0) < 0.99


def test_padding_changes_nothing_and_has_finite_gradients_in_half_precision(tmp_path: Path) -> None:
    make_tiny_chroma(tmp_path)
    family = load_family(tmp_path)
    text = family.text.stack(
        [family.text.encode_caption(family.text.load("float32", "cpu"), "a cat").tensors]
    )
    other = {**text, "text_embedding": text["text_embedding"].clone()}
    other["text_embedding"][:, 4:] = 7.0
    denoiser = family.denoiser.load("bfloat16", "cpu").requires_grad_(True)
    noisy = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    first, second = (
        family.denoiser.predict(
            denoiser, noisy, torch.tensor([500.0]), {name: tensor.bfloat16() for name, tensor in each.items()}
        )
        for each in (text, other)
    )
    assert torch.equal(first, second)
    second.square().sum().backward()
    gradients = {name: each.grad for name, each in denoiser.named_parameters() if each.grad is not None}
    assert len(gradients) > 50
    assert [name for name, gradient in gradients.items() if not gradient.isfinite().all()] == []


def test_noise_levels_have_the_density_of_the_original_training_code_without_a_shift(tmp_path: Path) -> None:
    """2 - 7.7 (x - 1/2)^2 over 1,000 points, as `create_distribution` of lodestone-rock/flow computes it."""
    make_tiny_chroma(tmp_path)
    family = load_family(tmp_path)
    uniform = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    levels = noise_levels(uniform, TimestepSettings(), family.spec.noise.density)
    scheduler = make_noise_scheduler(family, TrainingSettings())
    small, large = (family.noise.timesteps(scheduler, levels, (16, edge, edge)) for edge in (32, 128))
    assert torch.equal(small, large)
    torch.testing.assert_close(small.double() / 1000, levels, rtol=0, atol=1e-6)

    places = torch.linspace(0, 1, 1000, dtype=torch.float64)
    weights = -7.7 * (places - 0.5) ** 2 + 2
    for below in (0.05, 0.1, 0.25, 0.5, 0.9):
        expected = weights[places < below].sum() / weights.sum()
        assert float((levels < below).double().mean()) == pytest.approx(float(expected), abs=2e-3)

    # A recipe's own shift and density still apply.
    own = TrainingSettings.model_validate({"timesteps": {"shift": 3.0, "density": "uniform"}})
    half = torch.tensor([0.5], dtype=torch.float64)
    assert torch.equal(noise_levels(half, own.timesteps, family.spec.noise.density), half)
    shifted = family.noise.timesteps(make_noise_scheduler(family, own), half, (16, 128, 128))
    assert shifted.item() == pytest.approx(750.0)
