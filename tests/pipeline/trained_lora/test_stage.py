"""The stage: its files and table, steps from epochs, and the gates before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import polars as pl
import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store
from pipeline.errors import GateClosedError, LaunchError, TrainingError
from pipeline.log import discard
from pipeline.reporting.findings import CheckContext
from pipeline.storage.tables import Tables, frame, validated
from pipeline.trained_lora import checks as trained_lora
from pipeline.trained_lora.export.lora_files import read_provenance
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.run_folder import RunLayout, lora_steps, read_metrics
from pipeline.trained_lora.stage import plan_run, train_lora, train_part
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.equal_runs import assert_equal_runs
from tests.pipeline.trained_lora.project import FEW_MODULES
from tests.pipeline.trained_lora.runs import FILES, run, run_folders

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def completed(project: Project) -> bool:
    context = CheckContext(project.recipe, Tables(project.recipe.output_dir))
    return next(each.passed for each in trained_lora.run(context) if each.name == "plan_completed")


def test_a_finished_run_writes_its_files_table_and_provenance(
    make_project: Callable[..., Project],
) -> None:
    project, launch = make_project(), InProcessLaunch()
    result = run(project, launch)
    lora = project.recipe.output_dir / "lora"
    assert [path.name for path in sorted(lora.glob("*[nrs]"))] == FILES
    table = validated("trained_lora", result.table, "the result")
    assert table["times_seen"].sum() == sum(step.num_samples for step in read_job(launch.job_files[0]).plan())
    assert result.report["samples"] == 8
    assert result.report["launched"]
    assert result.report["startup_seconds"] >= 0
    finished = json.loads((run_folders(project)[0] / "finished.json").read_text())
    assert finished["started_at_s"] <= finished["ended_at_s"]
    record = json.loads((lora / "provenance.json").read_text())
    assert record["run"] == run_folders(project)[0].name == result.report["run"]
    assert set(record["packages"]) >= {"torch", "diffusers", "peft"}
    assert len(record["model"]["fingerprints"]["denoiser"]) == 64
    assert record["tables_sha256"]["vae_latents"] is not None
    assert pl.read_parquet(lora / "samples.parquet").equals(table)
    for name in FILES:
        if name.endswith(".safetensors"):
            inside = read_provenance(lora / name)
            assert inside == {key: value for key, value in record.items() if key in inside}
            assert inside["samples"]["images"] == sorted(set(table["content_hash"]))
            assert str(project.recipe.output_dir.parent) not in json.dumps(inside)
    assert read_provenance(lora)["samples"]["number"] == 8
    card = (lora / "README.md").read_text()
    assert 'base_model: "epsilon"' in card
    assert "samples.jpg" not in card
    assert not (lora / "samples.jpg").exists()


def test_the_card_shows_previews_and_a_run_without_previews_removes_them(
    make_project: Callable[..., Project],
) -> None:
    prompt, launch = {"prompt": "a `red` cat", "steps": 2}, InProcessLaunch()
    project = make_project(steps=2, sample_every=6, sample_prompts=[prompt])
    run(project, launch)
    lora, report = project.recipe.output_dir / "lora", project.recipe.output_dir / "reports" / "trained_lora"
    assert (lora / "samples.jpg").read_bytes() == (report / "samples.jpg").read_bytes()
    assert "1. a `red` cat (steps: 2)" in (lora / "README.md").read_text()
    assert {path.name for path in report.iterdir()} == {
        "before_after.jpg",
        "loss.png",
        "sample_losses.parquet",
        "samples.jpg",
    }
    run(project.changed("output", sample_every=0, seed=8), launch)
    assert not (lora / "samples.jpg").exists()
    assert not (report / "samples.jpg").exists()


def test_epochs_are_converted_to_steps_and_plan_completed_uses_that_number(
    make_project: Callable[..., Project],
) -> None:
    weighted = {"photos": {"weight": 3.0}, "studio": {"weight": 1.0}}
    project = make_project(datasets=weighted, steps=None, epochs=2, exhausted="end_epoch")
    launch = InProcessLaunch()
    result = run(project, launch)
    plan = read_job(launch.job_files[0]).plan()
    assert [plan[-1].epoch, plan.num_epochs] == [1, 2]
    assert result.report["steps"] == len(plan)
    assert {each["dataset"]: each["wanted"] for each in result.report["dataset_shares"]} == {
        "photos": 0.75,
        "studio": 0.25,
    }
    seen = result.table.group_by("dataset").agg(pl.col("times_seen").sum() / plan.times_seen().sum())
    assert {each["dataset"]: each["share"] for each in result.report["dataset_shares"]} == dict(
        seen.iter_rows()
    )
    assert completed(project)
    other = project.changed("output", epochs=3)
    assert not completed(other)
    assert run(other, launch).report["resumed_from"] == len(plan)
    assert completed(other)
    assert not completed(project)
    in_steps = project.changed("output", epochs=None, steps=len(plan))
    assert run(in_steps, launch).report["run"] == result.report["run"]
    assert completed(in_steps)
    run(project, launch)
    assert completed(project)


def test_files_of_half_size_pass_all_checks_of_their_run(make_project: Callable[..., Project]) -> None:
    project = make_project(steps=2, lora={**FEW_MODULES, "save_dtype": "bfloat16"})
    run(project, InProcessLaunch())
    context = CheckContext(project.recipe, Tables(project.recipe.output_dir))
    findings = trained_lora.run(context)
    assert {finding.name: finding.summary for finding in findings if not finding.passed} == {}
    full = project.recipe.training.lora.model_copy(update={"save_dtype": "float32"})
    training = project.recipe.training.model_copy(update={"lora": full})
    context = CheckContext(
        project.recipe.model_copy(update={"training": training}), Tables(project.recipe.output_dir)
    )
    failed = {finding.name for finding in trained_lora.run(context) if not finding.passed}
    assert failed == {"file_size_outliers"}


def test_a_decay_longer_than_the_epochs_is_an_error(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(steps=None, epochs=2, lr_scheduler="wsd", decay_steps=30)
    with pytest.raises(TrainingError, match="30 steps, but 2 epochs have only 6 steps"):
        run(project, InProcessLaunch())


def test_R12_an_interrupted_run_resumes_when_it_is_started_again(
    make_project: Callable[..., Project],
) -> None:
    project, launch = make_project(), InProcessLaunch()
    launch.stop_after = 2
    with pytest.raises(LaunchError):
        run(project, launch)
    assert not (project.recipe.output_dir / "lora").exists()
    launch.stop_after = None
    assert run(project, launch).report["resumed_from"] == 3
    assert len(read_metrics(RunLayout(run_folders(project)[0]).metrics, 6)) == 6


def test_R01_a_part_of_a_run_is_saved_and_measured_and_a_job_goes_on_from_it_bit_for_bit(
    make_project: Callable[..., Project],
) -> None:
    datasets = {"photos": {"validation_fraction": 0.3}}
    settings = {"steps": 4, "validate_every": 4, "gradient_accumulation": 1, "lr_scheduler": "cosine"}
    project, launch = make_project(datasets=datasets, **settings), InProcessLaunch()
    entries = RecipeEntries(project.recipe)
    job, facts, table = plan_run(entries, project.latents, project.text, log=discard)
    part, layout = replace(job, stop_after=2), RunLayout(job.folder)
    train_part(entries, part, facts, table, launch=launch, log=discard)
    assert "stopped as planned after 2 of 4 steps; a checkpoint is saved" in launch.lines
    assert list(lora_steps(layout)) == [2]
    assert not layout.result.exists()
    assert not (project.recipe.output_dir / "lora").exists()
    lines = read_metrics(layout.validation, 5)
    assert [line["step"] for line in lines] == [0, 2], "measured where it stops, although not due"
    assert lines[1]["loss"] == pytest.approx(fmean(lines[1]["by_image"]))
    assert len(lines[1]["by_image"]) == len(job.inputs.held_out)

    train_part(entries, part, facts, table, launch=launch, log=discard)
    assert sum(line.endswith("4 training") for line in launch.lines) == 2, "no step is trained twice"
    assert run(project, launch).report["resumed_from"] == 2

    whole = project.changed("whole")
    run(whole, InProcessLaunch())
    expected = plan_run(RecipeEntries(whole.recipe), whole.latents, whole.text, log=discard)[0]
    assert_equal_runs(read_job(launch.job_files[-1]), expected, 4)
    assert run(project, launch).report["launched"] is False


def test_O10_training_does_not_start_if_the_cache_fails_a_gate(make_project: Callable[..., Project]) -> None:
    project, launch = make_project(), InProcessLaunch()
    row = project.latents.row(0, named=True)
    path = Store(project.recipe.cache_dir).path(RecipeEntries(project.recipe).latent_spec(row))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(GateClosedError) as excinfo:
        run(project, launch)
    assert "vae_latents" in excinfo.value.where
    assert launch.job_files == []


def test_O10_B09_training_alone_does_not_start_with_more_processes_than_a_bucket_fills(
    make_project: Callable[..., Project],
) -> None:
    project, launch = make_project(), InProcessLaunch()
    buckets = project.recipe.buckets.model_copy(update={"underfilled": "drop"})
    project.recipe = project.recipe.model_copy(update={"buckets": buckets})
    changed = project.changed("output", num_processes=2)
    with pytest.raises(
        GateClosedError, match="1 bucket with 3 samples does not fill a batch of 2 on 2"
    ) as excinfo:
        run(changed, launch)
    assert "aspect_buckets" in excinfo.value.where
    assert launch.job_files == []


def test_O10_training_alone_applies_the_dataset_gates_without_reading_the_dataset(
    make_project: Callable[..., Project],
) -> None:
    project, launch = make_project(), InProcessLaunch()
    tables = Tables(project.recipe.output_dir)
    assert not project.recipe.datasets[0].path.exists()
    rejection = {
        "stage": "validated_dataset",
        "reason": "caption_missing",
        "detail": "no caption",
        "fix": "write it",
    }
    row = {"sample_id": "photos/bare.jpg", "dataset": "photos", "path": "bare.jpg", "content_hash": "ab"}
    tables.write_rejected("validated_dataset", frame("rejected", [{**row, **rejection}]))
    with pytest.raises(GateClosedError, match="captions_present: 1 image has no caption") as excinfo:
        run(project, launch)
    assert "validated_dataset" in excinfo.value.where
    assert launch.job_files == []
    checks = project.recipe.checks.model_copy(
        update={"allow": ("captions_present", "conservation"), "max_rejected_fraction": 0.5}
    )
    project.recipe = project.recipe.model_copy(update={"checks": checks})
    run(project, launch)
    assert len(launch.job_files) == 1


def test_a_sample_without_a_text_embedding_is_an_error(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.text = project.text.head(3)
    with pytest.raises(TrainingError, match="5 samples without a text embedding"):
        run(project, InProcessLaunch())


def test_a_launch_without_a_result_is_an_error(make_project: Callable[..., Project]) -> None:
    project = make_project()
    with pytest.raises(TrainingError, match="without a usable result"):
        train_lora(project.recipe, project.latents, project.text, launch=lambda *_: None, log=print)
    assert Tables(project.recipe.output_dir).path("vae_latents").is_file()
