"""Memory of the stages that fill the cache: VAE and text encoders, their weights and one forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
    """Return (bytes of the VAE, peak bytes on the GPU) while images of one size are encoded.

    A batch is as large as the stage makes it; it shrinks if memory runs out.
    """
    vae = skeleton(family, "vae", dtype)
    count = max(1, GPU_BATCH_PX // (size.height * size.width))
    memory = LiveMemory(without=tensors_of(vae))
    with memory, CudaRules(None, count=memory.count):
        pixels = torch.empty(count, 3, size.height, size.width, device="meta")
        family.vae.posterior(vae, pixels)
    weights = num_bytes(tensors_of(vae))
    return weights, weights + memory.peak_bytes


def text_bytes(family: WorkerFamily, dtypes: Mapping[str, str]) -> tuple[int, int]:
    """Return (bytes of the largest text encoder, peak bytes on the GPU) while one caption is encoded.

    Args:
        family: Family of the base model. All of its text encoders are on the GPU together.
        dtypes: Dtype of each text encoder.
    """
    weights: list[int] = []
    passes: list[int] = []
    limits = family.token_limits()
    references, images = family.spec.references, family.text_images
    image_tokens = 0 if references is None or images is None else references.max_number * images.num_tokens
    for role, dtype in dtypes.items():
        network = text_encoder_skeleton(family, role, dtype)
        weights.append(num_bytes(tensors_of(network)))
        tokenizer = "processor" if "processor" in limits else role.replace("text_encoder", "tokenizer")
        passes.append(_pass_bytes(network, limits.get(tokenizer, CLIP_TOKENS) + image_tokens))
    return max(weights), sum(weights) + max(passes)


def _pass_bytes(network: nn.Module, num_tokens: int) -> int:
    """Return the peak bytes of the hidden states of all layers for one caption."""
    memory = LiveMemory(without=tensors_of(network))
    with memory, CudaRules(None, count=memory.count), torch.inference_mode():
        ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
        network(input_ids=ids, output_hidden_states=True)
    return memory.peak_bytes
