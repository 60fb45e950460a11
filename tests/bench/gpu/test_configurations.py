"""Configurations of published models against their published numbers of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.configurations import PUBLISHED
from bench.gpu.published import NUM_WEIGHTS
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.memory.skeletons import skeleton

# diffusers' Chroma imports a class from a deprecated path; its ChatGLM calls a deprecated function of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

EXACT = {
    "SDXL": NUM_WEIGHTS["SDXL"]["unet"],
    "FLUX.1 dev": NUM_WEIGHTS["FLUX.1"]["transformer"],
}

BILLIONS = {
    "Stable Diffusion 1.5": 0.86,
    "Stable Diffusion 2.1": 0.866,
    "Kolors": 2.6,
    "Wan 2.1 1.3B": 1.42,
    "Sana 1.5 1.6B": 1.6,
    "Anima": 1.96,
    "SD3 medium": 2.03,
    "SD3.5 medium": 2.24,
    "Lumina Image 2.0": 2.6,
    "FLUX.2 klein base 4B": 3.9,
    "Kandinsky 5 Lite": 6.0,
    "Z-Image": 6.15,
    "CogView4 6B": 6.4,
    "AuraFlow 0.3": 6.8,
    "Bria FIBO 2": 8.1,
    "Bria FIBO": 8.3,
    "Chroma1": 8.9,
    "FLUX.1 schnell": 11.9,
    "Krea 2": 12.9,
    "Qwen-Image 2.1": 7.1,
    "ERNIE-Image": 8.0,
    "Ideogram 4": 9.3,
    "HiDream I1": 17.0,
    "Qwen-Image": 20.4,
    "FLUX.2 dev": 32.2,
}
"""Billions of weights of the denoisers, as their authors and users state them."""

TEXT_BILLIONS = {
    "Stable Diffusion 2.1": 0.34,
    "Kolors": 6.2,
    "Wan 2.1 1.3B": 5.68,
    "Sana 1.5 1.6B": 2.6,
    "Anima": 0.6,
    "FLUX.2 klein base 4B": 4.0,
    "Kandinsky 5 Lite": 8.3,
    "CogView4 6B": 8.8,
    "AuraFlow 0.3": 1.2,
    "Bria FIBO 2": 4.4,
    "Bria FIBO": 3.1,
    "Krea 2": 4.4,
    "Qwen-Image 2.1": 8.8,
    "Ideogram 4": 8.15,  # without the output layer
    "ERNIE-Image": 3.8,
    "FLUX.2 dev": 23.6,
}
"""Billions of weights of `text_encoder`; language models are counted with their vision tower."""


def num_weights(name: str, folder: Path, role: str | None = None) -> int:
    published = next(each for each in PUBLISHED if each.name == name)
    family = load_family(published.write(folder))
    network = skeleton(family, role or family.spec.denoiser_name, "bfloat16")
    return sum(weight.numel() for weight in network.parameters())


@pytest.mark.parametrize("name", EXACT)
def test_a_denoiser_has_the_published_number_of_weights(name: str, tmp_path: Path) -> None:
    assert num_weights(name, tmp_path) == EXACT[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", BILLIONS)
def test_a_denoiser_has_about_the_size_that_the_model_is_known_by(name: str, tmp_path: Path) -> None:
    assert num_weights(name, tmp_path) == pytest.approx(BILLIONS[name] * 1e9, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT_BILLIONS)
def test_a_text_encoder_has_about_the_size_that_it_is_known_by(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_JIT", "0")
    assert num_weights(name, tmp_path, "text_encoder") == pytest.approx(TEXT_BILLIONS[name] * 1e9, rel=0.02)


def test_animas_transformer_and_conditioner_have_the_size_of_the_published_file(tmp_path: Path) -> None:
    # anima-aesthetic-v1.1.safetensors has both in bfloat16, in 4.18 GB.
    roles = ("transformer", "text_conditioner")
    total = sum(num_weights("Anima", tmp_path / role, role) for role in roles)
    assert 2 * total == pytest.approx(4.18e9, abs=5e6)


def test_every_published_model_is_compared() -> None:
    assert {each.name for each in PUBLISHED} == set(EXACT) | set(BILLIONS)
