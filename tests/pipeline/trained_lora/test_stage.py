from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from safetensors.torch import load_file

from pipeline.cache.pack_copies import CopySettings, PackCopies
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store
from pipeline.errors import GateClosedError, LaunchError, TrainingError
from pipeline.reporting.findings import CheckContext
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.storage.tables import Tables, frame, validated
from pipeline.trained_lora import checks as trained_lora
from pipeline.trained_lora.export.earlier_step import publish_last_step
from pipeline.trained_lora.export.lora_files import read_provenance
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.previews import before_after, preview_sheet, read_previews
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.stage import train_lora
from tests.damage import DAMAGES
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.packs_case import pack_everything
from tests.pipeline.trained_lora.project import FEW_MODULES, put, write_tables
from tests.pipeline.trained_lora.runs import FILES, run, run_folders
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


def test_R14_a_shortened_run_shows_no_picture_of_a_later_step(make_project: Callable[..., Project]) -> None:
    project = make_project(sample_every=2, sample_prompts=[{"prompt": "a cat", "steps": 2}])
    run(project, InProcessLaunch())
    lora, report = project.recipe.output_dir / "lora", project.recipe.output_dir / "reports" / "trained_lora"
    (folder,) = run_folders(project)
    for steps in (3, 1):
        shorter = project.changed("output", steps=steps)
        run(shorter, InProcessLaunch())
        previews = read_previews(folder / "samples", last_step=steps)
        assert {preview.step for preview in previews} == {0, 2, 3} & {*range(steps + 1)} | {steps}
        assert run_folders(project) == [folder]
        for sheet in (lora / "samples.jpg", report / "samples.jpg", folder / "lora" / "samples.jpg"):
            assert sheet.read_bytes() == preview_sheet(previews)
        assert (report / "before_after.jpg").read_bytes() == before_after(previews)
    assert not (report / "loss.png").exists(), (
        "a run of one step has no curve, and must not show an older one"
    )

    # A job that only writes the report again leaves no picture that its previews cannot show either.
    (folder / "report" / "sample_losses.parquet").unlink()
    for path in (folder / "samples").iterdir():
        path.unlink()
    run(shorter, InProcessLaunch())
    assert {path.name for path in report.iterdir()} == {"sample_losses.parquet"}


def test_a_finished_run_is_not_repeated_and_a_damaged_file_is_exported_again(trained: Project) -> None:
    launch, log = InProcessLaunch(), list[str]()
    lora = trained.recipe.output_dir / "lora"
    table, original = pl.read_parquet(lora / "samples.parquet"), load_file(lora / FILES[-1])
    second = run(trained, launch, log)
    assert launch.job_files == [], "the second run must not launch a training"
    assert second.report["launched"] is False
    assert "nothing is launched" in "\n".join(log)
    assert second.table.equals(table)
    (run_folders(trained)[0] / "lora" / "demo_kohya.safetensors").write_bytes(b"torn")
    third = run(trained, launch)
    assert len(launch.job_files) == 1
    assert third.report["resumed_from"] == 4
    assert differing_tensors(load_file(lora / FILES[-1]), original) == []


COMPANIONS = ("samples.parquet", "samples.jpg", "README.md", "provenance.json")


@pytest.mark.parametrize(
    "damages",
    [
        pytest.param(DAMAGES, id="one each"),
        *(pytest.param([damage] * 4, id=damage, marks=pytest.mark.slow) for damage in DAMAGES),
    ],
)
def test_damaged_companions_of_a_finished_run_are_written_again_and_never_published(
    make_project: Callable[..., Project], damages: Iterable[str]
) -> None:
    project = make_project(steps=2, sample_every=2, sample_prompts=[{"prompt": "a cat", "steps": 2}])
    run(project, InProcessLaunch())
    lora, (folder,) = project.recipe.output_dir / "lora", run_folders(project)
    published, exported = files_in(lora), files_in(folder / "lora")
    for name, damage in zip(COMPANIONS, damages, strict=True):
        DAMAGES[damage](folder / "lora" / name)
        log, launch = list[str](), InProcessLaunch()
        run(project, launch, log)
        assert launch.job_files == []
        assert [line for line in log if line.startswith(f"{name} in {folder / 'lora'} changed")], log
        assert files_in(lora) == published
        assert files_in(folder / "lora") == exported

        # What a person publishes again is not damaged either.
        DAMAGES[damage](folder / "lora" / name)
        publish_last_step(project.recipe.output_dir, folder.name, "demo")
        again = files_in(lora)
        record = json.loads(again.pop("provenance.json"))
        assert record.items() >= read_provenance(lora).items()
        assert again == {each: data for each, data in published.items() if each in again}
        assert len(again) == len(published) - 1
        run(project, launch, log)


