from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import polars as pl
import psutil
import pytest
import torch

from pipeline.trained_lora.inputs import TrainingInputs
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.worker.engine import StepOutcome
from pipeline.trained_lora.worker.metrics import JsonLines, MetricsLog, peak_memory_bytes
from pipeline.trained_lora.worker.paired_validation import PairedLoss
from pipeline.trained_lora.worker.validation import ValidationLoss
from tests.pipeline.disk_calls import DiskCalls

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


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


class Tracker:
    """Trackers that keep what they would send."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))


OUTCOME = StepOutcome(0.5, 2.0, 1e-4, stop=False, losses=(0.25, 0.75), timesteps=(10.0, 900.0))


def logged_run(make_project: Callable[..., Project], *, sync: bool) -> tuple[RunLayout, Tracker, TrainingJob]:
    """Log the second step and a validation loss of a run whose first image is held out."""
    project = make_project(batch_size=2, gradient_accumulation=1)
    job, layout, tracker = project.job(), RunLayout(project.recipe.output_dir / "run"), Tracker()
    is_first = pl.int_range(pl.len()) == 0
    inputs = TrainingInputs(job.inputs.table.with_columns(held_out=is_first))
    job = replace(job, inputs=inputs)
    with closing(MetricsLog(layout, inputs, cast("Any", tracker))) as log:
        log.step(job.plan()[1], OUTCOME, 0.123456)
        log.validation(
            2,
            ValidationLoss(0.4, (0.3, 0.5), {"photos/a.jpg": 0.5, "photos/b.jpg": 0.3}),
            PairedLoss(0.25, 0.125),
        )
        if sync:
            log.sync()
    return layout, tracker, job


def test_a_step_and_a_validation_loss_are_logged_with_all_their_numbers(
    make_project: Callable[..., Project],
) -> None:
    layout, tracker, job = logged_run(make_project, sync=False)
    batch = job.plan()[1]
    (line,) = read_metrics(layout.metrics, 9)
    numbers = {"loss": 0.5, "learning_rate": 1e-4, "grad_norm": 2.0, "seconds": 0.1235}
    memory = line.pop("memory_bytes")
    assert line == {"step": 1, "epoch": batch.epoch, "samples": 2, **numbers}
    assert memory > 0

    (samples,) = read_metrics(layout.sample_losses, 9)
    trained = [item.variant_id for item in job.inputs if not item.held_out]
    places = [trained.index(slot.variant_id) for slot in batch.slots()]
    by_sample = {"samples": places, "timesteps": [10.0, 900.0], "losses": [0.25, 0.75]}
    assert samples == {"step": 1, **by_sample}
    (validated,) = read_metrics(layout.validation, 9)
    assert validated.pop("by_image") == [0.5, 0.3]
    assert validated == {
        "step": 2,
        "loss": 0.4,
        "by_level": [0.3, 0.5],
        "trained_loss": 0.25,
        "gap": 0.125,
    }

    (step, values), validation = tracker.logged
    assert step == 2, "trackers count the steps done"
    speed = values.pop("samples_per_second")
    assert speed == pytest.approx(2 / 0.123456)
    assert values == {**numbers, "memory_bytes": memory}
    assert validation == (2, {"validation_loss": 0.4, "validation_gap": 0.125})


@pytest.mark.parametrize("sync", [False, True])
def test_R01_all_files_of_metrics_are_on_disk_before_a_checkpoint(
    make_project: Callable[..., Project], disk_calls: DiskCalls, sync: bool
) -> None:
    layout = logged_run(make_project, sync=sync)[0]
    files = (layout.metrics, layout.sample_losses, layout.validation)
    assert [disk_calls.is_synced(file) for file in files] == [sync] * 3


def test_the_peak_memory_of_the_host_is_in_bytes() -> None:
    assert not torch.cuda.is_initialized()
    resident = psutil.Process().memory_info().rss
    assert resident <= 1.01 * peak_memory_bytes(), "the peak is below the memory that is used now"
    if sys.platform == "linux":
        # The kernel updates the two counters at slightly different moments.
        assert peak_memory_bytes() == pytest.approx(peak_of_kernel(), rel=5e-4)


def peak_of_kernel() -> int:
    """Return the peak memory of this process in bytes as Linux states it, in kB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def test_a_line_can_be_read_immediately_and_a_complete_file_gets_no_blank_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    for number in (1, 2):
        with closing(JsonLines(path)) as log:
            log.append({"step": number})
            assert path.read_bytes().splitlines()[-1] == b'{"step": %d}' % number
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_partial_line_of_one_byte_is_terminated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{")
    append(path, (0, 1.0))
    assert losses(path, 1) == [(0, 1.0)]


def test_a_step_that_takes_no_measurable_time_is_logged(make_project: Callable[..., Project]) -> None:
    project = make_project(batch_size=2, gradient_accumulation=1)
    job, layout, tracker = project.job(), RunLayout(project.recipe.output_dir / "run"), Tracker()
    with closing(MetricsLog(layout, job.inputs, cast("Any", tracker))) as log:
        log.step(job.plan()[0], OUTCOME, 0.0)
    assert tracker.logged[0][1]["samples_per_second"] == pytest.approx(2e9)
