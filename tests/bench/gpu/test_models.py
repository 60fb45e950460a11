"""The stored configurations give the same number of weights as the published models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu.models import MODELS, empty_network, fill, random_network
from bench.gpu.published import NUM_WEIGHTS
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family


@pytest.mark.parametrize(
    ("model", "role"),
    [(model, role) for model in MODELS for role in model.networks],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_network_has_the_published_number_of_weights(model: object, role: str) -> None:
    network = empty_network(*model.networks[role])
    assert sum(weight.numel() for weight in network.parameters()) == NUM_WEIGHTS[model.name][role]
    assert {(weight.device.type, weight.dtype) for weight in network.parameters()} == {
        ("meta", torch.bfloat16)
    }


def test_random_weights_keep_activations_near_one() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)), torch.nn.LayerNorm(256))
    fill(layers)
    out = layers[:-1](torch.randn(64, 256)).detach()
    assert 0.3 < float(out.std()) < 3.0
    assert torch.equal(layers[-1].weight, torch.ones(256))
    assert torch.equal(layers[-1].bias, torch.zeros(256))


def test_a_random_network_has_finite_weights() -> None:
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    network = random_network("transformers", "CLIPTextModel", config, device="cpu")
    assert [name for name, weight in network.named_parameters() if not torch.isfinite(weight).all()] == []


@pytest.mark.slow
def test_a_written_model_has_the_right_family_and_geometry_and_encodes_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the networks are smaller here; `write` creates all other files as for the full model."""
    for model, channels, multiple in zip(MODELS, (4, 16), (8, 16), strict=True):
        small = {
            role: (*network[:2], {**network[2], **SMALLER.get(role, {})})
            for role, network in model.networks.items()
        }
        monkeypatch.setitem(model.__dict__, "networks", small)
        model.write(tmp_path / model.name, "cpu")
        family = load_family(tmp_path / model.name)
        assert family.spec.name == {"SDXL": "Stable Diffusion XL", "FLUX.1": "FLUX.1"}[model.name]
        assert family.latent_shape(Size(1024, 1024)) == (channels, 128, 128)
        assert family.size_multiple() == multiple
        encoded = family.text.encode_caption(family.text.load("bfloat16", "cpu"), "a red cat")
        assert [name for name, each in encoded.tensors.items() if not torch.isfinite(each).all()] == []


SMALLER = {
    "vae": {"block_out_channels": (32, 32, 32, 32)},
    "text_encoder": {"num_hidden_layers": 1},
    "text_encoder_2": {
        "num_hidden_layers": 1,
        "num_layers": 1,
        "d_model": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 49408,
    },
    "unet": {"block_out_channels": (32, 64, 64), "transformer_layers_per_block": 1, "attention_head_dim": 8},
    "transformer": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2},
}