def test_damaged_files_of_a_finished_run_s_job_are_written_again(trained: Project) -> None:
    """`latentline export` and `latentline sample` read them."""
    (folder,) = run_folders(trained)
    names = ("order.json", "inputs.parquet", "samples.parquet", "run.json", "report/sample_losses.parquet")
    files = [folder / name for name in names]
    sound, lora = [path.read_bytes() for path in files], files_in(trained.recipe.output_dir / "lora")
    for path, damage in zip(files, [*DAMAGES.values(), *DAMAGES.values()], strict=False):
        damage(path)
    launch, log = InProcessLaunch(), list[str]()
    run(trained, launch, log)
    assert launch.job_files == []
    assert [line for line in log if line.startswith(f"the files of the job in {folder} changed")]
    assert [path.read_bytes() for path in files[1:]] == sound[1:]
    assert read_job(files[0]).run == folder.name
    assert files_in(trained.recipe.output_dir / "lora") == lora
    run(trained, launch, log)
    assert len([line for line in log if "written again" in line]) == 1


def test_changed_losses_of_a_finished_run_are_named_and_the_fix_trains_them_again(trained: Project) -> None:
    (folder,) = run_folders(trained)
    lora, metrics = files_in(trained.recipe.output_dir / "lora"), folder / "logs" / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text(re.sub(r'("loss": \d+\.)(\d)', lambda match: f"{match[1]}{9 - int(match[2])}", before))
    for _ in range(2):
        log = list[str]()
        run(trained, InProcessLaunch(), log)
        (warning,) = [line for line in log if line.startswith("warning: logs/metrics.jsonl in")]
        assert files_in(trained.recipe.output_dir / "lora") == lora

    deleted = re.search(r"delete (\S+) and start the job again", warning)
    assert deleted is not None
    shutil.rmtree(deleted[1])
    run(trained, InProcessLaunch(), log)
    losses = [re.findall(r'"loss": [\d.]+', text) for text in (before, metrics.read_text())]
    assert losses[0] == losses[1]
    log = list[str]()
    run(trained, InProcessLaunch(), log)
    assert [line for line in log if "changed after" in line] == []


def test_a_finished_run_of_an_earlier_release_is_not_trained_again_and_gets_its_hashes(
    trained: Project,
) -> None:
    lora, (folder,) = trained.recipe.output_dir / "lora", run_folders(trained)
    published, record = files_in(lora), json.loads((folder / "finished.json").read_text())
    for key in ("record_sha256", "companions"):
        del record[key]
    (folder / "finished.json").write_text(json.dumps(record))
    (folder / "lora" / "README.md").write_text("damaged")
    launch, log = InProcessLaunch(), list[str]()
    run(trained, launch, log)
    assert launch.job_files == []
    assert files_in(lora) == published
    reasons = [line for line in log if "written again" in line]
    assert len(reasons) == 1
    assert "are from an earlier release, which recorded no hashes of them" in reasons[0]
    log.clear()
    assert set(json.loads((folder / "finished.json").read_text())) >= {"record_sha256", "companions"}
    run(trained, launch, log)
    assert not [line for line in log if "written again" in line]


def test_packing_the_cache_changes_neither_a_finished_run_nor_the_lora_of_another_one(
    make_project: Callable[..., Project],
) -> None:
    project, launch = make_project(), InProcessLaunch()
    first = run(project, launch)
    lora = project.recipe.output_dir / "lora"
    record = read_provenance(lora)
    pack_everything(project.recipe.cache_dir)
    second = run(project, launch)
    assert len(launch.job_files) == 1
    assert second.table.equals(first.table)
    assert read_provenance(lora) == record

    other = project.changed("from packs")
    run(other, launch)
    assert len(launch.job_files) == 2
    single, packed = (
        load_file(each.recipe.output_dir / "lora" / "pytorch_lora_weights.safetensors")
        for each in (project, other)
    )
    assert single.keys() == packed.keys() != set()
    assert all(packed[name].equal(single[name]) for name in single)


