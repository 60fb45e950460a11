"""A training as a job of a real Slurm with two nodes on this machine: success, failures and resuming."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchers.slurm import SlurmLauncher
from pipeline.errors import LaunchError
from pipeline.processes.launch import TRAINING_MODULE, LocalLaunch
from pipeline.trained_lora.job import TrainingJob
from tests.launchers.slurm_cluster import SlurmCluster, cluster, slurm_cluster, why_no_slurm
from tests.launchers.steps import in_step, when_steps_are_done
from tests.pipeline.trained_lora.equal_runs import assert_equal_runs
from tests.pipeline.trained_lora.runs import steps_kept

__all__ = ["cluster"]  # fixture

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.slow,
    pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm())),
]

RESUME = "start the job again: the run resumes from its last checkpoint"


def train_in_step(job: TrainingJob, scratch: Path) -> tuple[str, BaseException | None]:
    """Train on two nodes in a step; return Dagster's log, and the error."""
    launcher, settings = SlurmLauncher(machines=2, scratch=str(scratch)), job.recipe.accelerate
    messages, error = in_step(launcher, lambda launch: launch(TRAINING_MODULE, job.write()), settings)
    return "\n".join(messages), error


@pytest.mark.timeout(1800)
def test_two_nodes_train_the_lora_of_two_processes_on_one_machine(
    make_project: Callable[..., Any], cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = cluster.use(monkeypatch, tmp_path)
    project = make_project(steps=4, gradient_accumulation=1)
    job = project.changed("two_nodes", num_processes=2).job()
    _, error = train_in_step(job, scratch)
    assert error is None

    alone = project.changed("one_machine", num_processes=2).job()
    LocalLaunch(alone.recipe.accelerate)(TRAINING_MODULE, alone.write())
    assert_equal_runs(job, alone, 4)


@pytest.mark.timeout(3600)
def test_a_run_that_failed_was_cancelled_and_was_stopped_resumes_to_the_lora_of_one_machine(
    make_project: Callable[..., Any], cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = cluster.use(monkeypatch, tmp_path)
    steps = 100
    project = make_project(steps=steps, gradient_accumulation=1, checkpoint_every=5)
    alone = project.changed("one_machine", num_processes=2).job()
    LocalLaunch(alone.recipe.accelerate)(TRAINING_MODULE, alone.write())
    job = project.changed("two_nodes", num_processes=2).job()

    # A process on the second node is killed. Its error is that of the step, with the node.
    cpus: list[str] = []

    def kill_rank_1() -> None:
        cpus.append(cluster.call("squeue", "--noheader", "--format=%C", cwd=tmp_path))
        for process in cluster.processes(TRAINING_MODULE, SLURMD_NODENAME="z2", RANK="1"):
            process.kill()

    when_steps_are_done(job, 7, kill_rank_1)
    _, error = train_in_step(job, scratch)
    assert isinstance(error, LaunchError)
    assert "Slurm job" in error.where
    assert "node " in error.where
    assert RESUME in error.fix
    assert cpus == ["8"], "two nodes with one process each: two threads and two more CPUs"
    done = steps_kept(job)[-1]
    assert done >= 5

    # Someone cancels the job: it writes a checkpoint within Slurm's KillWait.
    def cancel() -> None:
        cluster.call("scancel", "--state=RUNNING", cwd=tmp_path)

    when_steps_are_done(job, done + 8, cancel)
    _, error = train_in_step(job, scratch)
    assert isinstance(error, LaunchError)
    assert "was cancelled" in error.what
    assert error.fix == RESUME
    assert steps_kept(job)[-1] > done
    done = steps_kept(job)[-1]

    # The step is stopped: it waits for the checkpoint.
    when_steps_are_done(job, done + 8, lambda: os.kill(os.getpid(), signal.SIGINT))
    messages, error = train_in_step(job, scratch)
    assert error is not None
    assert not isinstance(error, LaunchError)
    assert "cancelled the Slurm job" in messages
    assert cluster.processes(TRAINING_MODULE) == []
    assert steps_kept(job)[-1] > done

    _, error = train_in_step(job, scratch)
    assert error is None
    assert_equal_runs(job, alone, steps)
    assert len(list((scratch / "slurm").iterdir())) == 3, "the output of failed attempts stays"


@pytest.mark.timeout(1800)
def test_a_lost_node_ends_the_training_with_an_error_that_names_it(
    make_project: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm_cluster(tmp_path / "cluster") as own_cluster:
        scratch = own_cluster.use(monkeypatch, tmp_path)
        job = make_project(steps=5000).changed("two_nodes", num_processes=2, checkpoint_every=5).job()

        when_steps_are_done(job, 7, lambda: own_cluster.kill_node("z2"))
        _, error = train_in_step(job, scratch)
        assert isinstance(error, LaunchError)
        assert "Slurm job" in error.where
        assert "another machine" in error.what or "node" in error.what, error
        assert RESUME in error.fix
        assert steps_kept(job)
