from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from click.testing import CliRunner

from pipeline.cli.main import latentline
from pipeline.errors import LaunchError, TrainingError
from pipeline.reporting.findings import CheckContext
from pipeline.reporting.reports import write_report
from pipeline.storage.tables import Tables
from pipeline.trained_lora import checks as trained_lora
from pipeline.trained_lora.export.earlier_step import (
    ExportedStep,
    exportable_run,
    exported_step,
    forget_exported_step,
)
from pipeline.trained_lora.export.lora_files import read_provenance
from pipeline.trained_lora.job import TrainingJob, read_job
from pipeline.trained_lora.previews import preview_sheet, read_previews
from pipeline.trained_lora.run_folder import RunLayout, hold_run
from tests.damage import DAMAGES
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.runs import FILES, run, run_folders

if TYPE_CHECKING:
    from click.testing import Result

    from tests.pipeline.trained_lora.project import Project


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs `latentline export` on a project's recipe."""

    def call(project: Project, *arguments: str) -> Result:
        recipe, configs = project.recipe, tmp_path / "configs"
        configs.mkdir(exist_ok=True)
        text = f"""\
datasets: [{{name: photos, path: {tmp_path}/photos}}]
cache_dir: {recipe.cache_dir}
output_dir: {recipe.output_dir}
model: {{base: {recipe.model.base}}}
buckets: {{resolution: 64, step: 16}}
"""
        (configs / "demo.yaml").write_text(text, encoding="utf-8")
        monkeypatch.setenv("LATENTLINE_CONFIGS", str(configs))
        return CliRunner().invoke(latentline, ["export", "demo", *arguments])

    return call


def published(project: Project) -> dict[str, bytes]:
    lora = project.recipe.output_dir / "lora"
    return {path.name: path.read_bytes() for path in lora.iterdir()}


def assert_samples_are_those_of_step_4(project: Project, job: TrainingJob) -> None:
    """Check the table of samples in lora/: held-out images are in it as well, seen 0 times."""
    seen = Counter(slot.variant_id for step in job.plan()[:4] for slot in step.slots())
    table = pl.read_parquet(project.recipe.output_dir / "lora" / "samples.parquet")
    assert dict(table.select("sample_id", "times_seen").rows()) == {
        item.sample_id: seen[item.variant_id] for item in job.inputs
    }
    assert len(job.inputs.held_out) > 0, "no image is held out"
    assert table.schema == pl.read_parquet(run_folders(project)[0] / "samples.parquet").schema


def test_an_earlier_step_is_published_and_stays_until_latest_or_another_run(
    make_project: Callable[..., Project], export: Callable[..., Result]
) -> None:
    held_out = {"photos": {"validation_fraction": 0.5}}
    previews = {"sample_every": 2, "sample_prompts": [{"prompt": "a cat", "steps": 2}]}
    project = make_project(checkpoint_every=2, datasets=held_out, **previews)
    launch, log = InProcessLaunch(), list[str]()
    run(project, launch)
    last, drawn = published(project), run_folders(project)[0] / "samples"
    assert last["samples.jpg"] == preview_sheet(read_previews(drawn))
    checkpoint = run_folders(project)[0] / "checkpoints" / "step-00000004"

    (project.recipe.output_dir / "lora" / "samples.jpg").unlink()  # every file is published again
    shown = export(project, "--step", "4")
    assert shown.exit_code == 0, shown.exception
    assert f"lora/ holds step 4 of run {run_folders(project)[0].name}" in shown.output
    assert "latentline export demo --latest" in shown.output
    earlier = published(project)
    for name in FILES:
        if name.endswith(".safetensors"):
            assert earlier[name] == (checkpoint / name).read_bytes() != last[name]
    assert earlier.keys() == last.keys()
    assert earlier["samples.jpg"] == preview_sheet(read_previews(drawn, last_step=4)) != last["samples.jpg"]
    assert "samples.jpg" in earlier["README.md"].decode()
    record, last_record = (json.loads(each["provenance.json"]) for each in (earlier, last))
    assert (record["step"], record["steps"]) == (4, 4)
    assert [(file["name"], file["bytes"], file["sha256"]) for file in record["files"]] == [
        (name, len(earlier[name]), hashlib.sha256(earlier[name]).hexdigest())
        for name in sorted(FILES)
        if name.endswith(".safetensors")
    ]
    assert record["run"] == run_folders(project)[0].name
    assert record["device"] == last_record["device"]
    assert last_record.keys() <= record.keys()
    assert read_provenance(project.recipe.output_dir)["step"] == 4
    assert "| steps | 4 of 6, " in earlier["README.md"].decode()
    assert "| steps | 6, " in last["README.md"].decode()
    assert_samples_are_those_of_step_4(project, read_job(launch.job_files[0]))

    again = run(project, launch, log)
    assert len(launch.job_files) == 1
    assert published(project) == earlier
    assert again.report["published_step"] == 4
    assert [line for line in log if "step 4" in line and "--latest" in line] != [], log
    context = CheckContext(project.recipe, Tables(project.recipe.output_dir))
    reload_equals = {each.name: each for each in trained_lora.run(context)}["reload_equals"]
    assert reload_equals.passed, reload_equals.summary

    assert export(project, "--latest").exit_code == 0
    assert published(project) == last
    assert run(project, launch).report["published_step"] == 6

    assert export(project, "--step", "2").exit_code == 0
    other = run(project.changed("output", seed=8), launch)
    assert other.report["published_step"] == 6
    assert json.loads(published(project)["provenance.json"])["run"] == other.report["run"]


