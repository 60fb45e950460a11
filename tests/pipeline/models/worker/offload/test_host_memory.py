from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.models.worker.offload.host_memory import OwnMemory, training_memory
from tests.pipeline.models.worker.offload.shared_process import SIZES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")


@pytest.mark.parametrize("num_machines", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_two_processes_of_a_machine_read_the_same_bytes_from_memory_that_they_map_once(
    tmp_path: Path, num_machines: int
) -> None:
    module = "tests.pipeline.models.worker.offload.shared_process"
    size = 2 * num_machines
    processes = [
        subprocess.Popen([sys.executable, "-m", module, str(tmp_path), str(rank), str(size)])
        for rank in range(size)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0] * size

    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(size)]
    for one, other in zip(results[::2], results[1::2], strict=True):
        assert one["equal"] == other["equal"] == [True, True]
        assert one["mapped"].keys() == other["mapped"].keys()
        assert sorted(size["Rss"] for size in one["mapped"].values()) == [4, -(-SIZES[0] // 4096) * 4]
        for result in (one, other):
            assert result["open"] == 0
            mapped = result["mapped"].items()
            assert [each for each in mapped if abs(each[1]["Pss"] - each[1]["Rss"] / 2) > 1] == []
    files = [set(result["mapped"]) for result in results[::2]]
    assert len(set.union(*files)) == sum(map(len, files)), "two machines map the same memory"


def test_a_single_process_holds_its_own_copy() -> None:
    memory = training_memory(torch.device("cpu"))
    assert isinstance(memory, OwnMemory)
    part = torch.arange(10, dtype=torch.uint8)
    copy = memory.hold(part)
    part.zero_()
    assert copy.tolist() == list(range(10))
