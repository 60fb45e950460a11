"""Encoding and training as jobs of a real Ray cluster with two nodes on this machine."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import LaunchError, ModelError, StoreError
from pipeline.processes.launch import TRAINING_MODULE, LocalLaunch
from pipeline.recipe import AccelerateSettings
from pipeline.recipe.sweep import SweepSettings
from pipeline.sweep.concurrency import Concurrency
from pipeline.sweep.stage import sweep
from pipeline.trained_lora.run_folder import RunLayout, read_metrics, read_record
from tests.free_ports import free_ports
from tests.launchers.ray_cluster import NODES, RayCluster, ray_cluster
from tests.launchers.steps import encode, encode_without_model, in_step
from tests.machines.counting_proxy import Answer, CountingProxy, Request

pytest.importorskip("ray", reason="needs the extra [ray]")

from launchers.ray import RayLauncher, job_environment
from tests.pipeline.trained_lora.equal_runs import assert_equal_runs

# Ray's client passes ssl=None to aiohttp, which deprecates it.
pytestmark = pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")

STEPS = 24

TWO_PROCESSES = AccelerateSettings(num_processes=2)


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def launcher(running_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RayLauncher]:
    """Return a function that creates a launcher with the given settings for the running cluster."""
    for name, value in running_cluster.variables.items():
        monkeypatch.setenv(name, value)

    def create(**settings: Any) -> RayLauncher:
        return RayLauncher(**{"address": running_cluster.address, "python": sys.executable, **settings})

    return create


def processes_of(project_folder: Path, *command: str) -> list[psutil.Process]:
    """Return the processes of a `latentline` command with arguments of which one is below a folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            arguments = process.cmdline()
            if set(command) <= set(arguments) and any(
                each.startswith(str(project_folder)) for each in arguments
            ):
                found.append(process)
    return found


def meanwhile(wait: Callable[[], Any], act: Callable[[Any], object], work: Callable[[], object]) -> None:
    """Call `work`, and in a child process `act` with the first true result of `wait`."""
    child = os.fork()
    if child == 0:
        while not (result := wait()):
            time.sleep(0.05)
        act(result)
        os._exit(0)
    try:
        work()
    finally:
        os.waitpid(child, 0)


