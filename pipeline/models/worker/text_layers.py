"""The layers of text encoders that stay on the GPU, and layers that are streamed while captions are encoded.

Text encoders compute forward passes only. Their values do not depend on where the weights are between uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from pipeline.log import Log, discard
from pipeline.models.worker.offload.streamed_blocks import (
    NUM_SLOTS,
    move_weights,
    repeated_blocks,
    spread_evenly,
    stream_blocks,
    streamed_blocks,
)

# An assumption. The memory forecast of a forward pass is below 0.9 GiB for all published text encoders.
MARGIN_BYTES = 2 * 2**30
"""Memory of a GPU that is not used for weights: CUDA's workspaces and the tensors of a forward pass."""

# Some encoders return the values after all layers, 0.2 GiB for 512 tokens of FLUX.2 dev. Those of three
# captions wait while the fourth is computed, within the margin above.
CAPTIONS_IN_STEP = 4
"""Number of captions that share each copy of a streamed layer."""

_GIB = 2**30


@dataclass(frozen=True)
class LayerOffload:
    """The recipe's `text.offload`, and what auto depends on.

    Attributes:
        setting: "auto", "none", or the number of each encoder's layers that stay on the device.
        free_bytes: Free memory of the GPU before the encoders are loaded; None on a CPU.
        say: Receives a line about each encoder that is streamed.
    """

    setting: Literal["auto", "none"] | int = "none"
    free_bytes: int | None = None
    say: Log = discard


ALL_ON_DEVICE = LayerOffload()
"""Text encoders without streamed layers."""


class EncoderSize:
    """Bytes of a text encoder's weights in the dtype that it computes in.

    Attributes:
        layers: Bytes of each repeated layer, by path.
        total: Bytes of all weights and buffers.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Measure a network on any device; `dtype` is the argument of `move_weights`."""
        self.layers = {name: _num_bytes(layer, dtype) for name, layer in repeated_blocks(network).items()}
        self.total = _num_bytes(network, dtype)

    def streamed(self, num_resident: int) -> int:
        """Return the bytes of the streamed layers."""
        return sum(self._streamed(num_resident))

    def on_device(self, num_resident: int) -> int:
        """Return the bytes on the device: all other weights, and the slots."""
        streamed = self._streamed(num_resident)
        slots = min(NUM_SLOTS, len(streamed)) * max(streamed, default=0)
        return self.total - sum(streamed) + slots

    def _streamed(self, num_resident: int) -> list[int]:
        return [self.layers[name] for name in spread_evenly(list(self.layers), num_resident)]


def resident_layers(
    sizes: Mapping[str, EncoderSize], setting: Literal["auto", "none"] | int, usable_bytes: int | None
) -> dict[str, int]:
    """Return the number of layers that stay on the device, for each encoder that is streamed.

    auto streams the largest encoder first, with as many layers on the device as fit into `usable_bytes`
    together with all encoders. On a CPU, `usable_bytes` is None, and auto streams nothing.
    """
    if isinstance(setting, int):
        return {role: setting for role, size in sizes.items() if setting < len(size.layers)}

    resident: dict[str, int] = {}
    if setting == "none" or usable_bytes is None:
        return resident
    on_device = {role: size.total for role, size in sizes.items()}
    for role, size in sorted(sizes.items(), key=lambda item: -item[1].total):
        num_layers = len(size.layers)
        # Streaming no more layers than the slots hold saves nothing.
        if sum(on_device.values()) <= usable_bytes or num_layers <= NUM_SLOTS:
            continue
        left = usable_bytes - sum(on_device.values()) + on_device[role]
        fewer = range(num_layers - NUM_SLOTS - 1, -1, -1)
        resident[role] = next((number for number in fewer if size.on_device(number) <= left), 0)
        on_device[role] = size.on_device(resident[role])
    return resident


def place_encoders(
    encoders: Mapping[str, tuple[nn.Module, torch.dtype | None]], device: torch.device, offload: LayerOffload
) -> None:
    """Move text encoders to the device, or some of their layers to host memory.

    The encoders are on the CPU; each comes with the dtype of `move_weights`.
    """
    sizes = {role: EncoderSize(network, dtype) for role, (network, dtype) in encoders.items()}
    usable_bytes = None if offload.free_bytes is None else offload.free_bytes - MARGIN_BYTES
    resident = resident_layers(sizes, offload.setting, usable_bytes)
    for role, (network, dtype) in encoders.items():
        if role not in resident:
            move_weights(network, device, dtype)
            continue
        size = sizes[role]
        text = streaming_text(role, size, resident[role], offload.setting)
        text += f": its weights take {size.total / _GIB:.1f} GiB"
        if usable_bytes is not None:
            text += f", and {max(0, usable_bytes) / _GIB:.1f} GiB of the GPU are usable for text encoders"
        offload.say(text)
        stream_blocks(network, resident[role], device, dtype)
        streamed = streamed_blocks(network)
        if streamed is not None and streamed.store.memory.refusal:
            offload.say(f"warning: text.offload, {role}: {streamed.store.memory.text()}")


def streaming_text(
    role: str, size: EncoderSize, num_resident: int, setting: Literal["auto", "none"] | int
) -> str:
    """Return which layers of an encoder are streamed."""
    num_layers = len(size.layers)
    return f"text.offload: {setting} streams {num_layers - num_resident} of {num_layers} layers of {role}"


def _num_bytes(network: nn.Module, dtype: torch.dtype | None) -> int:
    weights = sum(each.numel() * (dtype or each.dtype).itemsize for each in network.parameters())
    return weights + sum(each.numel() * each.element_size() for each in network.buffers())
