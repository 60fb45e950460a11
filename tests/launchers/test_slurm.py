"""Encoding and training as jobs of a real Slurm with two nodes on this machine."""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from dagster import DagsterExecutionInterruptedError

from launchers import slurm
from launchers.slurm import SlurmLauncher
from pipeline.errors import LatentlineError, LaunchError, ModelError, TrainingError
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.recipe import AccelerateSettings
from tests.launchers.slurm_cluster import SlurmCluster, cluster, slurm_cluster, why_no_slurm
from tests.launchers.steps import encode, encode_without_model, in_step

__all__ = ["cluster"]  # fixtures

WORKER = "pipeline.vae_latents.worker"

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm())),
]


@pytest.fixture(autouse=True)
def scratch(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use the cluster's commands, and provide a scratch folder of this test."""
    return cluster.use(monkeypatch, tmp_path)


def test_an_encoding_is_a_job_array_whose_entries_have_the_bytes_of_a_local_run(
    cache: Any, entry_bytes: Any, in_process_launch: Any, scratch: Path
) -> None:
    encode(cache, in_process_launch)
    expected = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    shutil.rmtree(cache.recipe.output_dir)

    # Slurm replaces %j in the names of output files, and a shell of the job replaces $(id).
    scratch = scratch / "100%j $(id)"
    launcher = SlurmLauncher(scratch=str(scratch), workers=3, options=["--cpus-per-task=1", "--time=10"])
    reports: list[Any] = []
    messages, error = in_step(launcher, lambda launch: reports.append(encode(cache, launch).report))
    assert error is None
    assert entry_bytes() == expected
    assert reports[0]["encoded"] == 5
    assert "5 entries for 3 workers" in "\n".join(messages)
    assert list((scratch / "slurm").iterdir()) == [], "output files are removed after success"
    assert list((cache.recipe.cache_dir / "encodings").iterdir()) == []


def test_an_option_that_slurm_does_not_know_is_reported_with_its_message(scratch: Path, cache: Any) -> None:
    _, error = in_step(
        SlurmLauncher(scratch=str(scratch), options=["--no-such-option"]),
        lambda launch: encode(cache, launch),
    )
    assert isinstance(error, LaunchError)
    assert "rejected" in error.what
    assert "--no-such-option" in error.where
    assert "launcher.options" in error.fix


def test_the_error_of_a_task_is_raised_in_the_step(
    scratch: Path, cache: Any, tmp_path: Path, tiny_sd: Path
) -> None:
    _, error = in_step(
        SlurmLauncher(scratch=str(scratch), workers=2),
        encode_without_model(cache, tiny_sd, tmp_path / "model"),
    )
    assert isinstance(error, ModelError)
    assert "not on this worker" in error.what
    assert "encoding shard" in error.where


def test_a_killed_task_is_named_and_a_repetition_encodes_the_rest(
    scratch: Path, cache: Any, entry_bytes: Any, cluster: SlurmCluster
) -> None:
    def kill_one(launch: Any) -> None:
        child = os.fork()
        if child == 0:
            while not (workers := cluster.processes(WORKER)):
                time.sleep(0.05)
            # The parent of the encoding process is `latentline encode`.
            os.kill(workers[0].ppid(), signal.SIGKILL)
            os._exit(0)
        try:
            encode(cache, launch)
        finally:
            os.waitpid(child, 0)

    _, error = in_step(SlurmLauncher(scratch=str(scratch), workers=2), kill_one)
    assert isinstance(error, LaunchError)
    assert "1 shard is incomplete, although the encoding workers have ended" in error.what
    survived = entry_bytes()
    reports: list[LatentlineError] = []
    _, error = in_step(
        SlurmLauncher(scratch=str(scratch), workers=2),
        lambda launch: reports.append(encode(cache, launch).report),
    )
    assert error is None
    assert reports[0]["encoded"] == 5 - len(survived)


def test_an_interrupted_step_cancels_its_job_and_no_process_is_left(
    scratch: Path, cache: Any, cluster: SlurmCluster
) -> None:
    def interrupt(launch: Any) -> None:
        child = os.fork()
        if child == 0:
            while not cluster.processes(WORKER):
                time.sleep(0.05)
            os.kill(os.getppid(), signal.SIGINT)
            os._exit(0)
        try:
            encode(cache, launch)
        except BaseException as err:
            raise RuntimeError(type(err).__name__) from err
        finally:
            os.waitpid(child, 0)

    messages, error = in_step(SlurmLauncher(scratch=str(scratch), workers=2), interrupt)
    assert isinstance(error, RuntimeError)
    assert "cancelled the Slurm job" in "\n".join(messages)
    assert cluster.processes(WORKER) == []
    # Slurm lists a cancelled job as completing until its nodes have confirmed the end.
    deadline_s = time.monotonic() + 60
    while listed := subprocess.run(["squeue", "--noheader"], capture_output=True, check=True).stdout:
        assert time.monotonic() < deadline_s, listed
        time.sleep(0.2)


TRAINING = """#!/usr/bin/env python3
import os, signal, subprocess, sys, time

def stop(number, frame):
    time.sleep(3)
    open(f"FOLDER/checkpoint-{node}", "x")
    sys.exit(143)

node, kind = os.environ["SLURM_NODEID"], "KIND"
signal.signal(signal.SIGTERM, stop)
print(f"node {node} trains with {os.environ['SLURM_CPUS_PER_TASK']} CPUs", flush=True)
if node == "1" and kind == "error":
    print("TrainingError: the loss is nan\\n  where: step 3\\n  fix:   lower the rate", file=sys.stderr)
    sys.exit(1)
if node == "1" and kind == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "cancelled" and node == "0":
    subprocess.run(["scancel", os.environ["SLURM_JOB_ID"]])
while kind == "lost" and not (node == "0" and os.path.exists("FOLDER/lost")):
    time.sleep(0.2)
if kind in ("error", "killed", "lost"):
    time.sleep(5)
    print("LaunchError: ended on another machine\\n  where: node 0\\n  fix:   look", file=sys.stderr)
    sys.exit(1)
if kind != "done":
    time.sleep(600)
"""
"""Stands for `latentline train` on two nodes, of which one fails in a certain way."""

RESUME = "start the job again: the run resumes from its last checkpoint"


def train(
    kind: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
    meanwhile: Any = None,
    grace_s: float = 20.0,
    **step: Any,
) -> tuple[list[str], BaseException | None]:
    """Train on two nodes with a script in place of Python."""
    program = folder / "train"
    program.write_text(TRAINING.replace("KIND", kind).replace("FOLDER", str(folder)), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    scratch = str(folder / "scratch")
    launcher = SlurmLauncher(machines=2, options=list(options), grace_s=grace_s, scratch=scratch)
    job_file = folder / "runs" / "0123" / "order.json"

    def work(launch: Any) -> None:
        if meanwhile is not None:
            threading.Thread(target=meanwhile, daemon=True).start()
        launch(TRAINING_MODULE, job_file)

    return in_step(launcher, work, AccelerateSettings(num_processes=2), **step)


def test_a_training_has_one_task_on_each_node_with_cpus_for_its_processes(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _, error = train("done", tmp_path, monkeypatch)
    assert error is None
    lines = sorted(line for line in capfd.readouterr().err.splitlines() if line.startswith("node "))
    assert lines == ["node 0 trains with 4 CPUs", "node 1 trains with 4 CPUs"]
    assert list((scratch / "slurm").iterdir()) == []


def test_the_error_of_a_failed_node_is_that_of_the_step(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, error = train("error", tmp_path, monkeypatch, "--cpus-per-task=3")
    assert isinstance(error, TrainingError)
    assert error.what == "the loss is nan"
    assert "node z2: Exited with exit code 1\nstep 3" in error.where
    assert error.where.startswith("Slurm job ")
    assert error.fix == f"lower the rate; {RESUME}"
    (folder,) = (scratch / "slurm").iterdir()
    assert "node 1 trains with 3 CPUs" in (folder / "output.txt").read_text(), "the user's option counts"


def test_the_error_of_latentline_train_on_a_node_is_that_of_the_step(
    scratch: Path, job_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").rmdir()
    _, error = in_step(
        SlurmLauncher(scratch=str(scratch), machines=2),
        lambda launch: launch(TRAINING_MODULE, job_file),
        AccelerateSettings(num_processes=2),
    )
    assert isinstance(error, TrainingError)
    assert error.what == "the cache of the training does not exist on this machine"
    assert error.where.startswith("Slurm job ")
    assert error.where.endswith(f": Exited with exit code 1\n{tmp_path / 'cache'}")
    assert error.fix.endswith(RESUME)


def test_a_killed_task_is_named_with_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, error = train("killed", tmp_path, monkeypatch)
    assert isinstance(error, LaunchError)
    assert "node z2: Killed" in error.where
    assert error.fix.endswith(RESUME)


def test_a_cancelled_training_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, error = train("cancelled", tmp_path, monkeypatch)
    assert isinstance(error, LaunchError)
    assert "was cancelled" in error.what
    assert "node " in error.where
    assert error.fix == RESUME


@pytest.mark.parametrize("has_log", [True, False], ids=["with_the_event_log", "without_the_event_log"])
def test_a_stopped_step_waits_for_the_checkpoint_of_its_nodes(
    cluster: SlurmCluster,
    scratch: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_log: bool,
) -> None:
    def interrupt() -> None:
        while not any(
            file.read_text().count("trains") == 2 for file in (scratch / "slurm").glob("*/output.txt")
        ):
            time.sleep(0.1)
        time.sleep(5)  # srun kills tasks that have only just started without waiting for them
        os.kill(os.getpid(), signal.SIGINT)

    refusing = None if has_log else tmp_path_factory.mktemp("dagster")
    _, error = train("slow", tmp_path, monkeypatch, meanwhile=interrupt, refusing=refusing)
    assert isinstance(error, DagsterExecutionInterruptedError)
    assert sorted(file.name for file in tmp_path.glob("checkpoint-*")) == ["checkpoint-0", "checkpoint-1"]
    assert cluster.processes(str(tmp_path / "train")) == []


def test_a_pending_job_is_logged_with_the_reason_and_a_job_on_hold_with_the_command_to_release_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = tmp_path / "requests"
    recording = tmp_path / "bin" / "squeue"
    recording.parent.mkdir()
    recording.write_text(f'#!/bin/sh\necho >> {requests}\nexec {shutil.which("squeue")} "$@"\n')
    recording.chmod(0o755)
    monkeypatch.setenv("PATH", f"{recording.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "QUEUE_S", 1.0)

    def release() -> None:
        while not requests.exists() or requests.stat().st_size < 3:  # the first two answers have been read
            time.sleep(0.1)
        job_id = subprocess.check_output(["squeue", "--noheader", "--format=%A %r"], text=True).split()
        assert job_id[1:] == ["JobHeldUser"]
        subprocess.run(["scontrol", "release", job_id[0]], check=True)

    messages, error = train("done", tmp_path, monkeypatch, "--hold", meanwhile=release)
    assert error is None
    pending, *_, started = [
        message for message in messages if "pending" in message or "has started" in message
    ]
    assert re.fullmatch(
        r"the Slurm job latentline-0123-\w+ is pending: JobHeldUser; release it: scontrol release \d+",
        pending,
    )
    assert re.fullmatch(r"the Slurm job latentline-0123-\w+ has started", started)


def trains(scratch: Path) -> bool:
    """Return whether both nodes train."""
    outputs = (scratch / "slurm").glob("*/output.txt")
    return any(file.read_text().count("trains") == 2 for file in outputs)


def test_a_job_that_cannot_be_cancelled_is_a_warning_with_the_command(
    cluster: SlurmCluster, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = tmp_path / "bin" / "scancel"
    refusing.parent.mkdir()
    refusing.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    refusing.chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{refusing.parent}:{path}")
    monkeypatch.setattr(slurm, "KILL_WAIT_S", 2.0)

    def interrupt() -> None:
        while not trains(scratch):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    messages, error = train("slow", tmp_path, monkeypatch, meanwhile=interrupt, grace_s=2.0)
    assert isinstance(error, DagsterExecutionInterruptedError)
    (warning,) = [message for message in messages if "may still be running" in message]
    assert "(scancel: Unable to contact slurm controller)" in warning
    assert cluster.processes(str(tmp_path / "train")) != []

    monkeypatch.setenv("PATH", path)
    subprocess.run(warning.partition("cancel it: ")[2].split(), check=True)
    while cluster.processes(str(tmp_path / "train")):
        time.sleep(0.1)


def test_a_job_is_cancelled_if_its_sbatch_is_killed(
    cluster: SlurmCluster, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_sbatch() -> None:
        while not trains(scratch):
            time.sleep(0.1)
        for process in psutil.Process().children():
            if process.name() == "sbatch":
                process.kill()

    messages, error = train("slow", tmp_path, monkeypatch, meanwhile=kill_sbatch)
    assert isinstance(error, LaunchError)
    assert error.what.startswith("sbatch, which waits for the Slurm job latentline-0123-")
    assert error.what.endswith("ended by signal SIGKILL")
    assert "cancelled the Slurm job" in "\n".join(messages)
    assert cluster.processes(str(tmp_path / "train")) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_that_lost_a_node_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slurm_cluster(tmp_path / "cluster") as own_cluster:
        own_scratch = own_cluster.use(monkeypatch, tmp_path)

        def lose_second_node() -> None:
            while not any(
                file.read_text().count("trains") == 2 for file in (own_scratch / "slurm").glob("*/output.txt")
            ):
                time.sleep(0.1)
            own_cluster.kill_node("z2")
            (tmp_path / "lost").touch()

        _, error = train("lost", tmp_path, monkeypatch, meanwhile=lose_second_node)
    assert isinstance(error, LaunchError)
    assert error.what == "ended on another machine"
    assert "node z2: no answer, it may be lost" in error.where
    assert error.fix.endswith(RESUME)
