"""A run with settings of its own, as `dagster job execute -c` starts it."""

from __future__ import annotations

import json

import pytest

from pipeline.trained_lora.export.lora_files import read_provenance


def with_config(workspace, **given: object):
    config = workspace.root / "run.yaml"
    config.write_text(json.dumps({"ops": {"small__trained_lora": {"config": given}}}), encoding="utf-8")
    return workspace.dagster(
        "job", "execute", "-m", "assets.definitions", "-j", "small_train", "-c", str(config)
    )


def test_a_run_has_its_own_steps_rank_rate_and_seed_and_its_files_say_so(cached) -> None:
    given = {"steps": 2, "rank": 3, "learning_rate": 0.002, "seed": 7}
    done = with_config(cached, **given)
    assert done.returncode == 0, done.stderr[-3000:]
    assert cached.report("trained_lora")["overrides"] == given
    record = read_provenance(cached.out / "lora")
    assert record["overrides"] == given
    assert record["facts"]["plan"]["seed"] == 7
    assert record["facts"]["lora"]["rank"] == 3
    assert record["facts"]["optimizer"]["learning_rate"] == 0.002
    assert [path.name for path in (cached.out / "runs").iterdir()] == [cached.report("trained_lora")["run"]]
    assert cached.file.read_text("utf-8").count('"steps": 4') == 1


@pytest.mark.slow
def test_a_value_out_of_range_ends_with_what_where_and_fix(cached) -> None:
    done = with_config(cached, rank=0)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-3:]
    assert last[0].startswith("RecipeError: training.lora.rank must be between 1 and 4096, got 0")
    assert last[1] == "  where: overrides of small.yaml, training.lora.rank"
    assert last[2].startswith("  fix: ")
    assert not (cached.out / "runs").exists()


@pytest.mark.slow
def test_without_settings_the_recipes_run_comes_back_and_is_another(cached) -> None:
    assert with_config(cached, seed=7).returncode == 0
    own = cached.report("trained_lora")["run"]
    assert with_config(cached).returncode == 0
    record = read_provenance(cached.out / "lora")
    assert cached.report("trained_lora")["run"] != own
    assert record["overrides"] == {}
    again = with_config(cached, seed=7)
    assert again.returncode == 0
    assert cached.report("trained_lora")["launched"] is False, "both runs are kept"
    assert cached.report("trained_lora")["run"] == own
    assert read_provenance(cached.out / "lora")["overrides"] == {"seed": 7}
