from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.tiny_models import TINY
from pipeline.models.worker.family import load_family

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

MIXED = {
    "Stable Diffusion 3 and 3.5": ["float32", "float32", "bfloat16"],
    "FLUX.1 dev": ["float32", "bfloat16"],
    "Kandinsky 5 (image)": ["bfloat16", "float32"],
}
"""Kinds of models with CLIP and language models, and the dtype of each text encoder with "auto"."""


@pytest.mark.parametrize("kind", MIXED)
def test_auto_loads_each_encoder_in_its_own_dtype_and_embeds_almost_as_in_float32(
    tmp_path: Path, kind: str
) -> None:
    TINY[kind](tmp_path / "tiny")
    family = load_family(tmp_path / "tiny")
    encoders = family.text.load("auto", "cpu")
    roles = [role for role in family.text_roles() if role.startswith("text_encoder")]
    dtypes = [str(next(getattr(encoders, role).parameters()).dtype) for role in roles]
    assert dtypes == [f"torch.{dtype}" for dtype in MIXED[kind]]

    expected = family.text.encode_caption(family.text.load("float32", "cpu"), "a red cat").tensors
    for name, tensor in family.text.encode_caption(encoders, "a red cat").tensors.items():
        values = (tensor.float().flatten(), expected[name].flatten())
        assert float(torch.nn.functional.cosine_similarity(*values, dim=0)) > 0.999


@pytest.mark.parametrize("kind", TINY)
def test_every_kind_of_model_embeds_with_default_dtypes_almost_as_in_float32(
    tmp_path: Path, kind: str
) -> None:
    TINY[kind](tmp_path / "tiny")
    family = load_family(tmp_path / "tiny")
    expected = family.text.encode_caption(family.text.load("float32", "cpu"), "a red cat").tensors
    tensors = family.text.encode_caption(family.text.load("auto", "cpu"), "a red cat").tensors
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        values = (tensor.float().flatten(), expected[name].flatten())
        assert float(torch.nn.functional.cosine_similarity(*values, dim=0)) > 0.99, name


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_a_chatglm_stored_in_half_precision_runs_in_the_default_dtype(tmp_path: Path, stored: str) -> None:
    """Its file has a floating-point buffer, the frequencies of the rotary embedding."""
    TINY["Kolors"](tmp_path / "tiny")
    file = tmp_path / "tiny" / "text_encoder" / "model.safetensors"
    weights = {name: weight.to(getattr(torch, stored)) for name, weight in load_file(file).items()}
    assert "rotary_pos_emb.inv_freq" in weights
    save_file(weights, file, {"format": "pt"})

    family = load_family(tmp_path / "tiny")
    encoders = family.text.load("auto", "cpu")
    assert encoders.text_encoder.rotary_pos_emb.inv_freq.dtype == torch.bfloat16
    expected = type(encoders.text_encoder).from_pretrained(file.parent, dtype=torch.bfloat16)
    encoded = family.text.encode_caption(encoders, "a red cat").tensors
    encoders.text_encoder = expected
    for name, tensor in family.text.encode_caption(encoders, "a red cat").tensors.items():
        assert torch.equal(encoded[name], tensor), name


def test_C05_a_caption_of_exactly_the_limit_is_not_cut_and_one_more_token_is(tiny_sd: Path) -> None:
    family = load_family(tiny_sd)
    encoders, limit = family.text.load("float32", "cpu"), family.max_length()
    num_words = limit - len(("start mark", "end mark"))
    fits, longer = (
        family.text.count_tokens(encoders, "tokenizer", " ".join("a" * number))
        for number in (num_words, num_words + 1)
    )
    assert fits == (limit, 0, None)
    assert longer == (limit + 1, 1, 2 * num_words)
