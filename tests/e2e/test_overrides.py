"""Runs whose configuration overrides settings of the recipe."""

from __future__ import annotations

import json
import platform

import pytest
from dagster import AssetCheckSeverity

from pipeline.trained_lora.export.lora_files import read_provenance
from tests.e2e.planted_texts import files_with


def config_of(overrides: dict[str, object]) -> dict[str, object]:
    return {"ops": {"small__trained_lora": {"config": overrides}}}


def run_with(workspace, **overrides: object):
    config = workspace.root / "run.yaml"
    config.write_text(json.dumps(config_of(overrides)), encoding="utf-8")
    return workspace.dagster(
        "job", "execute", "-m", "assets.definitions", "-j", "small_train", "-c", str(config)
    )


def test_overrides_of_a_run_are_used_and_recorded_in_its_files_and_in_dagster(cached) -> None:
    overrides = {"steps": 2, "rank": 3, "learning_rate": 0.002, "seed": 7}
    result = cached.execute("train", run_config=config_of(overrides))
    assert result.success
    (trained,) = result.asset_materializations_for_node("small__trained_lora")
    numbers = {name: value.value for name, value in trained.metadata.items() if "override" in name}
    assert numbers == {f"override_{name}": value for name, value in overrides.items()}, "numbers to plot"
    assert (trained.metadata["rank"].value, trained.metadata["steps"].value) == (3, 2)
    assert (trained.metadata["batch_size"].value, trained.metadata["plan_global_batch_size"].value) == (2, 2)
    assert trained.metadata["node"].value == platform.node()
    (declared,) = [each for each in result.get_asset_check_evaluations() if each.check_name == "as_declared"]
    assert (declared.passed, declared.severity, declared.blocking) == (False, AssetCheckSeverity.WARN, False)
    assert "steps 2 instead of 4" in str(declared.description)

    assert cached.report("trained_lora")["overrides"] == overrides
    record = read_provenance(cached.out / "lora")
    assert record["overrides"] == overrides
    assert record["facts"]["plan"]["seed"] == 7
    assert record["facts"]["lora"]["rank"] == 3
    assert record["facts"]["optimizer"]["learning_rate"] == 0.002
    assert [path.name for path in (cached.out / "runs").iterdir()] == [cached.report("trained_lora")["run"]]
    assert cached.file.read_text("utf-8").count('"steps": 4') == 1


def test_H05_no_published_file_names_a_folder_of_this_machine(cached) -> None:
    cached.recipe(
        training={
            "steps": 2,
            "batch_size": 2,
            "sample_every": 2,
            "sample_prompts": [{"prompt": "a photograph", "steps": 2}],
            "lora": {"rank": 2, "modules": ["mid_block.*.to_q"]},
        }
    )
    assert cached.execute("train").success
    published = cached.out / "lora"
    assert {path.suffix for path in published.iterdir()} >= {".safetensors", ".md", ".json", ".parquet"}
    assert list(files_with(published, [str(cached.root), str(cached.model.parent)])) == []


@pytest.mark.slow
def test_a_run_without_overrides_is_separate_from_one_with_overrides(cached) -> None:
    assert run_with(cached, seed=7).returncode == 0
    overridden = cached.report("trained_lora")["run"]
    assert run_with(cached).returncode == 0
    record = read_provenance(cached.out / "lora")
    assert cached.report("trained_lora")["run"] != overridden
    assert record["overrides"] == {}
    repeated = run_with(cached, seed=7)
    assert repeated.returncode == 0
    assert cached.report("trained_lora")["launched"] is False, "both runs exist, and neither is repeated"
    assert cached.report("trained_lora")["run"] == overridden
    assert read_provenance(cached.out / "lora")["overrides"] == {"seed": 7}
