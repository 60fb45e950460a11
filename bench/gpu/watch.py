"""Measure the seconds, peak memory and idle share of work on a device.

The idle share is the part of the wall time without kernels or copies on the device, as recorded by CUPTI
through torch's profiler. Recording slows down launches, so the seconds of a recorded pass are not used and
its idle share is precise to about two digits. On a CPU, operators are recorded instead of kernels.
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
    """Measures one pass of one side of an experiment.

    Attributes:
        device: Device of the work.
        recorded: Whether the device's activity is recorded.
        reading: `seconds` and `bytes`, and the idle `share` of a recorded pass.
    """

    def __init__(self, device: str, *, recorded: bool = False) -> None:
        """Create a watch for `device`. Pass `recorded` to measure the idle share."""
        self.device = device
        self.recorded = recorded
        self.reading: dict[str, float] = {}

    @contextmanager
    def work(self, *, without_bytes: int = 0) -> Generator[None]:
        """Measure the block, including all device work that it starts.

        Args:
            without_bytes: Device memory held for other purposes, which is subtracted.
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

        device_type = DeviceType.CUDA if self.device.startswith("cuda") else DeviceType.CPU
        return event.device_type == device_type


def settle(device: str) -> None:
    """Wait until the device has finished all submitted work."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def held_bytes(device: str) -> int:
    """Return the allocated GPU memory, or 0 on a CPU, where it cannot be attributed."""
    import torch

    return torch.cuda.memory_allocated() if device.startswith("cuda") else 0


def release() -> None:
    """Free unreferenced memory, including cached GPU memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _interval(event: Any) -> tuple[float, float]:
    """Return (start, end) in microseconds."""
    return event.time_range.start, event.time_range.end


def _reset_peak(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def _peak_bytes(device: str) -> int:
    """Return the peak memory: on a GPU since the reset, on a CPU since the process started."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
