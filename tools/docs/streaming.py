"""Computed slow-down of streamed blocks on cards of different sizes, for docs/hardware.md.

A step is compared with one of the same settings and all blocks on the GPU. Times of computation follow from
counted operations and a card's published peak, times of copies from bytes and the bandwidth of PCIe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.models.worker.offload.streamed_blocks import repeated_blocks, streamed_names
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.trained_lora.worker.memory.resident_blocks import RESERVED_BYTES, most_resident
from pipeline.trained_lora.worker.memory.skeletons import skeleton
from pipeline.trained_lora.worker.memory.training import TrainingForecast

if TYPE_CHECKING:
    from torch import nn

    from bench.gpu.configurations import Published
    from pipeline.models.worker.family import WorkerFamily

PCIE_BYTES_PER_S = 16e9 * 16 * 128 / 130 / 8
"""PCIe 4.0 x16 in one direction: 16 GT/s per lane, 16 lanes, 128 of 130 bits are data (PCI-SIG)."""

PCIE_SHARE = 0.8
"""Share of the bandwidth that copies from pinned memory reach. An assumption."""

COMPUTE_SHARES = (0.5, 1.0)
"""Shares of the published peak that training may reach: an assumption, and the upper bound."""

BF16_BYTES = 2
"""Bytes per weight."""

OPERATIONS_PER_CYCLE = 4
"""Operations per CUDA core and cycle of matrix products in bf16 with float32 sums, on GeForce RTX 40.

Four give the peaks of NVIDIA's Ada whitepaper, 165.2 TFLOPS for the RTX 4090 and 97.5 for the RTX 4080.
"""

ATTENTION_BACKWARD = 2.5
"""Operations of a fused attention's backward pass relative to its forward pass: five products for two."""


@dataclass(frozen=True)
class Card:
    """A GPU, by NVIDIA's specifications.

    Attributes:
        name: Name.
        gigabytes: Memory in GB.
        cores: Number of CUDA cores.
        boost_hz: Boost clock.
    """

    name: str
    gigabytes: int
    cores: int
    boost_hz: float

    @property
    def peak_flops(self) -> float:
        """Matrix products in bf16 with float32 sums, without sparsity, in operations per second."""
        return self.cores * self.boost_hz * OPERATIONS_PER_CYCLE


CARDS = (
    Card("RTX 4070", 12, 5888, 2.475e9),
    Card("RTX 4080", 16, 9728, 2.505e9),
    Card("RTX 4090", 24, 16384, 2.52e9),
)


@dataclass(frozen=True)
class Block:
    """One streamed block, with the blocks after it that stay on the GPU.

    Attributes:
        copy_s: Duration of its copy.
        forward_s: Duration of its forward pass.
        backward_s: Duration of its recomputation and backward pass.
        resident_forward_s: Duration of the forward passes of the resident blocks after it.
        resident_backward_s: Duration of their recomputation and backward passes.
    """

    copy_s: float
    forward_s: float
    backward_s: float
    resident_forward_s: float = 0.0
    resident_backward_s: float = 0.0


def waiting_s(blocks: Sequence[Block]) -> float:
    """Return the time per training step in which computation waits for copies, with two slots.

    With blocks 0 to n - 1 in forward order:

        forward    sum of max(0, copy of i + 1 - forward pass of i), i = 1 to n - 2
        backward   sum of max(0, copy of i - 1 - backward pass of i), i = n - 2 to 1

    The first two blocks of each pass are in the slots already. The copy of any other block begins when the
    one before it is computed. The passes include resident blocks up to the next streamed one. If there are
    any, this is an upper bound: a copy in the forward pass may begin before them.
    """
    waits_s = 0.0
    for before, block, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        waits_s += max(0.0, after.copy_s - block.forward_s - block.resident_forward_s)
        waits_s += max(0.0, before.copy_s - block.backward_s - before.resident_backward_s)
    return waits_s


@dataclass(frozen=True)
class Work:
    """Operations of one block for one image.

    Attributes:
        products: Operations of its matrix products in the forward pass.
        attention: Operations of its attention in the forward pass.
        num_bytes: Bytes of its weights.
    """

    products: int
    attention: int
    num_bytes: int

    @property
    def forward(self) -> float:
        """Operations of the forward pass."""
        return self.products + self.attention

    @property
    def backward(self) -> float:
        """Operations of the recomputation and of the backward pass, without gradients of weights."""
        return self.forward + self.products + ATTENTION_BACKWARD * self.attention