class RecordingLaunch(InProcessLaunch):
    """A launch that records what the training reads.

    Attributes:
        names: Names of remote files.
        headers: Names of the packs whose headers are read.
        copied: Results of reading local copies.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self.headers: list[str] = []
        self.copied: list[bytes | None] = []
        read, read_copy = RemoteFolder.read, PackCopies.read

        def record(folder: RemoteFolder, name: str, *arguments: Any, **options: Any) -> bytes:
            self.names.append(name)
            if name.endswith(".pack") and options["start"] == 0:
                self.headers.append(name)
            return read(folder, name, *arguments, **options)

        def record_copy(copies: PackCopies, *arguments: Any) -> bytes | None:
            self.copied.append(read_copy(copies, *arguments))
            return self.copied[-1]

        monkeypatch.setattr(RemoteFolder, "read", record)
        monkeypatch.setattr(PackCopies, "read", record_copy)

    def __call__(self, *arguments: Any) -> None:
        self.names.clear()
        self.headers.clear()
        self.copied.clear()
        super().__call__(*arguments)


@pytest.mark.slow
def test_a_training_from_remote_packs_and_their_copies_gives_the_lora_of_single_entries(
    make_project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(sample_every=3)
    run(project, InProcessLaunch())
    cache = Url(f"memory://{uuid.uuid4().hex}")
    local = Path(str(project.recipe.cache_dir))
    for path in local.rglob("*.safetensors"):
        RemoteFolder(cache).put(path.relative_to(local).as_posix(), path.read_bytes())
    pack_everything(cache)

    launch = RecordingLaunch(monkeypatch)
    copies = tmp_path / "copies"
    launch.copies = CopySettings(copies, 10**9)
    files = [project.recipe.output_dir / "lora" / "pytorch_lora_weights.safetensors"]
    for output in ("by ranges", "from copies"):
        other = project.changed(output)
        other.recipe = other.recipe.model_copy(update={"cache_dir": cache})
        run(other, launch)
        assert len(launch.headers) == len(set(launch.headers)) == 2, "each header is read once"
        files.append(other.recipe.output_dir / "lora" / "pytorch_lora_weights.safetensors")

        deadline_s = time.monotonic() + 30
        while len(list(copies.glob("*.pack"))) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.1)
    assert None not in launch.copied, "the copies of the first training are complete"
    assert len(launch.copied) > sum(name.endswith(".pack") for name in launch.names)
    single, by_ranges, from_copies = map(load_file, files)
    assert differing_tensors(by_ranges, single) == differing_tensors(from_copies, single) == []


def test_a_finished_run_imports_no_torch(trained: Project, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(trained.recipe.model_dump_json())
    script = f"""
import sys
from pathlib import Path
from pipeline.recipe import Recipe
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.storage.tables import Tables
from pipeline.trained_lora.stage import train_lora
from pipeline.cli.main import latentline
from pipeline.reporting.findings import CheckContext
from pipeline.trained_lora import checks
recipe = Recipe.model_validate_json(Path({str(recipe)!r}).read_text())
tables = Tables(recipe.output_dir)
launch = lambda module, order: sys.exit("launched")
latents, text = tables.read("vae_latents"), tables.read("text_embeddings")
result = train_lora(recipe, latents, text, launch=launch, log=print)
tables.write("trained_lora", result.table)
assert all(finding.passed for finding in checks.run(CheckContext(recipe, tables)))
heavy = {{"torch", "diffusers", "transformers", "accelerate", "peft"}} & set(sys.modules)
assert not heavy, heavy
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_R11_a_changed_setting_starts_a_new_run_and_the_log_lists_the_difference(trained: Project) -> None:
    project, launch, log = trained, InProcessLaunch(), list[str]()
    old = json.loads((project.recipe.output_dir / "lora" / "provenance.json").read_text())["run"]
    other = project.changed("output", learning_rate=2e-2)
    run(other, launch, log)
    assert len(run_folders(project)) == 2
    (difference,) = [line for line in log if "is new; it differs from" in line]
    assert difference.startswith("note: ")
    assert f"differs from {old} in optimizer.learning_rate 0.01 -> 0.02" in difference
    changed_back = run(project, launch)
    assert len(launch.job_files) == 1
    assert changed_back.report["run"] == old
    record = json.loads((project.recipe.output_dir / "lora" / "provenance.json").read_text())
    assert record["run"] == old


def test_R11_a_changed_caption_is_named_in_the_log_and_in_the_report(trained: Project) -> None:
    launch, log = InProcessLaunch(), list[str]()
    row = trained.text.row(0, named=True)
    entries = RecipeEntries(trained.recipe)
    spec = entries.text_spec("another caption")
    text_length = next(iter(spec.tensors.values())).shape[0]
    changed = {**row, "caption": "another caption", "text_length": text_length, **put(entries, spec)}
    first = pl.int_range(pl.len()) == 0
    text = trained.text.with_columns(
        pl.when(first).then(pl.lit(changed[name], kind)).otherwise(pl.col(name)).alias(name)
        for name, kind in trained.text.schema.items()
    )
    edited = replace(trained, text=text)
    write_tables(edited)
    result = run(edited, launch, log)
    expected = f"in caption of {row['sample_id']}"
    (line,) = [line for line in log if "is new; it differs from" in line]
    assert line.endswith(expected)
    assert str(result.report["difference"]).endswith(expected)
    assert run(edited, launch).report["difference"] is None, "only the job that trained the run states it"


