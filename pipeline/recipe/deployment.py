"""The deployment file: where recipes run, in one YAML file that `LATENTLINE_DEPLOYMENT` names.

Nothing in it changes cache entries, or the weights of a run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, JsonValue

from pipeline.errors import DeploymentError
from pipeline.recipe.credentials import credentials_in
from pipeline.recipe.error_descriptions import FileKind
from pipeline.recipe.errors import Mistake, PlacedMistake, file_error
from pipeline.recipe.keys import keys_of
from pipeline.recipe.project import in_project, path_in_recipe
from pipeline.recipe.schema import RecipeFile
from pipeline.recipe.settings import MAX_COUNT, Settings, Violation, one_of, reject
from pipeline.recipe.validators import FolderPath
from pipeline.recipe.yaml_document import KeyPath, dotted
from pipeline.recipe.yaml_file import read_yaml_file
from pipeline.storage.addresses import expanded

DEPLOYMENT_VARIABLE = "LATENTLINE_DEPLOYMENT"
"""Environment variable with the path of the deployment file; without it, all defaults apply."""

SCHEMA_FILE = "deploy/deployment.schema.json"

DEFAULT_SCRATCH = Path(".cache/scratch")
"""Scratch folder, relative to the project root."""

# The same as torch's default.
WAIT_S = 600
"""Default of the longest wait for the other machines of a training."""

ExecutorName: TypeAlias = Literal["in_process", "multiprocess", "k8s"]

EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
"""Executors that have a name; others are given by their import path."""

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")

NumShards = Annotated[
    int,
    Field(
        ge=1,
        le=MAX_COUNT,
        description="Number of shards of equal cost into which an encoding is divided. Each runs as one "
        "process or pod.",
    ),
]
NumMachines = Annotated[
    int,
    Field(
        ge=1,
        le=MAX_COUNT,
        description="Number of machines of a training. The recipe's `accelerate.num_processes` is the total "
        "number of processes, which the machines share equally.",
    ),
]
ConcurrentTrainings = Annotated[
    int,
    Field(
        ge=1,
        le=MAX_COUNT,
        description="Maximum number of variants of a sweep that are trained at the same time. Each needs "
        "GPUs of its own.",
    ),
]


class ExecutorSettings(Settings):
    """Dagster executor that runs the steps of a job. A plain name is the same as a section with `import`."""

    import_path: str = Field(
        alias="import",
        description="in_process, multiprocess, k8s, or the import path of an executor, such as "
        "package.module.name.",
        examples=["dagster_celery_k8s.celery_k8s_job_executor"],
    )
    config: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Configuration of the executor, as its documentation describes it. `{env: NAME}` reads a "
        "text from an environment variable.",
        examples=[{"max_concurrent": 2}],
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        if self.import_path not in EXECUTORS and not _IMPORT_PATH.fullmatch(self.import_path):
            what = f"executor must be {one_of([*EXECUTORS, 'an import path'])}, got {self.import_path!r}"
            yield Violation("import", what, "use one of the names, or an import path such as package.name")


def _name_as_section(value: object) -> Any:
    if isinstance(value, str):
        if value not in EXECUTORS:
            reject(
                f"executor must be {one_of([*EXECUTORS, 'a section with import'])}, got {json.dumps(value)}",
                f"use {one_of(EXECUTORS)}, or write {{import: {value}}} if it is an import path",
            )
        return {"import": value}
    if not isinstance(value, dict | ExecutorSettings):
        shown = json.dumps(value, default=str)
        reject(f"executor must be a name or a section of keys, got {shown}", f"use {one_of(EXECUTORS)}")
    return value


class LocalSettings(Settings):
    """Encoding and training run on the machine of the step."""

    kind: Literal["local"] = Field(default="local", description="Launcher of encoding and training.")
    machines: NumMachines = 1
    concurrent_trainings: ConcurrentTrainings = 1
    master: str = Field(
        default="",
        description="host:port where the machines of a training meet: a name of the step's machine, "
        "and a free port on it. Required for several machines; the log has the command for them.",
        examples=["node1:29500"],
    )
    wait_s: int = Field(
        default=WAIT_S, ge=1, description="Longest wait for the other machines to start, in seconds."
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        if self.machines > 1 and self.concurrent_trainings > 1:
            yield Violation(
                "concurrent_trainings",
                f"trainings on {self.machines} machines cannot run at the same time, got "
                f"{self.concurrent_trainings}",
                "remove it, or use the launcher slurm or ray",
                involves=("machines", "concurrent_trainings"),
            )
        if self.machines > 1 and not self.master:
            yield Violation(
                "master",
                f"launcher.master is required for a training on {self.machines} machines",
                "set it to a name of this machine and a free port on it, such as node1:29500",
            )


_SET_BY_SLURM_LAUNCHER = {
    "--array": ("-a", "set launcher.workers"),
    "--nodes": ("-N", "set launcher.machines"),
    "--ntasks-per-node": (None, "a machine of a training is one task, and so is a shard of an encoding"),
    "--output": ("-o", "the output is in the log of the step, and in the scratch folder after a failure"),
    "--job-name": ("-J", "the name is unique for each job, because a job is cancelled by its name"),
    "--wait": ("-W", "every job is awaited"),
    "--wrap": (None, "the launcher has a command of its own"),
}
"""Options of `sbatch` that the launcher sets: their short form, and what a user can do instead."""


def _set_by_slurm_launcher(option: str) -> str | None:
    # A short option may be followed by its value without a space, such as -N2.
    long = option.partition("=")[0]
    for name, (short, _) in _SET_BY_SLURM_LAUNCHER.items():
        if long == name or (short is not None and option.startswith(short)):
            return name
    return None


class SlurmSettings(Settings):
    """Encoding and training run as jobs of Slurm."""

    kind: Literal["slurm"] = Field(description="Launcher of encoding and training.")
    workers: NumShards = 1
    machines: NumMachines = 1
    concurrent_trainings: ConcurrentTrainings = 1
    options: tuple[str, ...] = Field(
        default=(),
        description="Options of `sbatch` for each job, one text per option, such as `--partition=gpu`. The "
        "launcher sets --array, --nodes, --ntasks-per-node, --output, --job-name, --wait and --wrap itself.",
        examples=[["--partition=gpu", "--gres=gpu:1"]],
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        for index, option in enumerate(self.options):
            if not option.startswith("-") or option != option.strip():
                what = (
                    f"an option of sbatch must start with - and not be surrounded by spaces, got {option!r}"
                )
                yield Violation(f"options[{index}]", what, "write it as one text, such as --partition=gpu")
            elif "\0" in option:
                what = f"an option of sbatch must not contain a NUL character, got {option!r}"
                yield Violation(f"options[{index}]", what, "remove the character")
            elif (name := _set_by_slurm_launcher(option)) is not None:
                what = f"the launcher sets {name} of sbatch itself, got {option!r}"
                yield Violation(f"options[{index}]", what, f"remove it: {_SET_BY_SLURM_LAUNCHER[name][1]}")


class KubernetesSettings(Settings):
    """Encoding runs in pods of Kubernetes. Training runs where the executor runs its step."""

    kind: Literal["kubernetes"] = Field(description="Launcher of encoding and training.")
    namespace: str = Field(
        default="default", min_length=1, description="Namespace in which the pods are created."
    )
    image: str = Field(
        min_length=1,
        description="Image with this version of Latentline, such as registry.example.com/latentline:0.3.0.",
    )
    workers: NumShards = 1
    pod: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Keys merged into the specification of each pod (PodSpec), such as nodeSelector, "
        "tolerations and volumes.",
        examples=[{"nodeSelector": {"accelerator": "h100"}}],
    )


class RaySettings(Settings):
    """Encoding and training run as jobs of a Ray cluster."""

    kind: Literal["ray"] = Field(description="Launcher of encoding and training.")
    address: str = Field(
        default="http://127.0.0.1:8265",
        description="Address of the cluster's dashboard, to which jobs are submitted.",
        examples=["http://head:8265"],
    )
    workers: NumShards = 1
    machines: NumMachines = 1
    concurrent_trainings: ConcurrentTrainings = 1
    num_cpus: float = Field(
        default=1.0, gt=0, description="Number of CPUs that Ray reserves for each process."
    )
    num_gpus: float = Field(
        default=0.0, ge=0, description="Number of GPUs that Ray reserves for each process."
    )
    python: str = Field(
        default="python",
        min_length=1,
        description="Python with Latentline and Ray on the nodes: a name, or a path that all nodes have.",
    )
    wait_s: int = Field(
        default=WAIT_S,
        ge=1,
        description="Longest wait for nodes with enough CPUs and GPUs, and for the machines of a training to "
        "connect, in seconds. Nodes that are busy are awaited without a limit.",
    )
    runtime_env: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Runtime environment of the jobs, as Ray's documentation describes it, such as env_vars "
        "and pip.",
        examples=[{"env_vars": {"HF_HOME": "/shared/huggingface"}}],
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        if not self.address.startswith(("http://", "https://")):
            what = f"launcher.address must start with http:// or https://, got {self.address!r}"
            yield Violation("address", what, "use the address of the dashboard, such as http://head:8265")
        variables = self.runtime_env.get("env_vars", {})
        if not isinstance(variables, dict) or not all(isinstance(each, str) for each in variables.values()):
            what = "launcher.runtime_env.env_vars must be a mapping of names to texts"
            yield Violation("runtime_env", what, "put numbers in quotes, such as {OMP_NUM_THREADS: '4'}")


LauncherSettings: TypeAlias = LocalSettings | SlurmSettings | KubernetesSettings | RaySettings


class DeploymentFile(Settings):
    """A deployment of Latentline: where recipes run."""

    executor: Annotated[
        ExecutorSettings,
        BeforeValidator(_name_as_section, json_schema_input_type=ExecutorName | ExecutorSettings),
    ] = Field(
        default_factory=lambda: ExecutorSettings.model_validate({"import": "in_process"}),
        description="Dagster executor of all jobs. in_process: steps run one after another in the process of "
        "the run. multiprocess: each step runs in its own process, independent steps at the same time. k8s: "
        "each step runs in a pod (requires dagster-k8s). Any other executor: a section with `import` and "
        "`config`.",
    )
    launcher: LauncherSettings = Field(
        default_factory=LocalSettings,
        discriminator="kind",
        description="Where encoding and training run. All other work of a step runs where the executor runs "
        "the step.",
    )
    pools: Literal["instance", "machine"] = Field(
        default="instance",
        description="Pool of the steps that encode or train. By default, one step per pool runs at a time. "
        "instance: one pool `gpu` for all runs of the Dagster instance. machine: one pool `gpu_<machine>` "
        "for each machine.",
    )
    scratch: FolderPath = Field(
        default=DEFAULT_SCRATCH,
        description="Local folder for working copies of output folders that are addresses, for unpacked "
        "images in shards, for copies of packs, for compiled blocks, and for the output of Slurm jobs. "
        "Relative to the project root.",
    )
    seal_packs: bool = Field(
        default=False,
        description="Copy new cache entries into packs when a step has encoded at least 100, and when a "
        "worker has completed a shard of at least 100. `latentline gc` deletes the single files.",
    )
    pack_copies_gb: float = Field(
        default=20.0,
        ge=0,
        description="Maximum size in GB of the copies that trainings keep of the packs of remote caches, in "
        "the folder `packs` of the scratch folder. 0 reads from the remote cache only.",
    )


class Deployment(DeploymentFile):
    """A loaded deployment: the file's values plus its path, with an absolute `scratch`."""

    source: Path | None = Field(default=None, description="Path of the YAML file; None for the defaults.")


