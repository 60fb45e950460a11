from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo.tiny_models import TINY
from pipeline.models.worker.family import load_family

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
