"""What a piece of work takes of a device: seconds, memory at its peak, and the share of time it lies idle.

Idle is what the device's own record of its kernels and copies leaves over of the wall's time. The record is
CUPTI's, which torch's profiler reads; a pass that is recorded is slower to launch, so that its seconds do not
count, and of a share no more than the second digit. On a CPU the operators' own times stand in for kernels.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.profiler import profile

KIB = 1024


class Watch:
    """Looks on while one side of an experiment works, once.

    Attributes:
        device: Where it works.
        recorded: Whether the device's work is recorded.
        reading: `seconds` and `bytes`; of a recorded pass `share`, of the time without work on the device.
    """

    def __init__(self, device: str, *, recorded: bool = False) -> None:
        """On `device`; `recorded` for the idle share."""
        self.device = device
        self.recorded = recorded
        self.reading: dict[str, float] = {}

    @contextmanager
    def work(self, *, without_bytes: int = 0) -> Generator[None]:
        """What is done inside is measured, to the device's last kernel.

        Args:
            without_bytes: Memory of the device that is held for something else, and not counted.
        """
        gc.collect()
        settle(self.device)
        _reset_peak(self.device)
        with self._record() as record:
            start_s = time.perf_counter()
            yield
            settle(self.device)
            seconds = time.perf_counter() - start_s
        self.reading = {"seconds": seconds, "bytes": float(_peak_bytes(self.device) - without_bytes)}
        if record is not None:
            events = filter(self._counts, record.events() or ())
            busy_s = covered(map(_interval, events)) * 1e-6
            self.reading["share"] = max(0.0, 1.0 - busy_s / seconds)

    def _record(self) -> AbstractContextManager[profile | None]:
        if not self.recorded:
            return nullcontext()
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.startswith("cuda")
        return profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])

    def _counts(self, event: Any) -> bool:
        from torch.autograd import DeviceType

        wanted = DeviceType.CUDA if self.device.startswith("cuda") else DeviceType.CPU
        return event.device_type == wanted


def settle(device: str) -> None:
    """Wait until the device has done all it was given."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def held_bytes(device: str) -> int:
    """Memory in use on a GPU; on a CPU 0, where nobody knows whose it is."""
    import torch

    return torch.cuda.memory_allocated() if device.startswith("cuda") else 0


def release() -> None:
    """Give back what nothing refers to any more, so that the next can have it."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _interval(event: Any) -> tuple[float, float]:
    """In microseconds."""
    return event.time_range.start, event.time_range.end


def _reset_peak(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def _peak_bytes(device: str) -> int:
    """Of the GPU since the reset; of a CPU's process since its start."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
