"""Which device a process gets, and what is said where there is none for it or memory runs out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pipeline.errors import LaunchError, TrainingError
from pipeline.processes.worker.devices import gpu_of, is_out_of_memory, memory_ran_out, own_device, why_no_gpu

MORE_THAN_THERE_IS = 2**60

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's GPU can be used")


def test_each_process_has_the_gpu_of_its_place() -> None:
    assert [gpu_of(process, 3) for process in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]


def test_a_process_too_many_is_told_how_many_gpus_there_are() -> None:
    with pytest.raises(LaunchError, match="process 3 has no GPU to itself: 2 GPUs are visible") as caught:
        gpu_of(2, 2)
    assert "num_processes" in caught.value.where
    assert "set it to 2" in caught.value.fix


@without_gpu
def test_without_a_gpu_it_is_the_cpu() -> None:
    assert own_device() == "cpu"


@without_gpu
def test_a_driver_without_a_torch_that_uses_it_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    assert why_no_gpu([driver]) is None, "no driver, no GPU: nothing is wrong"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.10\n", encoding="utf-8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reason = why_no_gpu([driver]) or ""
    expected = "without CUDA.*CUDA build" if torch.version.cuda is None else "cannot use.*driver"
    assert re.search(expected, reason)
    assert torch.__version__ in reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_no_gpu([driver]) is None, "hidden on purpose"


def test_memory_that_really_runs_out_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_only_memory_that_runs_out_is_explained() -> None:
    def explained(seen: str) -> TrainingError:
        return TrainingError("too large", where="here", fix="smaller")

    with pytest.raises(TrainingError, match="too large"), memory_ran_out(explained):
        torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)
    with pytest.raises(ValueError, match="else"), memory_ran_out(explained):
        raise ValueError("something else")
