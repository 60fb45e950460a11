"""Memory of the stages that fill the cache: VAE and text encoders, their weights and one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from pipeline.models.worker.text_layers import MARGIN_BYTES, EncoderSize, resident_layers, streaming_text
from pipeline.trained_lora.worker.memory.cuda_rules import CudaRules
from pipeline.trained_lora.worker.memory.live_memory import LiveMemory
from pipeline.trained_lora.worker.memory.skeletons import (
    num_bytes,
    skeleton,
    tensors_of,
    text_encoder_skeleton,
)
from pipeline.vae_latents.worker.vae_batches import GPU_BATCH_PX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from pipeline.images.geometry import Size
    from pipeline.models.worker.family import WorkerFamily

CLIP_TOKENS = 77
"""Length of captions for encoders without a limit of their own, which are CLIPs for the pooled embedding."""


def latents_bytes(family: WorkerFamily, size: Size, dtype: str) -> tuple[int, int]:
    """Return (bytes of the VAE, peak bytes on the GPU) while images of one size are encoded."""
    vae = skeleton(family, "vae", dtype)

    # A batch is as large as the stage makes it before memory runs out.
    count = max(1, GPU_BATCH_PX // (size.height * size.width))
    memory = LiveMemory(without=tensors_of(vae))
    with memory, CudaRules(None, count=memory.count):
        pixels = torch.empty(count, 3, size.height, size.width, device="meta")
        family.vae.posterior(vae, pixels)
    weights = num_bytes(tensors_of(vae))
    return weights, weights + memory.peak_bytes


@dataclass(frozen=True)
class TextMemory:
    """Memory while one caption is encoded.

    Attributes:
        device: Peak bytes on the GPU.
        host: Bytes of the largest text encoder, which is read from its file, and of all streamed layers.
        notes: Which layers are streamed, one line per encoder.
    """

    device: int
    host: int
    notes: tuple[str, ...]


def text_memory(
    family: WorkerFamily,
    dtypes: Mapping[str, str],
    *,
    offload: Literal["auto", "none"] | int = "none",
    card_bytes: int | None = None,
) -> TextMemory:
    """Return the memory of all text encoders of a base model, which are on the GPU together.

    `offload` is the value of `text.offload`; with `card_bytes` None, auto streams nothing.
    """
    sizes: dict[str, EncoderSize] = {}
    # The encoders' weights are on the GPU together, but only one of them computes at a time.
    passes: list[int] = []
    limits = family.token_limits
    references, images = family.spec.references, family.text_images
    image_tokens = 0 if references is None or images is None else references.max_number * images.num_tokens
    for role, dtype in dtypes.items():
        network = text_encoder_skeleton(family, role, dtype)
        sizes[role] = EncoderSize(network)
        tokenizer = "processor" if "processor" in limits else role.replace("text_encoder", "tokenizer")
        limit = limits.get(tokenizer, CLIP_TOKENS)
        if type(network).__name__.startswith("CLIP"):
            limit = min(limit, CLIP_TOKENS)  # HiDream's pipeline cuts captions for its CLIPs at less
        passes.append(_pass_bytes(network, family.text.inputs_of_pass(role, limit + image_tokens)))

    resident = resident_layers(sizes, offload, None if card_bytes is None else card_bytes - MARGIN_BYTES)
    weights = [size.on_device(resident.get(role, len(size.layers))) for role, size in sizes.items()]
    streamed = sum(sizes[role].streamed(number) for role, number in resident.items())
    return TextMemory(
        device=sum(weights) + max(passes),
        host=max(size.total for size in sizes.values()) + streamed,
        notes=tuple(streaming_text(role, sizes[role], number, offload) for role, number in resident.items()),
    )


def _pass_bytes(network: nn.Module, inputs: Mapping[str, Any]) -> int:
    memory = LiveMemory(without=tensors_of(network))
    with memory, CudaRules(None, count=memory.count), torch.inference_mode():
        network(**inputs)
    return memory.peak_bytes
