"""Uploads of a run while it trains, and what another machine fetches; a function stands in for the worker."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.main import latentline
from pipeline.errors import LaunchError, StoreError, TrainingError
from pipeline.maintenance.remote_runs import RemoteRuns
from pipeline.outputs import lease
from pipeline.outputs.folder import OutputFolder, outputs_of
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.storage import retry
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import write_text
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.trained_lora import run_upload
from pipeline.trained_lora.run_folder import RunLayout, run_folder
from pipeline.trained_lora.run_upload import RunUpload, uploaded_run

RUN = "0123456789abcdef"

TOP = f"runs/{RUN}"

MakeRecipe = Callable[[str], Recipe]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRecipe:
    """Returns the recipe as a machine sees it: the address is the same, the local folder is not."""
    monkeypatch.setattr(run_upload, "_POLL_S", 0.01)
    monkeypatch.setattr(run_upload, "_PAUSE_AFTER_FAILURE_S", 0.0)
    monkeypatch.setattr(retry, "RETRY_S", 0.0)
    values = {
        "datasets": [{"name": "photos", "path": str(tmp_path / "photos")}],
        "cache_dir": str(tmp_path / "cache"),
        "output_dir": f"memory://{uuid.uuid4().hex}/out",
        "model": {"base": "owner/name"},
        "training": {"steps": 8, "batch_size": 1, "keep_checkpoints": 2},
    }
    recipe = recipe_from_mapping("flowers", values)
    return lambda name: recipe.model_copy(update={"output_dir": tmp_path / name})


def layout_of(recipe: Recipe) -> RunLayout:
    return RunLayout(run_folder(recipe.output_dir, RUN))


def save(layout: RunLayout, step: int, *, damaged: bool = False, by: str = "") -> None:
    """Write a checkpoint as the worker does, and the logs so far."""
    folder = layout.checkpoints / f"step-{step:08d}"
    temp = folder.with_name(f".{folder.name}.tmp")
    files = {"adapter.safetensors": f"adapter {step} {by}", "optimizer.pt": f"optimizer {step}"}
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    files |= {"pytorch_lora_weights.safetensors": f"lora {step}", "lora.json": "{}"}
    if damaged:
        files["optimizer.pt"] = "damaged 4"
    for name, text in files.items():
        write_text(temp / name, text)
    write_text(temp / "COMPLETE", json.dumps({"step": step, "run": RUN, "sha256": hashes}))
    write_text(layout.metrics, f"steps up to {step}\n")
    temp.rename(folder)


def prune(layout: RunLayout, step: int) -> None:
    for name in ("COMPLETE", "optimizer.pt", "adapter.safetensors"):
        (layout.checkpoints / f"step-{step:08d}" / name).unlink()


def finish(layout: RunLayout, text: str = "lora") -> None:
    """Write the LoRA and the record of a finished run."""
    names = [
        "pytorch_lora_weights.safetensors",
        "flowers_kohya.safetensors",
        "flowers_comfyui.safetensors",
    ]
    for name in (*names, "provenance.json", "samples.parquet", "README.md"):
        write_text(layout.exported / name, text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    files = [{"name": name, "sha256": sha256} for name in names]
    record = {"steps": 8, "files": files, "output_change": 1.0, "loss_trend": None}
    write_text(layout.finished, json.dumps(record))


def contents(recipe: Recipe) -> dict[str, bytes]:
    remote = RemoteFolder(Url(str(recipe.output_address)))
    return {name: remote.read(name) for name in remote.list_files()}


def steps_at_address(recipe: Recipe, name: str = "COMPLETE") -> list[int]:
    names = [each for each in contents(recipe) if each.endswith(f"/{name}") and "/checkpoints/" in each]
    return sorted(int(Path(each).parent.name.removeprefix("step-")) for each in names)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for the thread that uploads."""
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("timed out")


def train(recipe: Recipe, work: Callable[[RunLayout], object], lines: list[str] | None = None) -> None:
    """Train the run with `work` in place of the worker."""
    layout = layout_of(recipe)
    log = ([] if lines is None else lines).append

    def launch(module: str, order: Path, meanwhile: object = None) -> None:
        work(layout)

    with uploaded_run(recipe, layout, log) as run:
        write_text(layout.facts, "{}")
        run.uploading(launch)("worker", layout.folder / "order.json")


