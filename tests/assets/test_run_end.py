"""What a run came to, by its events: real runs in this process, each ended in another way."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetCheckResult,
    AssetCheckSpec,
    AssetsDefinition,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    MaterializeResult,
    asset,
    materialize,
)

from assets.run_end import EndedRun, ended_run
from pipeline.errors import TableError
from pipeline.reporting.reports import write_report
from resources.failures import failures_stated


@pytest.fixture
def ran(tmp_path) -> Any:
    """Runs a body as the asset small/trained_lora, and says what the run came to."""

    def run(body: Any, asset_name: str = "trained_lora") -> EndedRun:
        check = AssetCheckSpec("loss_fell", asset=["small", asset_name], description="d")

        @asset(key=["small", asset_name], name=None, check_specs=[check])
        def step() -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
            body()
            write_report(tmp_path, asset_name, {"steps": 3, "launched": True, "first_loss": None})
            yield MaterializeResult()
            yield AssetCheckResult(passed=True)

        return look(step)

    def look(step: AssetsDefinition) -> EndedRun:
        with DagsterInstance.ephemeral() as instance:
            try:
                run_id = materialize([step], instance=instance, raise_on_error=False).run_id
            except BaseException:
                [record] = instance.get_run_records()
                run_id = record.dagster_run.run_id
            return ended_run(instance, run_id, {"small": tmp_path, "other": Path("/nowhere")})

    return run


def raises(error: BaseException) -> Any:
    def body() -> None:
        with failures_stated():
            raise error

    return body


def test_a_good_run_has_numbers_of_its_recipe_and_no_problem(ran, tmp_path) -> None:
    ended = ran(lambda: None)
    assert ended.problems == []
    assert set(ended.numbers) == {"small"}
    head, *lines = ended.numbers["small"].splitlines()
    assert head.startswith("small: done after"), "a run without a job is called by its recipe"
    assert lines == [
        "  gates     0 passed, 0 warnings",
        "  training  3 steps",
        f"  LoRA      {tmp_path}/lora",
    ]


def test_an_error_of_our_own_is_told_as_it_is_with_the_recipes_name(ran) -> None:
    ended = ran(raises(TableError("no table", where="x.parquet", fix="run <recipe>_cache")))
    assert ended.problems == ["TableError: no table\n  where: x.parquet\n  fix:   run small_cache"]
    assert ended.numbers == {}


def test_a_defect_names_the_innermost_error_the_asset_and_the_line(ran) -> None:
    def body() -> None:
        try:
            _ = 1 // 0
        except ZeroDivisionError as err:
            raise RuntimeError("outer") from err

    [problem] = ran(body).problems
    what, where, place, fix = problem.splitlines()
    assert what == "ZeroDivisionError: integer division or modulo by zero"
    assert where == "  where: asset small/trained_lora"
    assert "test_run_end.py" in place
    assert fix.startswith("  fix:   this is a defect")


def checkpoint_of(run: Path, step: int) -> Path:
    checkpoint = run / "checkpoints" / f"step-{step:08}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    return checkpoint


def test_a_stopped_run_says_where_it_goes_on(ran, tmp_path) -> None:
    checkpoint = checkpoint_of(tmp_path / "runs" / "ab", 4)
    os.utime(checkpoint / "COMPLETE", (1, 1))  # of an earlier part of the same training

    def body() -> None:
        (tmp_path / "runs" / "ab" / "run.json").write_text("{}")
        raise DagsterExecutionInterruptedError

    [problem] = ran(body).problems
    assert problem.splitlines() == [
        "Stopped: the run was stopped by SIGINT, by SIGTERM or by Dagster",
        "  where: asset small/trained_lora",
        f"         checkpoint {checkpoint}",
        "  fix:   start the same job again: it goes on from there",
    ]


def test_R11_a_stopped_run_names_no_checkpoint_of_another_training(ran, tmp_path) -> None:
    other = tmp_path / "runs" / "of other settings"
    checkpoint_of(other, 400)
    (other / "run.json").write_text("{}")
    os.utime(other / "run.json", (1, 1))
    [problem] = ran(raises(DagsterExecutionInterruptedError())).problems
    assert "checkpoint" not in problem
    assert problem.endswith("what is finished is kept")


def test_a_stopped_cache_says_that_what_is_finished_is_kept(ran) -> None:
    [problem] = ran(raises(DagsterExecutionInterruptedError()), "vae_latents").problems
    assert "asset small/vae_latents\n" in problem
    assert problem.endswith("what is finished is kept")