def test_a_cluster_that_does_not_answer_is_an_error_with_its_address(cache: Any) -> None:
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    _, error = in_step(RayLauncher(address=address), lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert error.what.startswith("the Ray cluster cannot be reached")
    assert error.where == f"launcher.address: {address}"
    assert "launcher.address" in error.fix


def test_a_training_whose_processes_cannot_be_divided_is_refused_before_it_is_submitted(
    tmp_path: Path,
) -> None:
    job_file = tmp_path / "order.json"
    _, error = in_step(
        RayLauncher(machines=2),
        lambda launch: launch(TRAINING_MODULE, job_file),
        AccelerateSettings(num_processes=3),
    )
    assert isinstance(error, LaunchError)
    assert "divisible by the number of machines" in error.what


def test_the_environment_of_a_job_has_the_users_variables_and_none_of_the_steps_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret of the step")
    user = {"pip": ["six"], "env_vars": {"HF_HOME": "/shared", "OMP_NUM_THREADS": "3"}}
    environment = job_environment(user, AccelerateSettings(cpu_threads=1), grace_s=20.0)
    assert environment["pip"] == ["six"]
    variables = environment["env_vars"]
    assert (variables["HF_HOME"], variables["OMP_NUM_THREADS"]) == ("/shared", "3")
    assert variables["LATENTLINE_CPU_THREADS"] == "1"
    assert "HF_TOKEN" not in variables
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > 20


@pytest.mark.clusters
def test_workers_of_ray_write_the_bytes_of_a_local_run(
    cache: Any,
    entry_bytes: Any,
    in_process_launch: Any,
    launcher: Callable[..., RayLauncher],
    capsys: pytest.CaptureFixture[str],
) -> None:
    encode(cache, in_process_launch)
    expected = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    shutil.rmtree(cache.recipe.output_dir)

    reports: list[Any] = []
    messages, error = in_step(
        launcher(workers=3), lambda launch: reports.append(encode(cache, launch).report)
    )
    assert error is None
    assert entry_bytes() == expected
    assert reports[0]["encoded"] == 5
    assert "submitted the Ray job latentline-" in "\n".join(messages)
    assert list((cache.recipe.cache_dir / "encodings").iterdir()) == []
    output = capsys.readouterr().err
    for shard in range(3):
        assert output.count(f"shard {shard}/3: shard {shard}/3 of") == 1
        assert output.count(f"shard {shard}/3: ended with exit status 0") == 1
    assert "latentline-result" not in output


def num_encoded_through(proxy: CountingProxy, cache: Any, launcher: Callable[..., RayLauncher]) -> int:
    """Encode with requests that pass the proxy, close it, and return the number of encoded entries."""
    reports: list[Any] = []
    try:
        _, error = in_step(
            launcher(address=proxy.url), lambda launch: reports.append(encode(cache, launch).report)
        )
    finally:
        proxy.close()
    assert error is None
    return int(reports[0]["encoded"])


@pytest.mark.clusters
def test_an_encoding_succeeds_although_some_answers_of_the_cluster_are_lost(
    cache: Any, running_cluster: RayCluster, launcher: Callable[..., RayLauncher]
) -> None:
    """The answer to the submission, and those to the first two requests of the complete log."""
    proxy = CountingProxy("127.0.0.1", running_cluster.address)
    lost: list[str] = []

    def lose(request: Request) -> None:
        is_submission = request.method == "POST" and request.name == "jobs/"
        limit = 1 if is_submission else 2 if request.name.endswith("/logs") else 0
        if lost.count(request.name) < limit:
            lost.append(request.name)
            raise ConnectionError

    proxy.after = lose
    assert num_encoded_through(proxy, cache, launcher) == 5
    assert (len(lost), lost[0]) == (3, "jobs/")
    submissions = [request for request in proxy.requests if request.method == "POST"]
    assert len(submissions) == 1


@pytest.mark.clusters
def test_a_job_is_submitted_again_to_a_cluster_that_is_not_ready(
    cache: Any, running_cluster: RayCluster, launcher: Callable[..., RayLauncher]
) -> None:
    proxy = CountingProxy("127.0.0.1", running_cluster.address)
    refused: list[Request] = []

    def refuse(request: Request) -> Answer | None:
        if (request.method, request.name) != ("POST", "jobs/") or len(refused) == 2:
            return None
        refused.append(request)
        return Answer(500, "No available agent to submit job, please try again later.")

    proxy.before = refuse
    assert num_encoded_through(proxy, cache, launcher) == 5
    assert len(refused) == 2


@pytest.mark.clusters
def test_R12_a_stop_while_the_job_is_submitted_stops_it(
    cache: Any, running_cluster: RayCluster, launcher: Callable[..., RayLauncher]
) -> None:
    proxy = CountingProxy("127.0.0.1", running_cluster.address)

    def interrupt(request: Request) -> None:
        if request.method == "POST" and request.name == "jobs/":
            os.kill(os.getpid(), signal.SIGINT)
            # The cluster receives the request after the step has been interrupted.
            time.sleep(1)

    proxy.before = interrupt
    try:
        messages, error = in_step(launcher(address=proxy.url), lambda launch: encode(cache, launch))
    finally:
        proxy.close()
    assert type(error).__name__ == "DagsterExecutionInterruptedError"
    assert any(message.startswith("stopped the Ray job latentline-") for message in messages)
    assert processes_of(cache.recipe.cache_dir, "encode") == []


@pytest.mark.clusters
def test_a_request_that_no_node_can_meet_is_an_error_with_what_the_nodes_have(
    cache: Any, launcher: Callable[..., RayLauncher]
) -> None:
    _, error = in_step(launcher(num_gpus=8, wait_s=1), lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert "must have 1 node with CPU 1, GPU 8 each" in error.what
    assert "CPU 2, GPU 0; CPU 2, GPU 0" in error.what
    assert "launcher.num_gpus" in error.where


@pytest.mark.clusters
def test_a_python_that_the_nodes_lack_is_an_error_that_names_it(
    cache: Any, launcher: Callable[..., RayLauncher]
) -> None:
    _, error = in_step(launcher(python="/no/such/python"), lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert "/no/such/python" in error.what
    assert "launcher.python" in error.fix


@pytest.mark.clusters
def test_the_error_of_a_shard_is_raised_in_the_step(
    cache: Any, tmp_path: Path, tiny_sd: Path, launcher: Callable[..., RayLauncher]
) -> None:
    _, error = in_step(launcher(workers=2), encode_without_model(cache, tiny_sd, tmp_path / "model"))
    assert isinstance(error, ModelError)
    assert "not on this worker" in error.what
    assert "encoding shard" in error.where


@pytest.mark.clusters
def test_a_killed_process_of_ray_restarts_only_the_rest_of_its_shard(
    cache: Any,
    entry_bytes: Any,
    in_process_launch: Any,
    launcher: Callable[..., RayLauncher],
) -> None:
    encode(cache, in_process_launch)
    expected = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    shutil.rmtree(cache.recipe.output_dir)

    def kill_parent_and_see_the_restart(commands: list[psutil.Process]) -> None:
        killed, arguments = commands[0].pid, commands[0].cmdline()
        os.kill(commands[0].ppid(), signal.SIGKILL)

        # Lines of a killed process may be lost, so the output does not tell how often its shard was started.
        while all(each.pid == killed for each in processes_of(cache.recipe.cache_dir, *arguments)):
            time.sleep(0.05)

    def kill_one(launch: Any) -> None:
        meanwhile(
            lambda: processes_of(cache.recipe.cache_dir, "encode"),
            kill_parent_and_see_the_restart,
            lambda: encode(cache, launch),
        )

    _, error = in_step(launcher(workers=2), kill_one)
    assert error is None
    assert entry_bytes() == expected


@pytest.mark.clusters
def test_a_killed_shard_is_named_and_a_repetition_encodes_the_rest(
    cache: Any, entry_bytes: Any, launcher: Callable[..., RayLauncher]
) -> None:
    def kill_one(launch: Any) -> None:
        meanwhile(
            lambda: processes_of(cache.recipe.cache_dir, "encode"),
            lambda commands: commands[0].kill(),
            lambda: encode(cache, launch),
        )

    _, error = in_step(launcher(workers=2), kill_one)
    assert isinstance(error, LaunchError)
    assert "1 shard is incomplete, although the encoding workers have ended" in error.what
    survived = entry_bytes()
    reports: list[Any] = []
    _, error = in_step(launcher(workers=2), lambda launch: reports.append(encode(cache, launch).report))
    assert error is None
    assert reports[0]["encoded"] == 5 - len(survived)


@pytest.mark.clusters
def test_an_encoding_that_is_interrupted_without_the_event_log_leaves_no_process(
    cache: Any,
    launcher: Callable[..., RayLauncher],
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = os.getpid()

    def interrupt(launch: Any) -> None:
        meanwhile(
            lambda: processes_of(cache.recipe.cache_dir, "encode"),
            lambda _: os.kill(step, signal.SIGINT),
            lambda: encode(cache, launch),
        )

    _, error = in_step(launcher(workers=2), interrupt, refusing=tmp_path_factory.mktemp("dagster"))
    assert error is not None
    assert "INFO: stopped the Ray job" in capsys.readouterr().err
    assert processes_of(cache.recipe.cache_dir, "encode") == []


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_nodes_train_the_lora_of_one_machine_although_the_first_attempt_is_interrupted(
    make_project: Any, launcher: Callable[..., RayLauncher], capsys: pytest.CaptureFixture[str]
) -> None:
    project = make_project(steps=STEPS, checkpoint_every=100, gradient_accumulation=1)
    alone = project.changed("one_machine", num_processes=2).job()
    LocalLaunch(alone.recipe.accelerate)(TRAINING_MODULE, alone.write())

    job = project.changed("two_nodes", num_processes=2).job()
    job_file, step = job.write(), os.getpid()
    metrics = RunLayout(job.folder).metrics
    messages, error = in_step(
        launcher(machines=2),
        lambda launch: meanwhile(
            lambda: len(read_metrics(metrics, STEPS)) >= 4,
            lambda _: os.kill(step, signal.SIGINT),
            lambda: launch(TRAINING_MODULE, job_file),
        ),
        TWO_PROCESSES,
    )
    assert error is not None
    assert "stopped the Ray job" in "\n".join(messages)
    assert processes_of(job.folder, "train") == []
    complete = {path.parent.name for path in job.folder.glob("checkpoints/step-*/COMPLETE")}
    assert len(complete - {"step-00000000"}) == 1, f"one checkpoint besides the first: {complete}"
    assert not (job.folder / f"checkpoints/step-{STEPS:08}").exists()

    capsys.readouterr()
    _, error = in_step(launcher(machines=2), lambda launch: launch(TRAINING_MODULE, job_file), TWO_PROCESSES)
    assert error is None
    assert_equal_runs(job, alone, STEPS)
    output = capsys.readouterr().err
    meeting = "machine 0: machine 0 of 2 (ranks from 0): 1 process, meeting at "
    assert [node for node in NODES if f"{meeting}{node}:" in output] != [], output
    assert "machine 1: ended with exit status 0" in output


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_variants_of_a_sweep_train_on_both_nodes_with_the_table_of_one_machine(
    make_project: Any, launcher: Callable[..., RayLauncher], tmp_path: Path
) -> None:
    datasets = {"photos": {"validation_fraction": 0.4}}
    project = make_project(datasets=datasets, steps=STEPS, validate_every=STEPS, gradient_accumulation=1)
    section = {"grid": {"training.learning_rate": [0.1, 1e-9]}, "judge": "validation_loss", "halving": None}
    recipe = project.recipe.model_copy(update={"sweep": SweepSettings.model_validate(section)})
    tables, output = (project.latents, project.text), recipe.output_dir
    shutil.copytree(output, tmp_path / "pristine")
    expected = sweep(recipe, *tables, launch=LocalLaunch(recipe.accelerate), log=str).table
    shutil.rmtree(output)
    shutil.copytree(tmp_path / "pristine", output)

    results: list[Any] = []
    # A node has two CPUs, so each training has a node of its own.
    messages, error = in_step(
        launcher(num_cpus=2),
        lambda launch: results.append(
            sweep(recipe, *tables, launch=launch, log=str, concurrency=Concurrency(2)).table
        ),
        recipe.accelerate,
    )
    assert error is None
    assert results[0].equals(expected)
    assert "\n".join(messages).count("submitted the Ray job") == 2
    times = [read_record(RunLayout(output / "runs" / run).finished) for run in expected["run"]]
    assert max(each["started_at_s"] for each in times) < min(each["ended_at_s"] for each in times)


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_error_of_a_rank_is_raised_in_the_step(
    make_project: Any, launcher: Callable[..., RayLauncher]
) -> None:
    job = make_project(steps=STEPS, gradient_accumulation=1).changed("two_nodes", num_processes=2).job()
    job_file = job.write()
    for entry in job.recipe.cache_dir.rglob("latents/**/*.safetensors"):
        entry.unlink()
    _, error = in_step(launcher(machines=2), lambda launch: launch(TRAINING_MODULE, job_file), TWO_PROCESSES)
    assert isinstance(error, StoreError)
    assert processes_of(job.folder, "train") == []
