"""H03: two machines with their own disks, of which only machine 0 has the checkpoints."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.processes.worker.other_machines import SEEN_S
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import RunLayout
from tests.pipeline.trained_lora.equal_runs import assert_equal_runs
from tests.pipeline.trained_lora.rank_server import Rank, RankServer
from tests.pipeline.trained_lora.two_machines import copied_order, free_port, wait_for_steps

if TYPE_CHECKING:
    from conftest import Project

STEPS = 14


def start(server: RankServer, job: TrainingJob, disk: Path | None = None) -> list[Rank]:
    """Start two processes: on one machine, or with another disk for the second one."""
    order, port = job.write(), free_port()
    orders = [order, order if disk is None else copied_order(job, disk)]
    machines = 1 if disk is None else 2
    return [server.start(each, rank, port, machines=machines) for rank, each in enumerate(orders)]


@pytest.mark.timeout(600)
def test_H03_a_run_resumes_bit_for_bit_on_a_machine_that_lost_its_disk(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = make_project(steps=STEPS, checkpoint_every=4, gradient_accumulation=1)
    alone = project.changed("one_machine", num_processes=2).job()
    job = project.changed("two_machines", num_processes=2).job()
    disk = tmp_path / "disk"

    with RankServer(tmp_path) as server:
        assert [rank.end() for rank in start(server, alone)] == [0, 0]

        # Machine 1 dies: machine 0 ends at once, with an error that says what to do.
        ranks = start(server, job, disk)
        wait_for_steps(job, 6)
        ranks[1].kill()
        killed_s = time.monotonic()
        assert [rank.end() for rank in ranks] == [1, -9], ranks[0].text()
        assert time.monotonic() - killed_s < SEEN_S + 30
        error = json.loads(ranks[0].error.read_text(encoding="utf-8"))
        assert error["kind"] == "LaunchError"
        assert "another machine" in error["what"]
        assert "start the same commands again on all machines" in error["fix"]
        assert not list(disk.rglob("checkpoints")), "machine 1 has written to the run's folder"

        shutil.rmtree(disk)
        ranks = start(server, job, disk)
        assert [rank.end() for rank in ranks] == [0, 0], ranks[1].text()
    resumed_from = json.loads(RunLayout(job.folder).result.read_text(encoding="utf-8"))["resumed_from"]
    assert 4 <= resumed_from < STEPS
    assert_equal_runs(job, alone, STEPS)
    assert sorted(path.name for path in (disk / "runs" / job.run).iterdir()) == [
        "inputs.parquet",
        "order.json",
    ]
