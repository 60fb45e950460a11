"""Streamed blocks of a network: hooks that load a block's weights for forward, recompute and backward.

Autograd keeps tensors of the forward pass for the backward pass. A frozen weight among them refers to a slot,
which other blocks use in the meantime. There are two cases:

    no checkpointing    the weight's place in its block is saved instead, and looked up in the backward pass
    checkpointing       nothing is saved; the block is computed again, and its slot kept to its last gradient

Autograd runs the nodes of later operations first, so all gradients of a block come before the gradients of
earlier blocks, and the backward pass of one block ends when the backward pass of another begins.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pipeline.models.worker.offload.host_memory import HostMemory
from pipeline.models.worker.offload.host_store import HostStore, host_store
from pipeline.models.worker.offload.in_step import Block, is_in_step, wait_in_step
from pipeline.models.worker.offload.ring import Ring

NUM_SLOTS = 2
"""Number of blocks in the memory of the device: one in use, and one that is copied meanwhile."""

# "checkpointed" is the first pass inside a checkpoint, "recomputing" the second one, in the backward pass.
_Mode = Literal["plain", "checkpointed", "recomputing"]


@dataclass(frozen=True)
class _SavedWeight:
    """A view of a streamed weight, saved for the backward pass."""

    block: int
    offset: int  # in elements of the dtype, from the start of the block
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _SavedPackedWeight:
    """A packed weight of torchao, saved for the backward pass."""

    kind: Any
    parts: Mapping[str, Any]  # its tensors, or the `_SavedWeight` of each
    context: Any  # from `__tensor_flatten__`
    shape: torch.Size
    stride: tuple[int, ...]


class StreamedBlocks:
    """The blocks of a network with frozen weights on the host.

    Attributes:
        names: Paths of the blocks in the network.
        ring: Schedule of their copies.
        store: Their memory.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], store: HostStore, num_slots: int) -> None:
        """Register hooks on the blocks, which `store` already holds in the same order."""
        self.names = tuple(blocks)
        self.store = store
        self.ring = Ring(len(blocks), num_slots, store)
        self._mode: _Mode = "plain"
        self._saving: saved_tensors_hooks | None = None
        for number, block in enumerate(blocks.values()):
            # always_call, because an error in a block must not leave hooks on saved tensors behind.
            block.register_forward_pre_hook(self._before(number))
            block.register_forward_hook(self._after(number), with_kwargs=True, always_call=True)

    @contextmanager
    def loaded(self, name: str) -> Generator[None]:
        """Make the weights of a module readable within the context, if they are streamed."""
        numbers = [number for number, path in enumerate(self.names) if f"{name}.".startswith(f"{path}.")]
        for number in numbers:
            self.ring.forward_begins(number, with_backward=False)
        try:
            yield
        finally:
            for number in numbers:
                self.ring.forward_ends(number)

    def checkpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function, and let the backward pass compute its activations again, as diffusers does."""

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return self._in_mode("checkpointed"), self._in_mode("recomputing")

        return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)

    @contextmanager
    def _in_mode(self, mode: _Mode) -> Generator[None]:
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def _before(self, number: int) -> Callable[..., None]:
        def hook(_block: nn.Module, _inputs: tuple[Any, ...]) -> None:
            if self._mode == "recomputing":
                self.ring.backward_begins(number)
                return
            if is_in_step():
                wait_in_step(Block((id(self), number), partial(self.loaded, self.names[number])))
                return
            self.ring.forward_begins(number, with_backward=torch.is_grad_enabled())
            # Inside a checkpoint nothing is saved, and these hooks would replace the checkpoint's own.
            if torch.is_grad_enabled() and self._mode == "plain":
                self._saving = saved_tensors_hooks(self._save_of(number), self._restore)
                self._saving.__enter__()

        return hook

    def _after(self, number: int) -> Callable[..., None]:
        def begin_backward(_gradient: Tensor) -> None:
            self.ring.backward_begins(number)

        def hook(
            _block: nn.Module, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any], outputs: Any
        ) -> None:
            # In step, the block is still in use by other passes.
            if self._mode == "recomputing" or is_in_step():
                return
            if self._saving is not None:
                self._saving.__exit__(None, None, None)
                self._saving = None
            self.ring.forward_ends(number)

            # An input that the block returns unchanged belongs to an earlier block.
            passed_on = {id(each) for each in (*inputs, *named_inputs.values())}
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if torch.is_tensor(output) and output.requires_grad and id(output) not in passed_on:
                    output.register_hook(begin_backward)

        return hook

    def _save_of(self, number: int) -> Callable[[Tensor], Any]:
        def save(tensor: Tensor) -> Any:
            if hasattr(tensor, "__tensor_flatten__"):
                names, context = cast("Any", tensor).__tensor_flatten__()
                parts = {name: save(getattr(tensor, name)) for name in names}
                return _SavedPackedWeight(type(tensor), parts, context, tensor.shape, tensor.stride())
            # Activations and LoRA weights stay as they are; only views of the slot would be overwritten.
            if tensor.untyped_storage().data_ptr() != self._slot(number).untyped_storage().data_ptr():
                return tensor
            return _SavedWeight(
                number, int(tensor.storage_offset()), tensor.dtype, tensor.shape, tensor.stride()
            )

        return save

    def _slot(self, number: int) -> Tensor:
        return self.store.slots[self.ring.slot_of(number)]

    def _restore(self, saved: Any) -> Tensor:
        if isinstance(saved, _SavedPackedWeight):
            parts = {name: self._restore(part) for name, part in saved.parts.items()}
            return saved.kind.__tensor_unflatten__(parts, saved.context, saved.shape, saved.stride)
        if not isinstance(saved, _SavedWeight):
            return saved
        self.ring.backward_begins(saved.block)
        return self._slot(saved.block).view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)


def stream_blocks(
    network: nn.Module,
    num_resident: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    memory: HostMemory | None = None,
) -> None:
    """Keep `num_resident` of the repeated blocks on the device and stream all others.

    Call it before an adapter is added: it moves all weights that the network has, converted to `dtype` if
    it is given. `memory` holds the streamed blocks on the host; by default memory of this process.
    """
    blocks = repeated_blocks(network)
    # At even distances, so that a copy overlaps with the computation of the blocks between.
    names = spread_evenly(list(blocks), num_resident)
    if names:
        # The weights move to the host block by block, so that the device never holds the complete network.
        store = host_store(device, NUM_SLOTS, memory)
        for name in names:
            move_weights(blocks[name], device, dtype)
            store.add(list(blocks[name].parameters()))
        store.allocate()
        _STREAMED[network] = StreamedBlocks({name: blocks[name] for name in names}, store, NUM_SLOTS)
    move_weights(network, device, dtype)


def move_weights(network: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Move a network to a device, with weights and stored buffers converted one by one."""
    if dtype is not None:
        for weight in network.parameters():
            weight.data = weight.data.to(device, dtype)

    # ChatGLM rounds its rotary embedding to the dtype of its stored buffers, and does not run if it differs
    # from the weights' dtype. In float32, buffers keep their dtype, as when existing entries were encoded.
    if dtype in (torch.float16, torch.bfloat16):
        stored = network.state_dict()
        for name, buffer in network.named_buffers():
            if name in stored and buffer.is_floating_point():
                buffer.data = buffer.data.to(device, dtype)
    network.to(device)


