"""`training.offload: auto` and `text.offload: auto`, resolved from the free memory of a GPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.images.geometry import Size
from pipeline.models.worker.offload.streamed_blocks import streamed_blocks
from pipeline.models.worker.text_layers import MARGIN_BYTES, EncoderSize, LayerOffload, place_encoders
from pipeline.processes.worker.devices import free_bytes, free_memory
from pipeline.trained_lora.worker.memory.resident_blocks import RESERVED_BYTES, resident_blocks
from tests.gpu.memory_limit import memory_left
from tests.gpu.shallow_models import shallow

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NARROW = {"num_attention_heads": 4}
"""A sixth of FLUX.1's width, for CPUs."""


@contextmanager
def free_on(device: str, num_bytes: int) -> Generator[int]:
    """Fill the GPU until about `num_bytes` are free, and yield the number; on a CPU, only yield it."""
    free_memory()
    if (free := free_bytes(device)) is None:
        yield num_bytes
        return
    if free < num_bytes:
        pytest.skip(f"needs {num_bytes / 2**30:.1f} GiB of free GPU memory")
    ballast = torch.empty(free - num_bytes, dtype=torch.uint8, device=device)
    free = free_bytes(device)
    assert free is not None
    yield free
    del ballast
    free_memory()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_the_blocks_that_auto_keeps_train_within_the_memory_that_was_free(
    device: str, tmp_path: Path, *, checkpointing: bool
) -> None:
    on_gpu = device == "cuda"
    model = shallow(
        "FLUX.1 dev",
        tmp_path,
        Size(1024, 1024) if on_gpu else Size(128, 128),
        {} if on_gpu else NARROW,
        offload="auto",
        gradient_checkpointing=checkpointing,
    )
    forecast = model.forecast
    most, least = (
        forecast.memory(replace(forecast.variant, offload=offload)).device for offload in ("none", 0)
    )
    assert least < most
    usable = (most + least) // 2
    denoiser = model.denoiser(device).to("cpu")
    with free_on(device, usable + RESERVED_BYTES) as free:
        resident = resident_blocks(model.family, model.recipe, free)
        assert isinstance(resident.offload, int), resident.reason
        assert resident.num_blocks == 6
        needed = forecast.memory(replace(forecast.variant, offload=resident.offload)).device
        assert needed <= free - RESERVED_BYTES

        # On a CPU the blocks are streamed within the memory of the host, which is not limited.
        if on_gpu:
            with memory_left(device, free - RESERVED_BYTES // 2):
                model.train(denoiser, device, offload=resident.offload, begin=torch.cuda.synchronize)
        else:
            model.train(denoiser, device, offload=resident.offload, begin=lambda: None)
    streamed = streamed_blocks(denoiser)
    assert streamed is not None
    assert {slot.device.type for slot in streamed.store.slots} == {device}


def test_a_training_that_fits_streams_no_blocks(device: str, tmp_path: Path) -> None:
    model = shallow("FLUX.1 dev", tmp_path, Size(128, 128), NARROW, offload="auto")
    needed = model.forecast.memory(model.forecast.variant).device
    with free_on(device, needed + RESERVED_BYTES + 2**26) as free:
        resident = resident_blocks(model.family, model.recipe, free)
    assert resident.offload == "none", resident.reason


def test_the_layers_that_text_offload_auto_keeps_give_the_same_embeddings(device: str) -> None:
    encoders = [_t5() for _ in range(2)]
    size = EncoderSize(encoders[0], torch.float32)
    usable = (size.total + size.on_device(0)) // 2
    messages: list[str] = []
    place = torch.device(device)
    with free_on(device, usable + MARGIN_BYTES) as free:
        offload = LayerOffload("auto", free, messages.append)
        place_encoders({"text_encoder": (encoders[0], torch.float32)}, place, offload)
        tokens = torch.arange(1, 9, device=device)[None]
        with torch.no_grad():
            actual = encoders[0](tokens)[0].cpu()
    place_encoders({"text_encoder": (encoders[1], torch.float32)}, place, LayerOffload("none"))
    with torch.no_grad():
        expected = encoders[1](tokens)[0].cpu()

    assert "streams" in messages[0]
    streamed = streamed_blocks(encoders[0])
    assert streamed is not None
    assert {slot.device.type for slot in streamed.store.slots} == {device}
    tolerance = 0.0 if device == "cpu" else 1e-3  # some kernels of CUDA add in any order
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _t5() -> nn.Module:
    """Return a T5 encoder of 8 layers of 6 MiB; equal weights in each call."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=384, d_ff=1024, d_kv=64, num_heads=6, num_layers=8)
    return T5EncoderModel(config).eval().requires_grad_(False)
