"""The summary of a run: numbers of a good one, and what a stopped one leaves out."""

import uuid
from pathlib import Path

import pytest
from dagster import DagsterExecutionInterruptedError, DagsterInstance, asset, materialize

from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.reporting.reports import write_report
from resources.run_summary import RunSummary, summarize_run


def test_a_good_run_has_the_numbers_of_its_recipe_and_no_problem(run_step, small: Recipe) -> None:
    summary = run_step(lambda: None)
    assert summary.problems == []
    [numbers] = summary.numbers
    title, *lines = numbers.splitlines()
    assert title.startswith("small: done after"), "a run without a job is titled with its recipe"
    assert lines == [
        "  gates     0 passed, 0 warnings",
        "  training  3 steps",
        f"  LoRA      {small.output_dir}/lora",
        "  next      latentline sample small --step all   draws pictures at each saved step",
        "            latentline export small --step N   publishes the best step in lora/",
    ]


def test_a_stopped_run_has_stopped_rather_than_failed(small: Recipe) -> None:
    write_report(small.output_dir, "raw_images", {"in": 3, "kept": 3, "rejected": 0})

    @asset(key=["small", "raw_images"])
    def scan() -> None: ...

    @asset(key=["small", "vae_latents"], deps=[["small", "raw_images"]])
    def encode() -> None:
        raise DagsterExecutionInterruptedError

    with DagsterInstance.ephemeral() as instance:
        with pytest.raises(DagsterExecutionInterruptedError):
            materialize([scan, encode], instance=instance)
        [record] = instance.get_run_records()
        run_id = record.dagster_run.run_id
        summary = summarize_run(instance, run_id, [small], restart="run it again")
    assert summary.stopped
    assert summary.numbers == []
    assert str(summary.problems[0]).endswith("\n  fix:   run it again; finished work is kept")


def test_reports_at_an_address_that_cannot_be_read_are_missing_from_the_summary(tmp_path: Path) -> None:
    recipe = recipe_from_mapping(
        "small",
        {
            "datasets": [{"name": "photos", "path": tmp_path / "data"}],
            "cache_dir": tmp_path / "cache",
            "output_dir": f"memory://{uuid.uuid4().hex}",
            "model": {"base": "models/none"},
        },
    )
    (recipe.output_dir / ".mirror.lock").mkdir(parents=True)  # in the place of a file

    @asset(key=["small", "raw_images"])
    def scan() -> None: ...

    with DagsterInstance.ephemeral() as instance:
        run_id = materialize([scan], instance=instance).run_id
        assert summarize_run(instance, run_id, [recipe]) == RunSummary([], [])
