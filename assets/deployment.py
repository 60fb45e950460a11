"""What a deployment decides in the definitions: executor, launcher, and the pool of steps that use a GPU."""

import platform
import re
from copy import copy
from importlib import import_module
from typing import Any

from dagster import (
    ConfigurableResource,
    DagsterError,
    ExecutorDefinition,
    GraphDefinition,
    validate_run_config,
)
from pydantic import create_model

from assets.names import GPU_POOL
from pipeline.errors import install_extra
from pipeline.recipe.deployment import Deployment, deployment_error

# Texts, because packages of schedulers are imported only if the deployment names them.
EXECUTORS = {
    "in_process": "dagster.in_process_executor",
    "multiprocess": "dagster.multiprocess_executor",
    "k8s": "dagster_k8s.k8s_job_executor",
}
"""Import paths of the executors that have a name."""

LAUNCHERS = {
    "local": "resources.local_launcher.AccelerateLauncher",
    "slurm": "launchers.slurm.SlurmLauncher",
    "kubernetes": "launchers.kubernetes.KubernetesLauncher",
    "ray": "launchers.ray.RayLauncher",
}
"""Import path of each kind's launcher, a `ConfigurableResource` with a field for each setting of its kind."""

EXTRAS = {"dagster_k8s": "k8s", "kubernetes": "k8s", "ray": "ray"}
"""Extra in pyproject.toml that installs a package, by the package's import name."""


def build_executor(deployment: Deployment) -> ExecutorDefinition:
    """Return the executor of all jobs."""
    settings = deployment.executor
    path = EXECUTORS.get(settings.import_path, settings.import_path)
    executor = _imported(path, deployment, "executor")
    if not isinstance(executor, ExecutorDefinition):
        what = f"executor must be an executor of Dagster, but {path} is of type {type(executor).__name__}"
        raise deployment_error(deployment, "executor", what, "name an ExecutorDefinition")
    if not settings.config:
        return executor

    # `configured` accepts any values. Without this check, each job would fail.
    configured = executor.configured(settings.config)
    try:
        validate_run_config(GraphDefinition(name="empty").to_job(executor_def=configured), {})
    except DagsterError as err:
        what = f"{path} does not accept executor.config: {' '.join(str(err).split())}"
        fix = "compare executor.config with the documentation of the executor"
        raise deployment_error(deployment, "executor", what, fix) from err
    return configured


def build_launcher(deployment: Deployment) -> ConfigurableResource[Any]:
    """Return the launcher of encoding and training."""
    launcher: type[ConfigurableResource[Any]] = _imported(
        LAUNCHERS[deployment.launcher.kind], deployment, "launcher"
    )
    settings = deployment.launcher.model_dump(mode="json", exclude={"kind"})
    # What a launcher needs of the rest of the deployment, so that no other code loads the file.
    shared = {"seal_packs": deployment.seal_packs, "scratch": str(deployment.scratch)}
    settings |= {name: value for name, value in shared.items() if name in launcher.model_fields}

    # Defaults of a class, because a run configuration replaces all values of an instance: a run that sets
    # grace_s would lose the machines or the partition of the deployment.
    defaults = {name: copy(launcher.model_fields[name]) for name in settings}
    for name, field in defaults.items():
        field.default, field.default_factory = settings[name], None
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in defaults.items()}
    return create_model(launcher.__name__, __base__=launcher, __doc__=launcher.__doc__, **fields)()


def gpu_pool(deployment: Deployment) -> str:
    """Return the pool of the steps that may load a model: `gpu`, or `gpu_<machine>` with a pool per machine.

    The machine is the one on which the definitions load.
    """
    if deployment.pools == "instance":
        return GPU_POOL

    # Dagster allows letters, digits and _ in names. Machines with names that become equal share a pool.
    return f"{GPU_POOL}_{re.sub(r'[^A-Za-z0-9_]', '_', platform.node())}"


def _imported(path: str, deployment: Deployment, key: str) -> Any:
    """Return the object at an import path that the deployment's `key` chooses."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as err:
        missing = str(err.name)
        what = f"{key} needs {path}, but Python finds no module {missing}"
        extra = EXTRAS.get(missing.partition(".")[0])
        fix = f"use one of the other values of {key}, or install the package that contains {missing}"
        if extra is not None:
            fix = install_extra(extra)
        raise deployment_error(deployment, key, what, fix) from err
    except AttributeError as err:
        what = f"{key} needs {path}, but {module} contains no {name}"
        raise deployment_error(deployment, key, what, "correct the import path") from err