def work_of(forecast: TrainingForecast, family: WorkerFamily, size: Size) -> dict[str, Work]:
    """Return the operations and bf16 bytes of each repeated block, in the order of the model."""
    denoiser = skeleton(family, family.spec.denoiser_name, "float32")
    blocks = repeated_blocks(denoiser)
    counter = FlopCounterMode(display=False)
    latent = torch.empty(1, *family.latent_shape(size), device="meta")
    with torch.no_grad(), counter:
        family.denoiser.predict(denoiser, latent, torch.empty(1, device="meta"), forecast.conditions(1))
    counts = {name.partition(".")[2]: by_operator for name, by_operator in counter.get_flop_counts().items()}
    return {name: _work(block, counts[name]) for name, block in blocks.items()}


def _work(block: nn.Module, by_operator: dict[Any, int]) -> Work:
    # Linear layers are addmm and mm. On the meta device, attention is two batched products.
    attention = sum(number for operator, number in by_operator.items() if "bmm" in str(operator))
    num_weights = sum(weight.numel() for weight in block.parameters())
    return Work(sum(by_operator.values()) - attention, attention, BF16_BYTES * num_weights)


def blocks_on(card: Card, work: Mapping[str, Work], streamed: Sequence[str], share: float) -> list[Block]:
    """Return the streamed blocks on a card that reaches a share of its peak."""
    flops, names = card.peak_flops * share, list(work)
    places = [names.index(name) for name in streamed]
    blocks: list[Block] = []
    for place, end in zip(places, [*places[1:], len(names)], strict=True):
        own, resident = work[names[place]], [work[name] for name in names[place + 1 : end]]
        blocks.append(
            Block(
                copy_s=own.num_bytes / (PCIE_BYTES_PER_S * PCIE_SHARE),
                forward_s=own.forward / flops,
                backward_s=own.backward / flops,
                resident_forward_s=sum(each.forward for each in resident) / flops,
                resident_backward_s=sum(each.backward for each in resident) / flops,
            )
        )
    return blocks


def slow_down(card: Card, work: Mapping[str, Work], streamed: Sequence[str], share: float) -> float:
    """Return the time that streaming adds to a step, relative to the time of its blocks without it."""
    computing_s = sum(each.forward + each.backward for each in work.values()) / (card.peak_flops * share)
    return waiting_s(blocks_on(card, work, streamed, share)) / computing_s


def streaming_lines(published: Published) -> list[str]:
    """Return the rows of the table: each card with `offload: auto` and with `offload: 0`."""
    with TemporaryDirectory() as folder:
        family = load_family(published.write(Path(folder) / "model"))
        size = Size(1024, 1024)
        forecast = TrainingForecast(family, training_recipe(family.model.path), size)
        work = work_of(forecast, family, size)
        denoiser = skeleton(family, family.spec.denoiser_name, "bfloat16")
        lines: list[str] = []
        for card in CARDS:
            usable_bytes = card.gigabytes * 2**30 - RESERVED_BYTES
            chosen = most_resident(forecast, forecast.variant, usable_bytes)[0]
            settings: list[Literal["none"] | int] = [chosen, 0]
            for offload in settings:
                streamed = [] if offload == "none" else streamed_names(denoiser, offload)
                needed_bytes = forecast.memory(replace(forecast.variant, offload=offload)).device
                added = [slow_down(card, work, streamed, share) for share in COMPUTE_SHARES]
                cells = [
                    f"{card.gigabytes} GB, {card.name}",
                    f"`{offload}`",
                    f"{needed_bytes / 2**30:.1f} GiB",
                ]
                cells += [f"{value:.0%}" for value in added]
                lines.append(f"| {' | '.join(cells)} |")
        return lines


LORA = {"rank": 16, "alpha": 16.0}
"""Adapter of the tables."""


def training_recipe(base: Path) -> Recipe:
    """Return the training of the tables in docs/hardware.md: checkpointing, batch size 1, rank 16, bf16."""
    return recipe_from_mapping(
        "hardware",
        {
            "datasets": [{"name": "images", "path": str(base.parent / "images")}],
            "output_dir": str(base.parent / "out"),
            "model": {"base": str(base)},
            "training": {
                "gradient_checkpointing": True,
                "batch_size": 1,
                "lora": {"rank": 16, "alpha": 16.0},
            },
            "accelerate": {"mixed_precision": "bf16"},
        },
    )
