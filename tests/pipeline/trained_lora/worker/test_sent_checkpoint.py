"""H03: two machines with their own disks, of which only machine 0 has the checkpoints."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.processes.worker.machine_watch import SEEN_S
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import ADAPTER_FILE, MARKER, OPTIMIZER_FILE, RunLayout
from tests.pipeline.trained_lora.equal_runs import assert_equal_runs
from tests.pipeline.trained_lora.rank_server import Rank, RankServer
from tests.pipeline.trained_lora.two_machines import copied_order, free_port, wait_for_steps

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

STEPS = 14


def start(server: RankServer, job: TrainingJob, disk: Path, **changes: Any) -> list[Rank]:
    """Start two processes, with another disk for the second one.

    `changes` replace keys of the recipe in the order of machine 1.
    """
    order, port = job.write(), free_port()
    copy = copied_order(job, disk)
    values = json.loads(copy.read_text(encoding="utf-8"))
    values["recipe"] |= changes
    copy.write_text(json.dumps(values), encoding="utf-8")
    return [server.start(each, rank, port, machines=2) for rank, each in enumerate((order, copy))]


def error(rank: Rank) -> dict[str, str]:
    return json.loads(rank.error.read_text(encoding="utf-8"))


@pytest.mark.timeout(600)
def test_H03_a_run_resumes_bit_for_bit_on_a_machine_that_lost_its_disk(
    make_project: Callable[..., Project], tmp_path: Path, rank_server: RankServer
) -> None:
    project = make_project(steps=STEPS, checkpoint_every=4, gradient_accumulation=1)
    alone = project.changed("one_machine", num_processes=2).job()
    job = project.changed("two_machines", num_processes=2).job()
    disk = tmp_path / "disk"
    rank_server.train(alone)

    # Machine 1 dies: machine 0 ends at once, with an error that says what to do.
    ranks = start(rank_server, job, disk)
    wait_for_steps(job, 6)
    ranks[1].kill()
    killed_s = time.monotonic()
    assert [rank.end() for rank in ranks] == [1, -9], ranks[0].text()
    assert time.monotonic() - killed_s < SEEN_S + 30
    assert error(ranks[0])["kind"] == "LaunchError"
    assert "another machine" in error(ranks[0])["what"]
    assert "start the same commands again on all machines" in error(ranks[0])["fix"]
    assert not list(disk.rglob("checkpoints")), "machine 1 has written to the run's folder"

    shutil.rmtree(disk)
    ranks = start(rank_server, job, disk)
    assert [rank.end() for rank in ranks] == [0, 0], ranks[1].text()
    resumed_from = json.loads(RunLayout(job.folder).result.read_text(encoding="utf-8"))["resumed_from"]
    assert 4 <= resumed_from < STEPS
    assert_equal_runs(job, alone, STEPS)
    files = sorted(path.name for path in (disk / "runs" / job.run).iterdir())
    assert files == ["inputs.parquet", "order.json"]

    # Other checkpoints on the disk of machine 1 do not matter, although they are valid by their own hashes.
    longer = project.changed("two_machines", num_processes=2, steps=STEPS + 1).job()
    for step in (STEPS, STEPS + 1):
        _write_other_checkpoint(disk / "runs" / job.run / "checkpoints" / f"step-{step:08d}", job.run, step)
    ranks = start(rank_server, longer, disk)
    assert [rank.end() for rank in ranks] == [0, 0], ranks[1].text()
    result = json.loads(RunLayout(job.folder).result.read_text(encoding="utf-8"))
    assert (result["resumed_from"], result["steps"]) == (STEPS, STEPS + 1)


def _write_other_checkpoint(folder: Path, run: str, step: int) -> None:
    folder.mkdir(parents=True)
    content = b"not the state of machine 0"
    names = (ADAPTER_FILE, OPTIMIZER_FILE)
    for name in names:
        (folder / name).write_bytes(content)
    hashes = dict.fromkeys(names, hashlib.sha256(content).hexdigest())
    marker = {"step": step, "run": run, "sha256": hashes}
    (folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_error_of_one_machine_is_the_error_of_both(
    make_project: Callable[..., Project], tmp_path: Path, rank_server: RankServer
) -> None:
    job = make_project(steps=STEPS).changed("two_machines", num_processes=2).job()
    (tmp_path / "empty").mkdir()
    ranks = start(rank_server, job, tmp_path / "disk", cache_dir=str(tmp_path / "empty"))
    assert [rank.end() for rank in ranks] == [1, 1]
    own, other = error(ranks[1]), error(ranks[0])
    assert own["kind"] == other["kind"] == "StoreError"
    assert other["what"] == f"{own['what']} (on machine 1, {platform.node()})"
    assert other["fix"] == own["fix"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_machines_with_different_orders_do_not_train(
    make_project: Callable[..., Project], tmp_path: Path, rank_server: RankServer
) -> None:
    job = make_project(steps=STEPS).changed("two_machines", num_processes=2).job()
    training = json.loads(job.recipe.model_dump_json())["training"] | {"steps": STEPS - 1}
    ranks = start(rank_server, job, tmp_path / "disk", training=training)
    assert [rank.end() for rank in ranks] == [1, 1]
    for rank in ranks:
        assert (
            f"the number of steps on machine 1 must be {STEPS}, as on machine 0, got {STEPS - 1}"
            in (error(rank)["what"])
        )
    assert not RunLayout(job.folder).metrics.exists()
