"""Work of the main process alone that runs a denoiser in which all processes must take part.

main process      previews, output change        announces each forward pass: its inputs, then None
other processes   repeat the announced passes    gather the same weights, and ignore the result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list, send_to_device

if TYPE_CHECKING:
    from torch import nn

    from pipeline.trained_lora.worker.engine import Engine


def run_on_main(engine: Engine, work: Callable[[], object]) -> None:
    """Run `work` on the main process; every process calls it.

    If the denoiser is sharded, the remaining processes repeat its forward passes, which must be inside of
    `Objective.evaluation`.
    """
    is_main = engine.accelerator.is_main_process
    if not engine.is_sharded:
        if is_main:
            work()
        return
    if not is_main:
        _repeat_passes(engine)
        return

    # The hook must come before the one that gathers weights.
    hook = engine.denoiser.register_forward_pre_hook(_announce, with_kwargs=True, prepend=True)
    try:
        work()
    finally:
        hook.remove()

        # After an error of the work too, because all processes but this one wait for the next announcement.
        broadcast_object_list([None])


def _announce(_denoiser: nn.Module, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> None:
    # A pickled tensor of a GPU would be restored on the sender's GPU.
    broadcast_object_list([send_to_device((inputs, named_inputs), "cpu")])


def _repeat_passes(engine: Engine) -> None:
    """Run the forward passes that the main process announces, until it announces none."""
    while True:
        message: list[Any] = [None]
        broadcast_object_list(message)
        if message[0] is None:
            return
        inputs, named_inputs = send_to_device(message[0], engine.accelerator.device)
        with engine.objective.evaluation():
            engine.denoiser(*inputs, **named_inputs)