def _unknown_key_fix(path: KeyPath) -> str | None:
    if len(path) == 1 and path[0] in keys_of(RecipeFile):
        return "remove it; it is a key of recipes, which are in configs/"
    # All other launchers train on several machines.
    if path == ("launcher", "machines"):
        return (
            "remove it, and start a training in several pods with deploy/kubernetes-training.yaml; "
            "docs/launchers.md#training-on-kubernetes has the steps"
        )
    return None


DEPLOYMENT = FileKind(
    name="deployment file",
    model=DeploymentFile,
    first_key="executor",
    example=f"a file in deploy/, such as local.yaml, or unset {DEPLOYMENT_VARIABLE}",
    schema=SCHEMA_FILE,
    unknown_key_fix=_unknown_key_fix,
)


def load_deployment() -> Deployment:
    """Return the deployment that `LATENTLINE_DEPLOYMENT` names, or the default one without the variable.

    The path is relative to the working directory. All mistakes are in one `DeploymentError`.
    """
    chosen = os.environ.get(DEPLOYMENT_VARIABLE, "")
    return read_deployment(Path(chosen)) if chosen else _loaded({}, None)


def _credential_mistake(path: KeyPath, what: str) -> Mistake:
    fix = "remove it; set an environment variable, or use a secret of the scheduler (docs/deployment.md)"
    where = dotted(path) or "the file"
    return Mistake(path, f"{where} must not contain credentials, but has {what}", fix)


