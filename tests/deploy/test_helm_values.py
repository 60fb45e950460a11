"""deploy/helm-values.yaml: what can be checked without a cluster.

With the package helm-python-sdk and LATENTLINE_DAGSTER_CHART, the folder of Dagster's chart, Helm's own code
renders the chart, and validates the values against the schema of the chart.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import latentline

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "helm-values.yaml"
CHART = os.environ.get("LATENTLINE_DAGSTER_CHART")
TEXT = FILE.read_text(encoding="utf-8")
VALUES = YAML(typ="safe").load(TEXT)
LAUNCHER = VALUES["runLauncher"]["config"]["k8sRunLauncher"]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each scalar of nested YAML with its keys, joined by slashes."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, f"{path}/{key}")
    elif isinstance(value, list):
        for child in value:
            yield from leaves(child, path)
    else:
        yield path, value


def deployment() -> dict[str, Any]:
    (only,) = VALUES["dagster-user-deployments"]["deployments"]
    return only


def test_secrets_are_named_and_their_values_are_not_in_the_file() -> None:
    assert VALUES["generatePostgresqlPasswordSecret"] is False
    secret = [
        path for path, _ in leaves(VALUES) if re.search(r"password|token|accesskey", path, re.IGNORECASE)
    ]
    assert secret == ["/generatePostgresqlPasswordSecret"]
    names = {VALUES["global"]["postgresqlSecretName"], deployment()["envSecrets"][0]["name"]}
    assert names == {"latentline-postgresql", "latentline-credentials"}


def test_runs_have_a_gpu_that_the_code_server_does_not_replace() -> None:
    limits, requests = LAUNCHER["resources"]["limits"], LAUNCHER["resources"]["requests"]
    assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"], "Kubernetes rejects other values"
    assert "resources" not in deployment()


def test_each_volume_is_mounted_and_each_mount_is_a_volume() -> None:
    volumes = [volume["name"] for volume in deployment()["volumes"]]
    assert [mount["name"] for mount in deployment()["volumeMounts"]] == volumes


def test_versions_are_those_of_the_project() -> None:
    assert deployment()["image"]["tag"] == latentline.__version__
    (dagster,) = re.findall(r"^dagster==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert f"--version {dagster} " in TEXT


def test_the_limits_of_runs_are_those_of_the_other_deployments() -> None:
    settings = YAML(typ="safe").load(ROOT / "deploy" / "dagster.yaml")
    limits = settings["concurrency"]["runs"]["tag_concurrency_limits"]
    assert VALUES["concurrency"]["runs"]["tagConcurrencyLimits"] == limits
    assert (
        VALUES["postgresql"]["postgresqlScheme"] == settings["storage"]["postgres"]["postgres_db"]["scheme"]
    )
    retries, expected = VALUES["dagsterDaemon"]["runRetries"], settings["run_retries"]
    assert [retries["enabled"], retries["maxRetries"], retries["retryOnAssetOrOpFailure"]] == [
        expected["enabled"],
        expected["max_retries"],
        expected["retry_on_asset_or_op_failure"],
    ]
    retention, expected = VALUES["retention"], settings["retention"]
    assert retention["enabled"]
    assert retention["schedule"]["purgeAfterDays"] == expected["schedule"]["purge_after_days"]
    days = retention["sensor"]["purgeAfterDays"]
    assert days == {**expected["sensor"]["purge_after_days"], "started": 30}
    assert VALUES["telemetry"]["enabled"] is False


def test_the_kubernetes_job_of_a_run_has_a_gpu_the_volumes_and_the_user_of_the_image() -> None:
    dagster_k8s = pytest.importorskip("dagster_k8s", reason="needs dagster-k8s")
    create = dagster_k8s.container_context.K8sContainerContext.create_from_config
    pods, job_spec = LAUNCHER["runK8sConfig"]["podSpecConfig"], LAUNCHER["runK8sConfig"]["jobSpecConfig"]
    launcher = create(
        {
            "k8s": {
                "resources": LAUNCHER["resources"],
                "security_context": LAUNCHER["securityContext"],
                "run_k8s_config": {"pod_spec_config": pods, "job_spec_config": job_spec},
            }
        }
    )
    # The chart passes these to the code server, which passes them to its runs.
    server = create(
        {
            "k8s": {
                "env": deployment()["env"],
                "env_secrets": [each["name"] for each in deployment()["envSecrets"]],
                "volumes": deployment()["volumes"],
                "volume_mounts": deployment()["volumeMounts"],
                "run_k8s_config": {
                    "pod_spec_config": {"security_context": deployment()["podSecurityContext"]}
                },
            }
        }
    )
    job = dagster_k8s.construct_dagster_k8s_job(
        dagster_k8s.DagsterK8sJobConfig(dagster_home="/app/.dagster", job_image="image"),
        args=["dagster", "api", "execute_run"],
        job_name="run",
        user_defined_k8s_config=launcher.merge(server).run_k8s_config,
    )
    assert job.spec.ttl_seconds_after_finished == 86400
    pod = job.spec.template.spec
    assert (pod.termination_grace_period_seconds, pod.security_context.fs_group) == (60, 1000)
    assert {volume.name for volume in pod.volumes} >= {"recipes", "data", "cache", "outputs", "shm"}
    (container,) = pod.containers
    assert container.resources.limits["nvidia.com/gpu"] == "1"
    assert {mount.mount_path for mount in container.volume_mounts} >= {
        "/app/data",
        "/app/outputs",
        "/dev/shm",
    }
    assert {each.secret_ref.name for each in container.env_from if each.secret_ref} == {
        "latentline-credentials"
    }
    assert container.security_context.allow_privilege_escalation is False


@pytest.fixture(scope="module")
def manifests() -> dict[str, list[dict[str, Any]]]:
    """Return the manifests of the chart by kind."""
    chart = pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk")
    if CHART is None:
        pytest.skip("needs LATENTLINE_DAGSTER_CHART, a folder with Dagster's chart")
    with chart.Chart.load(CHART) as loaded:
        rendered = loaded.render(values=chart.values_from_yaml(TEXT), name="dagster", namespace="latentline")
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for path, text in rendered.items():
        for document in YAML(typ="safe").load_all(text) if path.endswith(".yaml") else ():
            if document:
                by_kind.setdefault(document["kind"], []).append(document)
    return by_kind


def test_the_chart_renders_with_the_values(manifests: dict[str, list[dict[str, Any]]]) -> None:
    assert "Secret" not in manifests
    assert "Ingress" not in manifests
    assert {each["spec"]["type"] for each in manifests["Service"]} == {"ClusterIP"}
    assert len(manifests["Deployment"]) == 3
    for each in manifests["Deployment"]:
        pod = each["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert [container["image"] for container in pod["containers"]] == [
            "registry.example.com/latentline:0.3.0"
        ]


def test_the_settings_of_the_rendered_instance_are_those_of_dagster_k8s(
    manifests: dict[str, list[dict[str, Any]]],
) -> None:
    dagster_k8s = pytest.importorskip("dagster_k8s", reason="needs dagster-k8s")
    from dagster import Field
    from dagster._config import process_config

    (instance,) = (each for each in manifests["ConfigMap"] if "dagster.yaml" in (each["data"] or {}))
    launcher = YAML(typ="safe").load(instance["data"]["dagster.yaml"])["run_launcher"]
    assert (launcher["module"], launcher["class"]) == ("dagster_k8s", "K8sRunLauncher")
    schema = Field(dagster_k8s.K8sRunLauncher.config_type()).config_type
    assert process_config(schema, launcher["config"]).success

    contexts = [
        json.loads(variable["value"])
        for each in manifests["Deployment"]
        for variable in each["spec"]["template"]["spec"]["containers"][0]["env"]
        if variable["name"] == "DAGSTER_CONTAINER_CONTEXT"
    ]
    (context,) = (
        dagster_k8s.container_context.K8sContainerContext.create_from_config(each) for each in contexts
    )
    assert "resources" not in context.run_k8s_config.container_config