@pytest.mark.parametrize("update", [{"checkpoint_every": 3}, {"sample_every": 4}], ids=str)
def test_preview_and_checkpoint_intervals_do_not_start_a_new_run(
    trained: Project, update: dict[str, Any]
) -> None:
    assert not run(trained.changed("output", **update), InProcessLaunch()).report["launched"]


def test_more_steps_resume_a_run_if_the_schedule_does_not_depend_on_them(trained: Project) -> None:
    launch = InProcessLaunch()
    longer = run(trained.changed("output", steps=6), launch)
    assert longer.report["resumed_from"] == 4
    assert len(run_folders(trained)) == 1
    shorter = run(trained, launch)
    assert shorter.report["resumed_from"] == 4
    assert shorter.report["steps"] == 4


def test_fewer_steps_publish_the_lora_that_a_checkpoint_has_saved(
    make_project: Callable[..., Project],
) -> None:
    previews = {"sample_every": 2, "sample_prompts": [{"prompt": "a cat", "steps": 2}]}
    project = make_project(checkpoint_every=1, **previews)
    launch, log = InProcessLaunch(), list[str]()
    run(project, launch)
    (folder,) = run_folders(project)

    # The optimizer's state of these steps is gone: only the newest two checkpoints keep theirs.
    lora = project.recipe.output_dir / "lora"
    for steps in (4, 2, 3):
        shorter = project.changed("output", steps=steps)
        result = run(shorter, launch, log)
        assert len(launch.job_files) == 1, "nothing is trained"
        assert any(f"has saved the LoRA of step {steps}: nothing is trained" in line for line in log)
        assert (result.report["steps"], result.report["from_checkpoint"], result.report["launched"]) == (
            steps,
            True,
            False,
        )
        for name in FILES:
            if name.endswith(".safetensors"):
                saved = folder / "checkpoints" / f"step-{steps:08d}" / name
                assert (lora / name).read_bytes() == saved.read_bytes()
        record = json.loads((lora / "provenance.json").read_text())
        assert (record["step"], record["steps"], record["recipe"]["training"]["steps"]) == (steps,) * 3
        assert f"| steps | {steps}, " in (lora / "README.md").read_text()
        assert (lora / "samples.jpg").read_bytes() == preview_sheet(
            read_previews(folder / "samples", last_step=steps)
        )
        context = CheckContext(shorter.recipe, Tables(shorter.recipe.output_dir))
        failed = {each.name: each.summary for each in trained_lora.run(context) if not each.passed}
        assert failed == {}
        again = run(shorter, launch)
        assert (again.report["launched"], again.report["from_checkpoint"]) == (False, False)

    # The same LoRA as that of a training with so few steps.
    alone = project.changed("alone", steps=3)
    run(alone, InProcessLaunch())
    for name in FILES:
        if name.endswith(".safetensors"):
            trained_alone = load_file(alone.recipe.output_dir / "lora" / name)
            assert differing_tensors(load_file(lora / name), trained_alone) == []

    # The last step of the longer run is a checkpoint too.
    assert run(project, launch).report["from_checkpoint"]
    assert len(launch.job_files) == 1
    assert json.loads((lora / "provenance.json").read_text())["step"] == 6


def test_fewer_steps_are_trained_if_the_saved_lora_is_damaged_or_the_rate_depends_on_the_steps(
    make_project: Callable[..., Project],
) -> None:
    project, launch, log = make_project(checkpoint_every=1), InProcessLaunch(), list[str]()
    run(project, launch)
    (folder,) = run_folders(project)

    # Damaged files are not published.
    file = folder / "checkpoints" / "step-00000002" / "demo_kohya.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert run(project.changed("output", steps=2), launch).report["launched"]

    run(project.changed("linear", lr_scheduler="linear"), launch)
    shorter = run(project.changed("linear", lr_scheduler="linear", steps=2), launch)
    assert (shorter.report["launched"], shorter.report["resumed_from"]) == (True, 0)

    # Without the record of a finished run, the log names the command that publishes the saved LoRA.
    stopped = project.changed("stopped")
    launch.stop_after = 4
    with pytest.raises(LaunchError):
        run(stopped, launch)
    launch.stop_after = None
    assert run(stopped.changed("stopped", steps=2), launch, log).report["launched"]
    assert any("latentline export demo --step 2 publishes" in line for line in log)


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


def completed(project: Project) -> bool:
    context = CheckContext(project.recipe, Tables(project.recipe.output_dir))
    return next(each.passed for each in trained_lora.run(context) if each.name == "plan_completed")


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