def read_deployment(file: Path) -> Deployment:
    """Return the deployment in `file`; see `load_deployment`."""
    file = expanded(str(file)).absolute()
    if not file.exists():
        fix = f"set {DEPLOYMENT_VARIABLE} to a deployment file, or unset it for the defaults"
        raise DeploymentError("the deployment file does not exist", where=path_in_recipe(file), fix=fix)

    document, mistakes = read_yaml_file(file, DEPLOYMENT)
    credentials = [
        PlacedMistake(path_in_recipe(file), _credential_mistake(path, what), document.line(path))
        for path, what in credentials_in(document.data)
    ]
    # Other messages about these values could show them.
    secret_paths = [each.mistake.path for each in credentials]
    mistakes = [
        each for each in mistakes if not any(_contains(each.mistake.path, path) for path in secret_paths)
    ]
    if mistakes or credentials:
        placed = sorted([*mistakes, *credentials], key=lambda each: each.line or 0)
        raise file_error(placed, DeploymentError, DEPLOYMENT)
    return _loaded(document.data, file)


def deployment_values(deployment: Deployment) -> dict[str, Any]:
    """Return all settings, defaults included, as the content of an equivalent file."""
    values = deployment.model_dump(mode="json", exclude={"source"})
    executor = deployment.executor
    if executor.import_path in EXECUTORS and not executor.config:
        values["executor"] = executor.import_path
    return values


