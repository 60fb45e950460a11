from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psutil
import torch

from pipeline.trained_lora.run_folder import read_metrics
from pipeline.trained_lora.worker.metrics import JsonLines, peak_memory_bytes


def append(path: Path, *lines: tuple[int, float]) -> None:
    with closing(JsonLines(path)) as log:
        for step, loss in lines:
            log.append({"step": step, "loss": loss})


def losses(path: Path, num_steps: int) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(path, num_steps)]


def test_the_last_line_of_a_step_wins_and_steps_beyond_the_plan_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    append(path, (0, 1.0), (1, 2.0), (2, 3.0))
    append(path, (1, 2.5), (2, 3.5))
    assert losses(path, 3) == [(0, 1.0), (1, 2.5), (2, 3.5)]
    assert losses(path, 2) == [(0, 1.0), (1, 2.5)]


def test_a_partial_line_of_a_killed_process_does_not_damage_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, (0, 1.0), (1, 2.0))
    path.write_bytes(path.read_bytes()[:-7])
    append(path, (1, 2.0))
    assert losses(path, 9) == [(0, 1.0), (1, 2.0)]


def test_a_loss_reads_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, (0, 0.1 + 0.2))
    assert losses(path, 1) == [(0, 0.1 + 0.2)]


def test_a_missing_file_has_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none", 4) == []


def test_the_peak_memory_of_the_host_is_in_bytes() -> None:
    assert not torch.cuda.is_initialized()
    resident = psutil.Process().memory_info().rss
    assert resident <= 1.01 * peak_memory_bytes(), "the peak is below the memory that is used now"
    assert peak_memory_bytes() <= psutil.virtual_memory().total
