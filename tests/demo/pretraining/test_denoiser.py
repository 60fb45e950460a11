"""The UNet and its text encoder learn from latents that are encoded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from demo.pretraining.denoiser import EncodedWorld, load_world, train_denoiser
from demo.pretraining.export import export_model, loss_curve
from demo.pretraining.loop import Part, Stage
from demo.pretraining.networks import new_text_encoder, new_unet, new_vae, write_tokenizer

NUM_PICTURES = 40


@pytest.fixture
def vae() -> object:
    """A new VAE for each test, because an export converts it to float16."""
    torch.manual_seed(0)
    return new_vae()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def _load(vae: object, tokenizer: object, file: Path) -> EncodedWorld:
    return load_world(vae, tokenizer, file, seed=0, number=NUM_PICTURES)


def test_latents_are_scaled_to_unit_deviation_and_stored(
    vae: object, tokenizer: object, tmp_path: Path
) -> None:
    file = tmp_path / "world.safetensors"
    world = _load(vae, tokenizer, file)
    assert world.latents.shape == (NUM_PICTURES, 4, 16, 16)
    assert float(world.latents.std()) == pytest.approx(1.0)
    assert len(torch.unique(world.tokens, dim=0)) > NUM_PICTURES / 4

    modified_ns = file.stat().st_mtime_ns
    again = _load(vae, tokenizer, file)
    assert file.stat().st_mtime_ns == modified_ns
    assert torch.equal(again.latents, world.latents)
    assert torch.equal(again.tokens, world.tokens)


@pytest.mark.slow
def test_training_lowers_the_loss_and_the_exported_model_draws_and_is_scored(
    vae: object, tokenizer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.pretraining.export.NUM_PROMPTS", 2)
    monkeypatch.setattr("demo.pretraining.export.SEEDS", (0,))
    world = _load(vae, tokenizer, tmp_path / "world.safetensors")
    networks = {"unet": new_unet(), "text_encoder": new_text_encoder(tokenizer)}
    stage = Stage("denoiser", tmp_path, 6, 3e-3, log_every=2)
    train_denoiser(networks, world, stage, Part(seed=0))
    curve = loss_curve(stage)
    assert [line["step"] for line in curve] == [2, 4, 6]
    assert curve[-1]["loss"] < curve[0]["loss"]

    record = export_model(vae, networks, tokenizer, tmp_path / "model", provenance={"losses": curve})
    stored = json.loads((tmp_path / "model" / "provenance.json").read_text(encoding="utf-8"))
    assert stored == record
    assert stored["losses"] == curve
    assert [line["seed"] for line in stored["scores"]] == [0]
    assert stored["scores"][0]["concept"] <= 0.02

    drawing: Any = DiffusionPipeline.from_pretrained(tmp_path / "model")
    assert drawing("a red star", num_inference_steps=1, height=64, width=64).images
