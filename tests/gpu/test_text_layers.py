"""Text encoders on a GPU with streamed layers give the embeddings of those without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo.tiny_models import TINY
from pipeline.models.worker.family import load_family
from pipeline.models.worker.offload.streamed_blocks import streamed_blocks
from pipeline.models.worker.text_layers import LayerOffload

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("kind", ["FLUX.1 dev", "FLUX.2 dev", "Qwen-Image"])
def test_streamed_layers_give_the_same_embeddings(device: str, tmp_path: Path, kind: str) -> None:
    TINY[kind](tmp_path / "tiny")
    family = load_family(tmp_path / "tiny")
    resident, streamed = (family.text.load("auto", device, LayerOffload(setting)) for setting in ("none", 0))
    layers = streamed_blocks(streamed.text_encoder)
    assert layers is not None
    assert {slot.device.type for slot in layers.store.slots} == {device}

    tolerance = 0.0 if device == "cpu" else 1e-3  # some kernels of CUDA add in any order
    for caption in ("a red cat", "", "two dogs"):
        expected = family.text.encode_caption(resident, caption).tensors
        actual = family.text.encode_caption(streamed, caption).tensors
        assert actual.keys() == expected.keys() != set()
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=tolerance, atol=tolerance)
