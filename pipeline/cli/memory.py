"""The memory forecast as text, for `latentline plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cli.conventions import echo

if TYPE_CHECKING:
    from pipeline.memory.job import Change, MemoryForecast

GIB = 2**30


def show_memory(memory: MemoryForecast) -> None:
    """Print the peak memory of each stage, whether training fits, and the changes that make it fit."""
    echo(f"{'memory, computed':20} {'GPU':>10} {'host':>10}")
    for stage in memory.stages:
        note = f"   {stage.note}" if stage.note else ""
        echo(f"  {stage.stage:18} {_gib(stage.device_bytes):>10} {_gib(stage.host_bytes):>10}{note}")

    if memory.card is None or memory.usable_bytes is None:
        echo("This machine has no GPU; compare with one of 24 GB with --vram 24.")
    elif memory.change is None:
        echo(f"Training fits into {memory.card}: about {_gib(memory.usable_bytes)} of it are usable.")
    else:
        usable = _gib(memory.usable_bytes)
        echo(f"Training does not fit into {memory.card}: about {usable} of it are usable.")
        _show_change(memory.change)
    _show_host(memory)


def _show_host(memory: MemoryForecast) -> None:
    """Print a warning if one process of a stage needs more than the memory of this machine."""
    stage = max(memory.stages, key=lambda stage: stage.host_bytes)
    if stage.host_bytes <= memory.machine_bytes:
        return
    needed, available = _gib(stage.host_bytes), _gib(memory.machine_bytes)
    echo(
        f"warning: {stage.stage} needs {needed} of the host's memory per process, but this machine has "
        f"{available}"
    )
    if stage.stage == "train":
        echo(
            "  fix: set training.quantize: int8 or nf4, keep more blocks on the GPU if training.offload is "
            "set, or use a machine with more memory"
        )
    else:
        echo("  fix: use a machine with more memory")


def _show_change(change: Change) -> None:
    if not change.settings:
        echo("  fix: lower buckets.resolution or training.lora.rank, or use a larger GPU")
        return
    changes = ", ".join(change.settings)
    if change.fits:
        echo(f"  cheapest change that fits: {changes} (about {_gib(change.device_bytes)})")
    else:
        echo(f"  least memory: {changes} (about {_gib(change.device_bytes)}), which does not fit either")
        echo("  fix: lower buckets.resolution or training.lora.rank, or use a larger GPU")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
