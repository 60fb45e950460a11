"""A deployment file loads, or one error lists every mistake with file, line, key and fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import DeploymentError
from pipeline.recipe import project_root
from pipeline.recipe.deployment import (
    DEPLOYMENT_VARIABLE,
    Deployment,
    KubernetesSettings,
    LocalSettings,
    RaySettings,
    SlurmSettings,
    load_deployment,
    read_deployment,
)

MANY_MISTAKES = """\
executor: multi
executorr: x
launcher: {kind: slurms, workers: 0}
pools: machines
scratch: s3://bucket/scratch
datasets: []
"""


def read(folder: Path, text: str) -> Deployment:
    file = folder / "site.yaml"
    file.write_text(text, encoding="utf-8")
    return read_deployment(file)


def error_of(folder: Path, text: str) -> str:
    with pytest.raises(DeploymentError) as excinfo:
        read(folder, text)
    return str(excinfo.value)


def test_without_the_variable_everything_is_as_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEPLOYMENT_VARIABLE, raising=False)
    deployment = load_deployment()
    assert deployment.executor.import_path == "in_process"
    assert deployment.launcher == LocalSettings()
    assert deployment.pools == "instance"
    assert deployment.scratch == project_root() / ".cache/scratch"
    assert deployment.source is None


def test_the_variable_names_a_file_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site.yaml").write_text("executor: multiprocess\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DEPLOYMENT_VARIABLE, "site.yaml")
    deployment = load_deployment()
    assert deployment.executor.import_path == "multiprocess"
    assert deployment.source == tmp_path / "site.yaml"


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("local", LocalSettings),
        ("slurm", SlurmSettings),
        ("kubernetes", KubernetesSettings),
        ("ray", RaySettings),
    ],
)
def test_each_example_in_deploy_is_valid_and_of_its_kind(name: str, launcher: type) -> None:
    deployment = read_deployment(project_root() / "deploy" / f"{name}.yaml")
    assert isinstance(deployment.launcher, launcher)


def test_the_local_example_has_the_values_of_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEPLOYMENT_VARIABLE, raising=False)
    example = read_deployment(project_root() / "deploy" / "local.yaml")
    assert example.model_copy(update={"source": None}) == load_deployment()


def test_each_launcher_has_the_settings_that_its_class_reads(tmp_path: Path) -> None:
    slurm = read(tmp_path, "launcher: {kind: slurm, workers: 8, machines: 2, options: [--partition=gpu]}")
    assert slurm.launcher == SlurmSettings(kind="slurm", workers=8, machines=2, options=("--partition=gpu",))
    pod = "{nodeSelector: {disk: ssd}, tolerations: [{key: gpu, operator: Exists}]}"
    kubernetes = read(tmp_path, f"launcher: {{kind: kubernetes, image: a/b:1, pod: {pod}}}").launcher
    assert isinstance(kubernetes, KubernetesSettings)
    assert (kubernetes.namespace, kubernetes.workers) == ("default", 1)
    assert kubernetes.pod == {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    ray = read(
        tmp_path, "launcher: {kind: ray, workers: 4, num_gpus: 0.5, runtime_env: {pip: [six]}}"
    ).launcher
    assert ray == RaySettings(kind="ray", workers=4, num_gpus=0.5, runtime_env={"pip": ["six"]})
    local = read(tmp_path, "launcher: {kind: local, machines: 2, master: 'node1:29500'}").launcher
    assert local == LocalSettings(machines=2, master="node1:29500")


def test_another_executor_is_a_section_with_import_path_and_config(tmp_path: Path) -> None:
    text = "executor: {import: dagster.multiprocess_executor, config: {max_concurrent: 2}}"
    executor = read(tmp_path, text).executor
    assert executor.import_path == "dagster.multiprocess_executor"
    assert executor.config == {"max_concurrent": 2}


def test_all_mistakes_are_reported_at_once_with_line_key_and_fix(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    assert (
        error_of(tmp_path, MANY_MISTAKES)
        == f"""6 mistakes in {file}

  executor must be in_process, multiprocess, k8s or a section with import, got "multi"
    where: {file}:1, executor
    fix:   use in_process, multiprocess or k8s, or write {{import: multi}} if it is an import path

  unknown key executorr
    where: {file}:2, executorr
    fix:   did you mean executor?

  launcher.kind must be local, slurm, kubernetes or ray, got "slurms"
    where: {file}:3, launcher.kind
    fix:   did you mean slurm?

  pools must be instance or machine, got "machines"
    where: {file}:4, pools
    fix:   did you mean machine?

  this path must be a local folder, got the address "s3://bucket/scratch"
    where: {file}:5, scratch
    fix:   use a local folder

  unknown key datasets
    where: {file}:6, datasets
    fix:   remove it; it is a key of recipes, which are in configs/

  where: {file}
  fix:   apply the 6 fixes above"""
    )


@pytest.mark.parametrize(
    ("text", "what", "key", "fix"),
    [
        ("executor: 3", "must be a name or a section of keys, got 3", "executor", "use in_process"),
        ("executor: {import: a-b}", "got 'a-b'", "executor.import", "such as package.name"),
        ("executor: {config: {}}", "required key import is missing", "executor.import", "add import: "),
        ("executor: {import: k8s, config: 3}", "a mapping of keys, got 3", "executor.config", "a mapping"),
        ("launcher: slurm", 'must be a mapping of keys, got "slurm"', "launcher", "launcher: {kind: slurm}"),
        ("launcher:", "got an empty value", "launcher", "write launcher: {kind: local}"),
        ("launcher: {workers: 2}", "required key kind is missing", "launcher.kind", "add kind: local, slurm"),
        (
            "launcher: {kind: local, workers: 2}",
            "unknown key workers",
            "launcher.workers",
            "remove it; the keys of launcher are kind",
        ),
        (
            "launcher: {kind: slurm, worker: 2}",
            "unknown key worker",
            "launcher.worker",
            "did you mean workers?",
        ),
        (
            "launcher: {kind: slurm, workers: '2'}",
            'launcher.workers must be an integer, got "2"',
            "launcher.workers",
            "write 2, without quotes",
        ),
        (
            "launcher: {kind: slurm, machines: 0}",
            "must be at least 1, got 0",
            "launcher.machines",
            "at least 1",
        ),
        (
            "launcher: {kind: slurm, options: [partition=gpu]}",
            "must start with -",
            "launcher.options[0]",
            "--partition=gpu",
        ),
        (
            "launcher: {kind: slurm, options: [--partition=gpu, --nodes=4]}",
            "the launcher sets --nodes of sbatch itself, got '--nodes=4'",
            "launcher.options[1]",
            "remove it: set launcher.machines",
        ),
        (
            "launcher: {kind: slurm, options: [-N4]}",
            "the launcher sets --nodes of sbatch itself, got '-N4'",
            "launcher.options[0]",
            "remove it: set launcher.machines",
        ),
        (
            "launcher: {kind: slurm, options: ['-o log.txt']}",
            "the launcher sets --output of sbatch itself, got '-o log.txt'",
            "launcher.options[0]",
            "the output is in the log of the step",
        ),
        (
            "launcher: {kind: slurm, options: [--array=0-7%2]}",
            "the launcher sets --array of sbatch itself",
            "launcher.options[0]",
            "remove it: set launcher.workers",
        ),
        ("launcher: {kind: kubernetes}", "required key image is missing", "launcher.image", "add image: "),
        (
            "launcher: {kind: kubernetes, image: x, machines: 2}",
            "unknown key machines",
            "launcher.machines",
            "start a training in several pods with deploy/kubernetes-training.yaml",
        ),
        (
            "launcher: {kind: ray, address: 'ray://head:10001'}",
            "launcher.address must start with http:// or https://, got 'ray://head:10001'",
            "launcher.address",
            "such as http://head:8265",
        ),
        (
            "launcher: {kind: ray, runtime_env: {env_vars: {OMP_NUM_THREADS: 4}}}",
            "launcher.runtime_env.env_vars must be a mapping of names to texts",
            "launcher.runtime_env",
            "put numbers in quotes",
        ),
        (
            "launcher: {kind: local, machines: 2}",
            "launcher.master is required for a training on 2 machines",
            "launcher.master",
            "set it to a name of this machine and a free port on it, such as node1:29500",
        ),
        ("pools: gpu", 'pools must be instance or machine, got "gpu"', "pools", "use instance or machine"),
    ],
)
def test_a_mistake_names_the_key_the_value_and_a_fix(
    tmp_path: Path, text: str, what: str, key: str, fix: str
) -> None:
    error = error_of(tmp_path, text + "\n")
    first, where, fix_line = error.splitlines()
    assert what in first
    assert where == f"  where: {tmp_path / 'site.yaml'}:1, {key}"
    assert fix in fix_line


def test_a_file_that_does_not_exist_is_an_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEPLOYMENT_VARIABLE, str(tmp_path / "absent.yaml"))
    with pytest.raises(DeploymentError, match="does not exist") as excinfo:
        load_deployment()
    assert excinfo.value.where == str(tmp_path / "absent.yaml")
    assert DEPLOYMENT_VARIABLE in excinfo.value.fix


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "the deployment file is empty"),
        ("- 1\n", "a deployment file must be a mapping of keys"),
        ("executor: [\n", "not valid YAML"),
        ("executor: k8s\nexecutor: k8s\n", "duplicate key executor"),
    ],
)
def test_unreadable_yaml_is_an_error(tmp_path: Path, text: str, what: str) -> None:
    assert what in error_of(tmp_path, text)


def test_a_folder_and_text_that_is_not_utf_8_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="cannot read the deployment file: Is a directory"):
        read_deployment(tmp_path)
    (tmp_path / "site.yaml").write_bytes(b"pools: caf\xe9\n")
    with pytest.raises(DeploymentError, match="a deployment file must be UTF-8, got byte 0xe9"):
        read_deployment(tmp_path / "site.yaml")


def test_a_deployment_survives_a_round_trip_through_json() -> None:
    deployment = read_deployment(project_root() / "deploy" / "kubernetes.yaml")
    assert Deployment.model_validate_json(deployment.model_dump_json()) == deployment


def test_loading_imports_neither_torch_nor_dagster_nor_kubernetes() -> None:
    code = (
        "import sys; from pipeline.recipe.deployment import load_deployment; load_deployment(); "
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'dagster', 'kubernetes', 'ray', 'polars', 'fsspec')])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=project_root(), capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"


SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"password: {SECRET}", "password"),
        (
            f"executor: {{import: a.b, config: {{broker: 'redis://me:{SECRET}@host/0'}}}}",
            "executor.config.broker",
        ),
        (f"executor: {{import: a.b, config: 'token={SECRET}'}}", "executor.config"),
        (f"executor: {{import: a.b, config: {{clientSecret: {SECRET}}}}}", "executor.config.clientSecret"),
        (f"launcher: {{kind: slurm, options: ['--export=ALL,HF_TOKEN={SECRET}']}}", "launcher.options[0]"),
        (
            f"launcher: {{kind: ray, runtime_env: {{env_vars: {{HF_TOKEN: {SECRET}}}}}}}",
            "launcher.runtime_env.env_vars.HF_TOKEN",
        ),
        (f"launcher: {{kind: kubernetes, image: 'https://me:{SECRET}@host/a'}}", "launcher.image"),
        (
            "launcher: {kind: kubernetes, image: a, pod: {containers: [{env: "
            f"[{{name: AWS_SECRET_ACCESS_KEY, value: {SECRET}}}]}}]}}}}",
            "launcher.pod.containers[0].env[0].value",
        ),
        (f"scratch: hf_{SECRET}{SECRET}", "scratch"),
    ],
)
def test_credentials_are_refused_and_not_shown(tmp_path: Path, text: str, key: str) -> None:
    error = error_of(tmp_path, text)
    assert f"{key} must not contain credentials" in error
    assert f":1, {key}" in error
    assert SECRET not in error


def test_references_to_secrets_are_accepted(tmp_path: Path) -> None:
    env = (
        "[{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}, "
        "{name: PLACE, value: here}, {name: OTHER_TOKEN, value: $(HF_TOKEN)}]"
    )
    pod = (
        f"{{containers: [{{env: {env}, envFrom: [{{secretRef: {{name: s3}}}}]}}], "
        "automountServiceAccountToken: false, imagePullSecrets: [{name: registry}], "
        "volumes: [{name: tokens, secret: {secretName: tokens}}]}"
    )
    read(tmp_path, f"launcher: {{kind: kubernetes, image: a, pod: {pod}}}")
    read(tmp_path, "launcher: {kind: slurm, options: ['--export=ALL,HF_TOKEN', '--export=T_TOKEN=$T']}")
    read(
        tmp_path, "executor: {import: a.b, config: {password: {env: DB_PASSWORD}, broker: 'redis://host/0'}}"
    )


@pytest.mark.parametrize("option", ["--ntasks-per-node=2", "--wait", "-W", "--wrap=x", "--job-name=x", "-Jx"])
def test_each_option_that_the_slurm_launcher_sets_is_refused(tmp_path: Path, option: str) -> None:
    assert "the launcher sets --" in error_of(tmp_path, f"launcher: {{kind: slurm, options: ['{option}']}}")


def test_options_that_only_begin_like_those_of_the_slurm_launcher_are_accepted(tmp_path: Path) -> None:
    options = ["--nodelist=n1", "--wait-all-nodes=1", "--ntasks=2", "--output-x", "-C h100", "-c 8", "-p gpu"]
    launcher = read(tmp_path, f"launcher: {{kind: slurm, options: {options}}}").launcher
    assert isinstance(launcher, SlurmSettings)
    assert list(launcher.options) == options
