"""Forward passes that share the copies of streamed blocks: all compute a block before the next one is copied.

    one by one   | copy 0 | A0 | copy 1 | A1 | copy 0 | B0 | copy 1 | B1 |
    in step      | copy 0 | A0   B0 | copy 1 | A1   B1 |

Each pass has a thread of its own, which stops before each streamed block. Only one thread runs at a time, and
each pass computes exactly what it computes alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

import torch

Result = TypeVar("Result")


class Block(NamedTuple):
    """A streamed block that a pass needs.

    Attributes:
        key: Equal for all passes that need the same block.
        loaded: Returns a context in which the block's weights are on the device.
    """

    key: Hashable
    loaded: Callable[[], AbstractContextManager[None]]


class _AbandonedError(BaseException):
    """Ends the thread of a pass after another pass has failed."""


class _Pass(Generic[Result]):
    """A pass in its thread.

    Attributes:
        block: Block that the pass waits for; None before it begins and after it has ended.
        error: Exception that has ended the pass.
    """

    def __init__(self, work: Callable[[], Result], device: int | None) -> None:
        self.block: Block | None = None
        self.error: BaseException | None = None
        self._results: list[Result] = []
        self._work = work
        self._device = device
        self._is_abandoned = False
        self._resumes, self._stops = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="pass in step", daemon=True)

    @property
    def result(self) -> Result:
        return self._results[0]

    def begin(self) -> None:
        """Run to the first streamed block or to the end."""
        self._thread.start()
        self._stops.acquire()

    def go_on(self) -> None:
        """Run to the next streamed block or to the end."""
        self._resumes.release()
        self._stops.acquire()

    def abandon(self) -> None:
        """End the thread of a pass that waits for a block."""
        if self.block is not None:
            self._is_abandoned = True
            self.go_on()

    def wait_for(self, block: Block) -> None:
        """Stop until the block is loaded; called in the pass's thread."""
        self.block = block
        self._stops.release()
        self._resumes.acquire()
        self.block = None
        if self._is_abandoned:
            raise _AbandonedError

    def _run(self) -> None:
        _OWN.running = self
        if self._device is not None:
            torch.cuda.set_device(self._device)  # each thread has its own current device
        try:
            self._results.append(self._work())
        except BaseException as err:  # the caller's thread raises it again
            self.error = err
        finally:
            self._stops.release()


_OWN = threading.local()


def is_in_step() -> bool:
    """Return whether this thread runs a pass of `run_in_step`."""
    return hasattr(_OWN, "running")


def wait_in_step(block: Block) -> None:
    """Wait in a pass of `run_in_step` until a block is loaded."""
    running: _Pass[Any] = _OWN.running
    running.wait_for(block)


def run_in_step(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Return the results of passes without gradients that use the same streamed blocks.

    An exception of a pass ends all passes, and is raised here.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    passes = [_Pass(work, device) for work in works]
    try:
        for each in passes:
            each.begin()
            _raise_error(each)
        while waiting := [each for each in passes if each.block is not None]:
            # Passes may differ in the blocks that they need, so the first one decides.
            first = waiting[0].block
            assert first is not None
            # As in a pass alone, which loads blocks within its own inference mode.
            with torch.inference_mode(), first.loaded():
                for each in waiting:
                    if each.block is not None and each.block.key == first.key:
                        each.go_on()
                        _raise_error(each)
    finally:
        for each in passes:
            each.abandon()
    return [each.result for each in passes]


def _raise_error(one: _Pass[Any]) -> None:
    if one.error is not None:
        raise one.error