def test_the_step_that_the_evaluation_chose_is_exported_with_its_reason(
    finished_once: Callable[..., Project], export: Callable[..., Result]
) -> None:
    project = finished_once(checkpoint_every=2)
    output_dir, name = project.recipe.output_dir, run_folders(project)[0].name
    before, fix = published(project), f"evaluate the run: latentline evaluate demo --run {name}"

    def refused(report: dict[str, Any] | None) -> TrainingError:
        if report is not None:
            write_report(output_dir, "evaluation", report)
        error = export(project, "--best").exception
        assert isinstance(error, TrainingError)
        assert published(project) == before
        return error

    assert (refused(None).what, refused(None).fix) == (f"run {name} has no evaluation", fix)
    other = refused({"run": "other", "chosen_step": 2, "why": "it is best"})
    assert (other.what, other.fix) == (f"run {name} has no evaluation, the last one is of run other", fix)
    undecided = refused({"run": name, "chosen_step": None, "why": "not decided: few pictures"})
    assert undecided.what == "the evaluation has chosen no step: not decided: few pictures"
    assert undecided.fix.startswith("choose a step: latentline export demo --step N; or draw more pictures")
    damaged = refused({"run": name, "chosen_step": "2", "why": "it is best"})
    assert damaged.fix == f"run latentline evaluate demo --run {name} again"
    gone = refused({"run": name, "chosen_step": 3, "why": "it is best"})
    assert "did not save a LoRA at step 3" in gone.what

    write_report(output_dir, "evaluation", {"run": name, "chosen_step": 2, "why": "it is best"})
    shown = export(project, "--best")
    assert shown.exit_code == 0, shown.exception
    assert f"lora/ holds step 2 of run {name}" in shown.output
    assert "it is best" in shown.output
    assert exported_step(output_dir, name) == ExportedStep(name, 2, "it is best")
    assert "| chosen by its evaluation | it is best |" in published(project)["README.md"].decode()
    assert json.loads(published(project)["provenance.json"])["why"] == "it is best"
    assert export(project, "--best", "--latest").exit_code == 2


