"""A finished run that is started again: nothing is trained, and what is damaged is written again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from safetensors.torch import load_file

from pipeline.cache.pack_copies import CopySettings, PackCopies
from pipeline.reporting.findings import CheckContext
from pipeline.storage.addresses import Url
from pipeline.storage.checked_json import write_checked
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.storage.tables import Tables
from pipeline.trained_lora import checks as trained_lora
from pipeline.trained_lora.export.earlier_step import publish_last_step
from pipeline.trained_lora.export.lora_files import lora_file_names, read_provenance
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from tests.damage import DAMAGES
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.packs_case import pack_everything
from tests.pipeline.trained_lora.runs import FILES, run, run_folders
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def completed(project: Project) -> bool:
    context = CheckContext(project.recipe, Tables(project.recipe.output_dir))
    return next(each.passed for each in trained_lora.run(context) if each.name == "plan_completed")


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


def test_node_hours_are_those_of_all_steps_on_all_machines(trained: Project) -> None:
    layout = RunLayout(run_folders(trained)[0])
    steps = read_metrics(layout.metrics, 99)
    lines = [json.dumps({**line, "seconds": 1800.0}) + "\n" for line in steps]
    layout.metrics.write_text("".join(lines), encoding="utf-8")
    finished = json.loads(layout.finished.read_text(encoding="utf-8"))
    assert finished["num_nodes"] == 1
    write_checked(layout.finished, {**finished, "num_nodes": 2})
    assert run(trained, InProcessLaunch()).report["node_hours"] == len(steps)


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
        publish_last_step(project.recipe.output_dir, folder.name, lora_file_names(project.recipe))
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
from pipeline.storage.checked_json import write_checked
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
