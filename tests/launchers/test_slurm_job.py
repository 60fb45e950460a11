"""How a job ended, from the texts of Slurm's commands, and the error that explains it."""

from __future__ import annotations

import pytest

from launchers.slurm import SlurmLauncher
from launchers.slurm_job import (
    JobEnd,
    end_in_sacct,
    end_in_scontrol,
    first_failed_node,
    job_error,
    job_id_in,
)
from pipeline.errors import LaunchError, ModelError
from pipeline.recipe import AccelerateSettings

SCONTROL = (
    "JobId=7 JobName=latentline-0123-ab UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901754 "
    "Nice=0 Account=(null) QOS=(null) JobState=TIMEOUT Reason=TimeLimit Dependency=(null) Requeue=1 "
    "Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:15 RunTime=00:01:24 TimeLimit=00:01:00 TimeMin=N/A "
    "Partition=all NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=8 NumTasks=2 CPUs/Task=4 Command=(null)"
)

RESUME = "start the job again: the run resumes from its last checkpoint"


def test_the_id_of_a_job_is_in_the_output_of_sbatch() -> None:
    assert job_id_in(["sbatch: a warning", "Submitted batch job 812"]) == "812"
    assert job_id_in(["Submitted batch job 812 on cluster west"]) == "812"
    assert job_id_in(["sbatch: error: invalid partition"]) is None


def test_the_end_of_a_job_is_read_from_scontrol() -> None:
    assert end_in_scontrol("7", SCONTROL) == JobEnd("7", "TIMEOUT", -15, "n[1-2]", "00:01:00")
    pending = "JobId=7 JobState=CANCELLED Reason=None ExitCode=0:0 TimeLimit=UNLIMITED NodeList=(null)"
    assert end_in_scontrol("7", pending) == JobEnd("7", "CANCELLED", 0, "", "UNLIMITED")
    assert end_in_scontrol("7", "slurm_load_jobs error: Invalid job id specified") is None


def test_the_end_of_a_job_is_read_from_sacct() -> None:
    text = "CANCELLED by 1000|0:15|n[1-2]|04:00:00\n"
    assert end_in_sacct("7", text) == JobEnd("7", "CANCELLED", -15, "n[1-2]", "04:00:00")
    assert end_in_sacct("7", "FAILED|2:0|None assigned|1-00:00:00\n") == JobEnd(
        "7", "FAILED", 2, "", "1-00:00:00"
    )
    assert end_in_sacct("7", "") is None
    assert end_in_sacct("7", "Slurm accounting storage is disabled") is None


@pytest.mark.parametrize(
    ("lines", "node"),
    [
        (["srun: error: z2: task 1: Exited with exit code 1"], ("z2", "Exited with exit code 1")),
        (["a", "srun: error: gpu-7.site: tasks 3,5-7: Killed", "b"], ("gpu-7.site", "Killed")),
        (["srun: error: Node failure on n4"], ("n4", "the node failed")),
        (
            ["slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-25T02:01:59 DUE TO TIME LIMIT ***"],
            ("n1", "cancelled due to time limit"),
        ),
        (["slurmstepd: error: *** JOB 3 ON n1 CANCELLED AT 2026-11-25T02:01:59 ***"], None),
        (["training: step 3"], None),
    ],
)
def test_the_node_that_failed_first_is_in_the_output_of_srun(
    lines: list[str], node: tuple[str, str] | None
) -> None:
    assert first_failed_node(lines) == node


def test_the_error_of_a_worker_stays_with_its_job_and_node() -> None:
    worker = ModelError("the base model is missing", where="/models/sdxl", fix="copy it")
    output = [
        *f"ModelError: {worker.text()}".splitlines(),
        "srun: error: z2: task 1: Exited with exit code 1",
    ]
    error = job_error(JobEnd("7", "FAILED", 1, "n1,z2"), "latentline-a", output)
    assert isinstance(error, ModelError)
    assert error.what == "the base model is missing"
    assert error.where == "Slurm job 7 (latentline-a), node z2: Exited with exit code 1\n/models/sdxl"
    assert error.fix == f"copy it; {RESUME}"


@pytest.mark.parametrize(
    ("end", "what", "fix"),
    [
        (JobEnd("7", "FAILED", -9, "n1"), "the Slurm job 7 ended by signal SIGKILL", RESUME),
        (JobEnd("7", "", 3), "the Slurm job 7 ended with exit status 3", RESUME),
        (JobEnd("7", "CANCELLED", -15, "n1"), "the Slurm job 7 was cancelled", RESUME),
        (JobEnd("7", "TIMEOUT", -15, "n1", "00:01:00"), "reached its time limit of 00:01:00", "raise --time"),
        (JobEnd("7", "OUT_OF_MEMORY", 1, "n1"), "ran out of memory", "raise --mem"),
        (JobEnd("7", "NODE_FAIL", 1, "n1"), "ended because a node failed", "--exclude"),
        (JobEnd("7", "PREEMPTED", 1, "n1"), "was stopped in favour of another job", RESUME),
    ],
)
def test_the_state_of_a_job_is_explained_with_a_fix(end: JobEnd, what: str, fix: str) -> None:
    error = job_error(end, "latentline-a", ["a line", ""])
    assert isinstance(error, LaunchError)
    assert what in error.what
    assert fix in error.fix
    assert error.fix.endswith(RESUME)
    place = "nodes n1" if end.nodes else "on no node"
    assert error.where == f"Slurm job 7 (latentline-a), {place}, last output:\na line"


def test_a_node_that_does_not_confirm_the_end_of_its_job_is_named_rather_than_the_others() -> None:
    output = ["srun: error: n1: task 0: Exited with exit code 1"]
    end = end_in_scontrol("7", "JobId=7 JobState=COMPLETING ExitCode=1:0 NodeList=n2")
    assert end is not None
    error = job_error(end, "latentline-a", output)
    assert error.where.startswith("Slurm job 7 (latentline-a), node n2: no answer, it may be lost")


def test_a_cancelled_job_is_not_explained_by_the_error_of_a_process_that_it_stopped() -> None:
    stopped = LaunchError("the training has ended on another machine", where="machine 0", fix="look there")
    output = f"LaunchError: {stopped.text()}".splitlines()
    assert job_error(JobEnd("7", "CANCELLED", -15, "n1"), "a", output).what == "the Slurm job 7 was cancelled"


@pytest.mark.parametrize(
    ("machines", "options", "expected"),
    [
        (1, [], ["--cpus-per-task=20"]),
        (2, ["--partition=gpu", "--comment=-c"], ["--cpus-per-task=10"]),
        (2, ["-c", "4"], []),
        (2, ["-c4"], []),
        (2, ["--cpus-per-task=4"], []),
        (2, ["--cpus-per-gpu=4"], []),
        (2, ["--exclusive"], []),
    ],
)
def test_a_node_has_cpus_for_its_processes_unless_the_options_choose_them(
    machines: int, options: list[str], expected: list[str]
) -> None:
    launcher = SlurmLauncher(machines=machines, options=options, scratch="unused")
    assert launcher.cpu_options(AccelerateSettings(num_processes=4, cpu_threads=3)) == expected


def test_processes_that_the_nodes_cannot_share_are_refused_before_a_job_is_submitted() -> None:
    with pytest.raises(LaunchError, match="divisible by the number of machines, got 4 on 3 machines"):
        SlurmLauncher(machines=3, scratch="unused").cpu_options(AccelerateSettings(num_processes=4))