def test_checkpoints_are_uploaded_during_the_training_and_old_ones_expire(machine: MakeRecipe) -> None:
    recipe = machine("one")

    def work(layout: RunLayout) -> None:
        save(layout, 0)  # of the pre-flight
        for step in (2, 4, 6):
            save(layout, step)
            wait_for(lambda step=step: step in steps_at_address(recipe))
        prune(layout, 2)
        save(layout, 8)
        wait_for(lambda: steps_at_address(recipe) == [6, 8])

    train(recipe, work)
    assert steps_at_address(recipe, "pytorch_lora_weights.safetensors") == [2, 4, 6, 8]
    assert steps_at_address(recipe, "optimizer.pt") == [6, 8]
    assert f"{TOP}/lease" not in contents(recipe)


def test_another_machine_fetches_the_logs_and_the_newest_complete_checkpoint(machine: MakeRecipe) -> None:
    train(machine("one"), lambda layout: [save(layout, step) for step in (2, 4)])
    remote = RemoteFolder(Url(str(machine("one").output_address)))
    remote.put(f"{TOP}/checkpoints/step-00000006/optimizer.pt", b"partial")
    two = layout_of(machine("two"))
    with uploaded_run(machine("two"), two, print):
        assert [path.name for path in two.checkpoints.iterdir()] == ["step-00000004"]
        assert (two.checkpoints / "step-00000004/optimizer.pt").read_text("utf-8") == "optimizer 4"
        assert two.metrics.read_text("utf-8") == "steps up to 4\n"


def test_R11_a_new_run_fetches_the_samples_of_the_newest_other_run_for_the_comparison(
    machine: MakeRecipe,
) -> None:
    other = "fedcba9876543210"
    remote = RemoteFolder(Url(str(machine("a").output_address)))
    remote.put(f"runs/{other}/run.json", b"{}")
    remote.put(f"runs/{other}/samples.parquet", b"samples")
    for name, fetched in {"b": [other], "c": []}.items():
        recipe = machine(name)
        with uploaded_run(recipe, layout_of(recipe), print):
            # A run that exists is not compared again.
            write_text(layout_of(recipe).facts, "{}")
        assert [path.parent.name for path in recipe.output_dir.glob("runs/*/samples.parquet")] == fetched


def test_a_machine_that_is_behind_continues_from_the_checkpoint_of_the_other_one(machine: MakeRecipe) -> None:
    one, two = machine("one"), machine("two")
    train(one, lambda layout: save(layout, 2))
    train(two, lambda layout: save(layout, 6))
    with uploaded_run(one, layout_of(one), print):
        assert layout_of(one).metrics.read_text("utf-8") == "steps up to 6\n"
        assert (layout_of(one).checkpoints / "step-00000006/COMPLETE").is_file()


def test_a_machine_that_could_not_upload_its_newest_checkpoint_continues_from_it(machine: MakeRecipe) -> None:
    one = machine("one")
    train(one, lambda layout: save(layout, 2))
    save(layout_of(one), 4)
    with uploaded_run(one, layout_of(one), print):
        assert layout_of(one).metrics.read_text("utf-8") == "steps up to 4\n"
    assert steps_at_address(one) == [2, 4]


def test_checkpoints_of_one_step_from_two_machines_are_not_mixed(machine: MakeRecipe) -> None:
    """On a GPU, two machines may round differently."""
    one, two = machine("one"), machine("two")
    save(layout_of(two), 4, by="two")
    train(one, lambda layout: save(layout, 4, by="one"))
    train(two, lambda _layout: None)
    for folder in (one.output_dir, two.output_dir):
        assert "one" in (folder / f"{TOP}/checkpoints/step-00000004/adapter.safetensors").read_text("utf-8")
    assert contents(two)[f"{TOP}/checkpoints/step-00000004/adapter.safetensors"] == b"adapter 4 one"


class Uploads(OutputFolder):
    """An output folder that notes what it uploads."""

    uploaded: list[str]

    def upload(self, *names: str, **options: object) -> None:
        self.uploaded.extend(names)
        super().upload(*names, **options)  # pyright: ignore[reportArgumentType] - a guard


def uploads_of(recipe: Recipe) -> Uploads:
    outputs = Uploads(recipe.output_address, recipe.output_dir)
    outputs.uploaded = []
    return outputs


def test_a_finished_run_is_fetched_with_its_lora_and_neither_fetched_nor_uploaded_again(
    machine: MakeRecipe,
) -> None:
    one, two = machine("one"), machine("two")
    train(one, lambda layout: [save(layout, 8), finish(layout)])
    for recipe in (two, two, one):
        outputs, layout = uploads_of(recipe), layout_of(recipe)
        run = RunUpload(recipe, layout, outputs, None, print)
        run.fetch()
        assert (layout.exported / "flowers_kohya.safetensors").read_text("utf-8") == "lora"
        run.upload()
        assert outputs.uploaded == []
    assert not list(layout_of(two).checkpoints.glob("*"))


