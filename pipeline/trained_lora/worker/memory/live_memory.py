"""The memory of tensors that are alive while a network computes on the meta device.

Meta tensors have shapes and dtypes but no values, so that a step of a model of any size runs on any machine.
Operators create and free them in the same order as on a GPU. Their storages are counted from creation to
release, with PyTorch's documented extension points only:

    forward, and recomputation of checkpointed blocks    torch.overrides.TorchFunctionMode
    tensors that autograd keeps for the backward pass    torch.autograd.graph.saved_tensors_hooks
    gradients during the backward pass                   hooks of torch.autograd.graph.Node

An operator's internal buffers are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.overrides import TorchFunctionMode


class LiveMemory(TorchFunctionMode):
    """Counts the bytes of the meta tensors that operators create within the context.

    Attributes:
        live_bytes: Bytes of the tensors that are alive now.
        peak_bytes: Maximum of `live_bytes` so far.
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        """Start with no tensors; tensors in `without`, such as a network's weights, are never counted."""
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0

        # The storages themselves are held too, so that Python gives their ids to no other storage.
        self._seen = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in without}
        self._alive: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(result)
        return result

    def count(self, result: Any) -> None:
        """Count a tensor, or all tensors in a list or tuple, until they are released."""
        if isinstance(result, Tensor):
            self._count_tensor(result)
        elif isinstance(result, list | tuple):
            for each in result:
                self.count(each)

    def _count_tensor(self, tensor: Tensor) -> None:
        if tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or key in self._seen:
            return

        # Python keeps one object per storage, which is released with it.
        num_bytes = storage.nbytes()
        self._alive.add(key)
        weakref.finalize(storage, self._release, key, num_bytes)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self.live_bytes -= num_bytes

    @contextmanager
    def counting_saved(self) -> Generator[None]:
        """Also count the tensors that autograd keeps in a forward pass."""

        def keep(tensor: Tensor) -> Tensor:
            self.count(tensor)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def backward(
        self, loss: Tensor, network: nn.Module, modes: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Run the backward pass of a loss, and count its gradients; call it outside of the modes.

        `modes` opens the modes of the forward pass, for checkpointed blocks of `network` that are computed
        again.
        """
        for node in _nodes(loss):
            node.register_prehook(self.count)
            node.register_hook(lambda inputs, outputs: self.count(inputs))
        with _within_modules(network, modes):
            loss.backward()


@contextmanager
def _within_modules(network: nn.Module, modes: Callable[[], AbstractContextManager[Any]]) -> Generator[None]:
    """Open the modes whenever a module of the network is called."""
    # Autograd runs `backward` without the active modes, and with it the checkpointed blocks.
    stack: list[ExitStack] = []

    def enter(module: nn.Module, args: Any) -> None:
        opened = ExitStack()

        # Modules contain modules. The outermost one opens the modes, so that each operator is counted once.
        if not stack:
            opened.enter_context(modes())
        stack.append(opened)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop().close()

    hooks = [module.register_forward_pre_hook(enter) for module in network.modules()]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in network.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _nodes(loss: Tensor) -> set[Node]:
    assert loss.grad_fn is not None
    nodes, pending = {loss.grad_fn}, [loss.grad_fn]
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                pending.append(node)
    return nodes