def repeated_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks by their paths, as `compile_repeated_blocks` finds them."""
    # Stable Diffusion 3 and all networks of transformers name no repeated blocks. They name the modules that
    # `device_map` does not split, and the ones in a list are blocks.
    kinds = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or ()
    blocks: dict[str, nn.Module] = {}
    for name, module in network.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in blocks)
        is_in_list = any(part.isdigit() for part in name.split("."))
        if type(module).__name__ in kinds and is_in_list and not is_inside:
            blocks[name] = module
    return blocks


def streamed_names(network: nn.Module, num_resident: int) -> list[str]:
    """Return the paths of the repeated blocks that are streamed, at even distances."""
    return spread_evenly(list(repeated_blocks(network)), num_resident)


def spread_evenly(names: Sequence[str], num_resident: int) -> list[str]:
    """Return all names but `num_resident`, at even distances."""
    number, total = max(0, len(names) - num_resident), len(names)
    return [
        name for place, name in enumerate(names) if (place + 1) * number // total > place * number // total
    ]


# By network; weak, so that a network can be freed.
_STREAMED: WeakKeyDictionary[nn.Module, StreamedBlocks] = WeakKeyDictionary()


def streamed_blocks(network: nn.Module) -> StreamedBlocks | None:
    """Return the network's streamed blocks; None if all weights are on the device."""
    return _STREAMED.get(network)


def weights_loaded(network: nn.Module, name: str) -> AbstractContextManager[None]:
    """Return a context in which the base weights of a module can be read outside of its forward pass."""
    streamed = streamed_blocks(network)
    return nullcontext() if streamed is None else streamed.loaded(name)