def test_a_finished_run_that_was_not_uploaded_replaces_the_record_of_a_shorter_one(
    machine: MakeRecipe,
) -> None:
    """Both records have the same size."""
    one = machine("one")
    train(one, lambda layout: [save(layout, 8), finish(layout)])
    remote = RemoteFolder(Url(str(one.output_address)))
    record = remote.read(f"{TOP}/finished.json")
    remote.put(f"{TOP}/finished.json", record.replace(b'"steps": 8', b'"steps": 4'))
    train(one, lambda _layout: None)
    assert remote.read(f"{TOP}/finished.json") == record


def test_a_damaged_checkpoint_at_the_address_is_deleted_and_replaced(machine: MakeRecipe) -> None:
    train(machine("one"), lambda layout: [save(layout, 2), save(layout, 4, damaged=True)])
    lines: list[str] = []
    two = machine("two")

    def work(layout: RunLayout) -> None:
        assert [path.parent.name for path in layout.checkpoints.glob("*/COMPLETE")] == ["step-00000002"]
        save(layout, 4)

    train(two, work, lines)
    assert "deleted the damaged checkpoint" in "\n".join(lines)
    assert contents(two)[f"{TOP}/checkpoints/step-00000004/optimizer.pt"] == b"optimizer 4"
    assert steps_at_address(two) == [2, 4]


@pytest.mark.parametrize("name", ["adapter.safetensors", "COMPLETE"])
def test_a_checkpoint_that_a_crash_damaged_here_is_fetched_again_and_never_uploaded(
    machine: MakeRecipe, name: str
) -> None:
    recipe, lines = machine("one"), list[str]()
    train(recipe, lambda layout: [save(layout, 2), save(layout, 4)])
    before = contents(recipe)
    newest = layout_of(recipe).checkpoints / "step-00000004"
    (newest / name).write_bytes(b"")

    resumed: list[str] = []
    train(recipe, lambda _layout: resumed.append((newest / "adapter.safetensors").read_text("utf-8")), lines)
    assert resumed == ["adapter 4 "]
    assert contents(recipe) == before
    assert "deleted the damaged checkpoint" in "\n".join(lines)