def scratch_folder(root: Path) -> Path:
    """Return the folder of all working copies: `scratch` of the deployment, or the default below `root`."""
    deployment = load_deployment()
    return root / DEFAULT_SCRATCH if deployment.source is None else deployment.scratch


def deployment_error(deployment: Deployment, key: str, what: str, fix: str) -> DeploymentError:
    """Return an error about a top-level key of a loaded deployment."""
    place, line = DEPLOYMENT_VARIABLE, None
    if deployment.source is not None:
        # A loaded deployment has no lines, so the file is read again.
        place = path_in_recipe(deployment.source)
        line = read_yaml_file(deployment.source, DEPLOYMENT)[0].line((key,))
    return file_error([PlacedMistake(place, Mistake((key,), what, fix), line)], DeploymentError, DEPLOYMENT)


def _contains(path: KeyPath, other: KeyPath) -> bool:
    # The empty path is the complete file, and messages about it show no values.
    return bool(path) and other[: len(path)] == path


def _loaded(data: dict[str, Any], source: Path | None) -> Deployment:
    # The default is relative to the project root, like a path in the file.
    values = {"scratch": str(DeploymentFile.model_fields["scratch"].default), **data}
    values["scratch"] = str(in_project(values["scratch"]))
    values["source"] = None if source is None else str(source)
    return Deployment.model_validate_json(json.dumps(values))