def test_the_run_in_lora_or_else_the_one_with_the_newest_lora_files_is_exportable(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no checkpoint holds LoRA files"):
        exportable_run(tmp_path)
    for number, run_name in enumerate(["cc", "bb", "aa"]):
        file = tmp_path / "runs" / run_name / "checkpoints" / "step-00000002" / "lora.json"
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        os.utime(file, ns=(0, 10**9 * (2 if number == 1 else 1)))
    assert exportable_run(tmp_path) == "bb"

    record = tmp_path / "lora" / "provenance.json"
    record.parent.mkdir()
    for text, expected in (
        ('{"run": "cc"}', "cc"),
        ('{"run": "without files"}', "bb"),
        ("[]", "bb"),
        ("{", "bb"),
    ):
        record.write_text(text)
        assert exportable_run(tmp_path) == expected


def test_the_step_that_stays_is_recorded_for_its_run_until_it_is_forgotten(tmp_path: Path) -> None:
    assert exported_step(tmp_path, "aa") is None
    assert forget_exported_step(tmp_path) is None
    record = tmp_path / "runs" / "exported_step.json"
    record.parent.mkdir()
    record.write_text(json.dumps({"run": "aa", "step": 4}))
    assert exported_step(tmp_path, "aa") == ExportedStep("aa", 4)
    assert exported_step(tmp_path, "bb") is None
    assert forget_exported_step(tmp_path) == ("aa", 4)
    assert not record.exists()


@pytest.mark.parametrize(
    "text", ["", "torn", "[4]", '{"run": "aa"}', '{"run": "aa", "step": 6, "record_sha256": "0"}']
)
def test_a_damaged_record_of_the_step_that_stays_publishes_no_other_step(tmp_path: Path, text: str) -> None:
    record = tmp_path / "runs" / "exported_step.json"
    record.parent.mkdir()
    record.write_text(text)
    with pytest.raises(TrainingError, match="the exported step is unknown") as raised:
        exported_step(tmp_path, "aa")
    assert raised.value.fix == "run latentline export <recipe> --latest, or --step with the step to publish"
    forget_exported_step(tmp_path)
    assert exported_step(tmp_path, "aa") is None


def test_a_step_that_cannot_be_published_is_an_error_that_lists_the_others(
    make_project: Callable[..., Project], export: Callable[..., Result]
) -> None:
    project, launch = make_project(checkpoint_every=2), InProcessLaunch()
    nothing = export(project, "--step", "4")
    assert isinstance(nothing.exception, TrainingError)
    assert "no checkpoint holds LoRA files" in nothing.exception.what

    launch.stop_after = 3
    with pytest.raises(LaunchError):
        run(project, launch)
    unfinished = export(project, "--latest")
    assert isinstance(unfinished.exception, TrainingError)
    assert "has not finished" in unfinished.exception.what
    assert export(project, "--step", "2").exit_code == 0, "an interrupted run has steps to publish"

    launch.stop_after = None
    run(project, launch)
    before = published(project)
    missing = export(project, "--step", "3")
    assert isinstance(missing.exception, TrainingError)
    assert "did not save a LoRA at step 3" in missing.exception.what
    assert missing.exception.fix.endswith("steps: 2, 4, 6")
    damaged = run_folders(project)[0] / "checkpoints" / "step-00000002" / "demo_kohya.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    torn = export(project, "--step", "2")
    assert isinstance(torn.exception, TrainingError)
    assert "demo_kohya.safetensors is missing or changed" in torn.exception.what
    assert published(project) == before
    with hold_run(RunLayout(run_folders(project)[0]), print):
        busy = export(project, "--step", "4")
    assert isinstance(busy.exception, TrainingError)
    assert "is being trained" in busy.exception.what
    assert published(project) == before


def test_the_fix_of_a_damaged_lora_of_the_only_step_works(
    make_project: Callable[..., Project], export: Callable[..., Result]
) -> None:
    project = make_project(checkpoint_every=6)
    run(project, InProcessLaunch())
    before, folder = published(project), run_folders(project)[0]
    for name in ("lora.json", "demo_comfyui.safetensors"):
        file = folder / "checkpoints" / "step-00000006" / name
        sound = file.read_bytes()
        for damage in DAMAGES.values():
            damage(file)
            finished = export(project, "--step", "6").exception
            assert isinstance(finished, TrainingError)
            command = finished.fix.removeprefix("publish its last step: latentline export <recipe> ")
            assert export(project, *command.split()).exit_code == 0
            assert published(project) == before
            file.write_bytes(sound)

    # A run that has not finished, and one whose exported files are damaged, train the rest.
    (folder / "finished.json").unlink()
    file.unlink()
    for option in (["--step", "6"], ["--latest"]):
        unfinished = export(project, *option).exception
        assert isinstance(unfinished, TrainingError)
        assert (
            unfinished.fix == "start the recipe's job, which trains the rest of it: latentline run <recipe>"
        )
    run(project, InProcessLaunch())
    assert export(project, "--latest").exit_code == 0


def test_the_fix_of_damaged_files_of_a_run_works_for_the_export(
    finished_once: Callable[..., Project], export: Callable[..., Result]
) -> None:
    project = finished_once(checkpoint_every=2)
    names = ("order.json", "inputs.parquet", "samples.parquet")
    sound = {file: file.read_bytes() for file in (run_folders(project)[0] / name for name in names)}
    for file, data in sound.items():
        for way, damage in DAMAGES.items():
            # Any JSON that is an order may be one; the next job compares its hash.
            if way == "flip" and file.suffix == ".json":
                continue
            damage(file)
            refused = export(project, "--step", "2").exception
            assert isinstance(refused, TrainingError)
            assert refused.what.startswith("order.json, inputs.parquet or samples.parquet is damaged: ")
            assert refused.fix == (
                "start the recipe's job, which writes the files of its run again: latentline run <recipe>"
            )
            file.write_bytes(data)

    for file in sound:
        DAMAGES["cut"](file)
    run(project, InProcessLaunch())
    assert export(project, "--step", "2").exit_code == 0