def test_a_training_that_stops_uploads_its_last_checkpoint(machine: MakeRecipe) -> None:
    def work(layout: RunLayout) -> None:
        save(layout, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(machine("one"), work)
    assert steps_at_address(machine("one")) == [3]
    assert f"{TOP}/lease" not in contents(machine("one"))


class Outage:
    """A store that refuses uploads while `active`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.active = False
        self.num_refused = 0
        upload = RemoteFolder.upload

        def refuse(folder: RemoteFolder, path: Path, name: str, *, create: bool = False) -> str:
            if self.active:
                self.num_refused += 1
                raise OSError("the service does not answer")
            return upload(folder, path, name, create=create)

        monkeypatch.setattr(RemoteFolder, "upload", refuse)


def test_a_failed_upload_is_a_warning_and_is_repeated(
    machine: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage, lines, recipe = Outage(monkeypatch), list[str](), machine("one")

    def work(layout: RunLayout) -> None:
        outage.active = True
        save(layout, 2)
        wait_for(lambda: outage.num_refused > 0)
        outage.active = False
        wait_for(lambda: steps_at_address(recipe) == [2])

    train(recipe, work, lines)
    assert "warning: the run is not uploaded yet" in "\n".join(lines)


def test_if_the_last_upload_fails_the_step_fails_and_the_next_one_uploads(
    machine: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage, recipe = Outage(monkeypatch), machine("one")

    def work(layout: RunLayout) -> None:
        outage.active = True
        save(layout, 2)

    with pytest.raises(StoreError, match="cannot be written"):
        train(recipe, work)
    outage.active = False
    train(recipe, lambda _layout: None)
    assert steps_at_address(recipe) == [2]


def test_the_error_of_a_training_is_not_hidden_by_a_failed_upload(
    machine: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch)

    def work(layout: RunLayout) -> None:
        outage.active = True
        save(layout, 2)
        raise LaunchError("the worker died", where="here", fix="restart")

    with pytest.raises(LaunchError, match="the worker died"):
        train(machine("one"), work)


def take_over(recipe: Recipe) -> dict[str, bytes]:
    """Replace the lease as another machine does that finds it stale, and return all files at the address."""
    remote = RemoteFolder(Url(str(recipe.output_address)))
    remote.put(f"{TOP}/lease", b'{"machine": "two", "owner": "two", "token": "two"}')
    return contents(recipe)


def test_a_training_whose_lease_is_lost_is_stopped_and_uploads_nothing_more(
    machine: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.02)
    recipe = machine("one")
    at_takeover: dict[str, bytes] = {}

    def work(layout: RunLayout) -> None:
        save(layout, 2)
        wait_for(lambda: steps_at_address(recipe) == [2])
        at_takeover.update(take_over(recipe))
        wait_for(layout.stop_request.exists)
        save(layout, 4)
        raise LaunchError("the worker was stopped", where="here", fix="start it again")

    with pytest.raises(TrainingError, match="another machine took over the run") as caught:
        train(recipe, work)
    assert caught.value.where.endswith(f"/{TOP}")
    assert "nothing more is uploaded" in caught.value.what
    assert "start the job again" in caught.value.fix
    assert contents(recipe) == at_takeover
    assert not layout_of(recipe).stop_request.exists()


@pytest.mark.parametrize("ends", ["finished", "stopped"])
def test_a_lease_that_is_lost_between_two_heartbeats_prevents_the_next_upload(
    machine: MakeRecipe, ends: str
) -> None:
    recipe = machine("one")
    at_takeover: dict[str, bytes] = {}

    def work(layout: RunLayout) -> None:
        at_takeover.update(take_over(recipe))
        save(layout, 2)
        if ends == "stopped":
            raise LaunchError("the worker was stopped", where="here", fix="start it again")

    with pytest.raises(TrainingError, match="another machine took over the run"):
        train(recipe, work)
    assert contents(recipe) == at_takeover


def test_a_step_that_lost_its_run_leaves_the_lora_that_the_other_machine_published(
    machine: MakeRecipe,
) -> None:
    recipe, weights, export = machine("one"), "lora/weights.safetensors", "runs/exported_step.json"
    remote = RemoteFolder(Url(str(recipe.output_address)))
    exported = b'{"run": "another", "step": 2}'
    remote.put(weights, b"before")
    remote.put(export, exported)

    def lose_run() -> None:
        with uploaded_run(recipe, layout_of(recipe), print) as run, run.publishing():
            write_text(recipe.output_dir / weights, "of this machine")
            (recipe.output_dir / export).unlink()
            take_over(recipe)
            remote.put(weights, b"of the other")

    with pytest.raises(TrainingError, match="another machine took over the run"):
        lose_run()
    assert (remote.read(weights), remote.read(export)) == (b"of the other", exported)


def test_a_run_that_another_machine_deleted_is_uploaded_completely(machine: MakeRecipe) -> None:
    one, runs = machine("one"), RemoteRuns(outputs_of(machine("two")))
    train(one, lambda layout: [save(layout, step) for step in (2, 4)])
    runs.survey(num_newest=0, recipes=[], will_delete=False)
    runs.delete(run_folder(machine("two").output_dir, RUN))
    assert contents(one) == {}
    train(one, lambda layout: save(layout, 6))
    assert steps_at_address(one) == [4, 6]
    assert steps_at_address(one, "lora.json") == [2, 4, 6]
    assert runs.survey(num_newest=0, recipes=[], will_delete=False).leftovers == {}


@pytest.mark.parametrize("arguments", [("--step", "2"), ("--latest",)], ids=["a step", "the last step"])
def test_an_export_from_a_run_that_another_machine_uses_names_the_machine_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    address = f"memory://{uuid.uuid4().hex}/out"
    (tmp_path / "deployment.yaml").write_text(f"scratch: {tmp_path}/scratch\n", encoding="utf-8")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "flowers.yaml").write_text(
        f"datasets: [{{name: photos, path: {tmp_path}/photos}}]\ncache_dir: {tmp_path}/cache\n"
        f"output_dir: {address}\nmodel: {{base: a/b}}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path / "configs"))
    monkeypatch.setenv("LATENTLINE_DEPLOYMENT", str(tmp_path / "deployment.yaml"))
    remote = RemoteFolder(Url(address))
    remote.put(f"{TOP}/lease", b'{"machine": "gpu-7", "owner": "x", "doing": "deleting this run"}')
    remote.put(f"{TOP}/run.json", b"{}")

    result = CliRunner().invoke(latentline, ["export", "flowers", "--run", RUN, *arguments])
    assert result.exit_code == 1
    assert "gpu-7 is deleting this run" in str(result.exception)
    assert sorted(remote.list_files()) == [f"{TOP}/lease", f"{TOP}/run.json"]
