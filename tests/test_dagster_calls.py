"""Calls of Dagster that it does not document, and the versions with which they are tested."""

from __future__ import annotations

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from dagster import DagsterInstance, Executor, ExecutorDefinition
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]

SHIPPED = ("assets", "resources", "latentline", "launchers", "pipeline")

UNDOCUMENTED = {
    DagsterInstance: (
        *("add_run_tags", "all_logs", "get_records_for_run", "get_run_step_stats"),
        *("report_run_failed", "report_run_canceling", "event_log_storage", "run_launcher"),
        "root_directory",
    ),
    ExecutorDefinition: ("get_requirements",),
    Executor: ("retries", "step_dependency_config"),
}
"""Members that the shipped packages use, each with its reason in a comment above the line."""

STORAGE = (
    *("claim_concurrency_slot", "free_concurrency_slot_for_step", "free_concurrency_slots_for_run"),
    *("get_pool_config", "get_pool_limits", "initialize_concurrency_limit_to_default", "path_for_shard"),
    "supports_global_concurrency_limits",
)
"""Members of the storage of events that the shipped packages use."""

_LINES_ABOVE = 20


def test_the_installed_dagster_is_the_one_for_which_undocumented_calls_are_tested() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    required = {each.name: str(each.specifier) for each in map(Requirement, dependencies)}
    assert required["dagster"] == required["dagster-pipes"] == "<1.14,>=1.13"
    assert version("dagster").startswith("1.13.")


def test_each_undocumented_member_exists(tmp_path: Path) -> None:
    for owner, names in UNDOCUMENTED.items():
        for name in names:
            assert inspect.getattr_static(owner, name, None) is not None, f"{owner.__name__}.{name}"
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        assert [name for name in STORAGE if not hasattr(instance.event_log_storage, name)] == []


@pytest.mark.parametrize("package", SHIPPED)
def test_the_reason_for_an_undocumented_call_is_in_a_comment_above_it(package: str) -> None:
    calls = {f".{name}" for names in UNDOCUMENTED.values() for name in names}
    without_reason: list[str] = []
    for file in (ROOT / package).rglob("*.py"):
        lines = file.read_text("utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            # Own modules have members of the same names.
            is_dagsters = "instance." in line or "executor." in line
            if is_dagsters and any(call in line for call in calls):
                above = lines[max(0, number - _LINES_ABOVE) : number]
                if not any("Undocumented" in each for each in above):
                    without_reason.append(f"{file.relative_to(ROOT)}:{number}")
    assert without_reason == []


@pytest.mark.parametrize("package", SHIPPED)
def test_nothing_is_imported_from_private_modules_of_dagster(package: str) -> None:
    private = ("from dagster._", "import dagster._", "from dagster_shared")
    imports = [
        f"{file.relative_to(ROOT)}: {line}"
        for file in (ROOT / package).rglob("*.py")
        for line in file.read_text("utf-8").splitlines()
        if line.strip().startswith(private)
    ]
    assert imports == []
