"""What a deployment decides in the definitions: executor, launcher, pool and its limit."""

from __future__ import annotations

import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest
from dagster import (
    DagsterInstance,
    ExecutorDefinition,
    in_process_executor,
    job,
    multiprocess_executor,
    op,
    validate_run_config,
)

import assets.deployment
from assets.definitions import build_definitions
from assets.deployment import EXTRAS, LAUNCHERS, build_executor, build_launcher, gpu_pool
from pipeline.errors import DeploymentError
from pipeline.recipe import project_root
from pipeline.recipe.deployment import Deployment, LauncherSettings, read_deployment
from resources.local_launcher import AccelerateLauncher
from tests.small_recipe import small_recipe


def deployment(folder: Path, text: str) -> Deployment:
    file = folder / "site.yaml"
    file.write_text(text, encoding="utf-8")
    return read_deployment(file)


def pools_of(settings: Deployment, folder: Path) -> dict[str, str | None]:
    """Return the pool that Dagster claims for each step of a recipe's job."""
    job = build_definitions([small_recipe(folder)], deployment=settings).resolve_job_def("flowers_train")
    return {node.name.removeprefix("flowers__"): node.definition.pool for node in job.nodes}


@pytest.mark.parametrize(
    ("name", "expected"), [("in_process", in_process_executor), ("multiprocess", multiprocess_executor)]
)
def test_an_executor_has_a_name(tmp_path: Path, name: str, expected: ExecutorDefinition) -> None:
    settings = deployment(tmp_path, f"executor: {name}")
    assert build_executor(settings) is expected
    job = build_definitions([small_recipe(tmp_path)], deployment=settings).resolve_job_def("flowers_cache")
    assert job.executor_def.name == expected.name


def test_the_executor_k8s_is_that_of_dagster_k8s(tmp_path: Path) -> None:
    dagster_k8s = pytest.importorskip("dagster_k8s")
    assert build_executor(deployment(tmp_path, "executor: k8s")) is dagster_k8s.k8s_job_executor


def test_a_missing_package_is_an_error_with_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dagster_k8s", None)
    with pytest.raises(DeploymentError) as excinfo:
        build_executor(deployment(tmp_path, "pools: instance\nexecutor: k8s\n"))
    assert "Python finds no module dagster_k8s" in excinfo.value.what
    assert excinfo.value.where == f"{tmp_path / 'site.yaml'}:2, executor"
    assert excinfo.value.fix == "pip install 'latentline[k8s]'"


def test_the_extras_that_messages_name_are_in_the_installed_distribution() -> None:
    assert set(EXTRAS.values()) <= set(metadata("latentline").get_all("Provides-Extra", []))


def test_a_launcher_without_its_package_is_an_error_with_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "launchers.ray", raising=False)
    with pytest.raises(DeploymentError) as excinfo:
        build_launcher(deployment(tmp_path, "launcher: {kind: ray}"))
    assert "launcher needs launchers.ray.RayLauncher" in excinfo.value.what
    assert excinfo.value.fix == "pip install 'latentline[ray]'"


def test_an_executor_of_another_package_has_an_import_path_and_config(tmp_path: Path) -> None:
    text = "executor: {import: dagster.multiprocess_executor, config: {max_concurrent: 2}}"
    settings = deployment(tmp_path, text)
    job = build_definitions([small_recipe(tmp_path)], deployment=settings).resolve_job_def("flowers_cache")
    resolved = validate_run_config(job, {})
    assert resolved is not None
    assert resolved["execution"]["multiprocess"]["max_concurrent"] == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{import: dagster.nothing}", "dagster contains no nothing"),
        ("{import: nothing_here.executor}", "Python finds no module nothing_here"),
        ("{import: dagster.Definitions}", "must be an executor of Dagster"),
        ("{import: multiprocess, config: {max_concurrentt: 2}}", "does not accept executor.config"),
    ],
)
def test_an_executor_that_cannot_be_used_is_an_error(tmp_path: Path, text: str, what: str) -> None:
    settings = deployment(tmp_path, f"executor: {text}")
    with pytest.raises(DeploymentError, match=what) as excinfo:
        build_executor(settings)
    assert excinfo.value.where == f"{tmp_path / 'site.yaml'}:1, executor"


def test_the_error_of_a_configuration_does_not_show_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SITE_TOKEN", "s3cr3tOfTheSite")
    config = "{max_concurrent: {env: SITE_TOKEN}, wrong: 1}"
    settings = deployment(tmp_path, f"executor: {{import: multiprocess, config: {config}}}")
    with pytest.raises(DeploymentError) as excinfo:
        build_executor(settings)
    assert "s3cr3t" not in str(excinfo.value)


def test_the_local_launcher_is_that_of_accelerate(tmp_path: Path) -> None:
    assert isinstance(build_launcher(deployment(tmp_path, "launcher: {kind: local}")), AccelerateLauncher)


def test_each_kind_of_launcher_has_an_import_path() -> None:
    kinds = {settings.model_fields["kind"].annotation.__args__[0] for settings in LauncherSettings.__args__}
    assert kinds == set(LAUNCHERS)


def test_a_launcher_without_a_class_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(assets.deployment.LAUNCHERS, "slurm", "launchers.absent.SlurmLauncher")
    with pytest.raises(DeploymentError) as excinfo:
        build_launcher(deployment(tmp_path, "launcher: {kind: slurm}"))
    assert "launcher needs launchers.absent.SlurmLauncher" in excinfo.value.what
    assert excinfo.value.where.endswith("site.yaml:1, launcher")


def test_one_pool_serves_the_instance_by_default(tmp_path: Path) -> None:
    pools = pools_of(deployment(tmp_path, "pools: instance"), tmp_path)
    assert {name: pool for name, pool in pools.items() if pool is not None} == {"trained_lora": "gpu"}


def test_each_machine_has_a_pool_with_a_name_that_dagster_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = deployment(tmp_path, "pools: machine")
    for machine, pool in {"gpu-1.example.com": "gpu_gpu_1_example_com", "größe": "gpu_gr__e"}.items():
        monkeypatch.setattr("platform.node", lambda machine=machine: machine)
        assert gpu_pool(settings) == pool
        pools = pools_of(settings, tmp_path)
        assert {name for name, each in pools.items() if each == pool} == {"trained_lora"}


def test_the_limit_of_the_projects_instance_holds_for_the_pool_of_each_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dagster.yaml").write_text((project_root() / ".dagster" / "dagster.yaml").read_text())
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with DagsterInstance.get() as instance:
        storage = instance.event_log_storage
        for pool in ("gpu_a", "gpu_b"):
            storage.initialize_concurrency_limit_to_default(pool)
            first = storage.claim_concurrency_slot(pool, "run_1", "flowers__vae_latents")
            second = storage.claim_concurrency_slot(pool, "run_2", "faces__vae_latents")
            assert (first.is_claimed, second.is_claimed) == (True, False)


def test_a_sensor_that_lists_a_large_dataset_delays_no_other_sensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dagster.yaml").write_text((project_root() / ".dagster" / "dagster.yaml").read_text())
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with DagsterInstance.get() as instance:
        assert instance.get_sensor_settings() == {"use_threads": True, "num_workers": 4}


def test_the_kubernetes_launcher_has_the_settings_of_its_deployment(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes")
    settings = "launcher: {kind: kubernetes, namespace: a, image: x, workers: 3}"
    launcher = build_launcher(deployment(tmp_path, settings))
    assert (launcher.namespace, launcher.image, launcher.workers) == ("a", "x", 3)
    assert launcher.machines == 1, "the step trains itself"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ("{kind: local, machines: 2, master: 'a:1'}", "master"),
        ("{kind: slurm, options: [--partition=gpu]}", "options"),
    ],
)
def test_a_run_that_sets_one_key_of_the_launcher_keeps_the_others_of_the_deployment(
    tmp_path: Path, settings: str, name: str
) -> None:
    launcher = build_launcher(deployment(tmp_path, f"launcher: {settings}"))
    seen: list[object] = []

    @op(required_resource_keys={"launcher"})
    def step(context) -> None:  # Dagster does not accept a context with an annotation that is text
        seen.append((context.resources.launcher.grace_s, getattr(context.resources.launcher, name)))

    @job(resource_defs={"launcher": launcher})
    def one_step() -> None:
        step()

    run_config = {"resources": {"launcher": {"config": {"grace_s": 60.0}}}}
    assert one_step.execute_in_process(run_config=run_config).success
    assert seen == [(60.0, getattr(launcher, name))]
    assert getattr(launcher, name)
