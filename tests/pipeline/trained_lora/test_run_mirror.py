"""Uploads of a run while it trains, and what another machine pulls; a function stands in for the worker."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.main import latentline
from pipeline.errors import LaunchError, StoreError, TrainingError
from pipeline.maintenance.remote_runs import RemoteRuns
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.outputs import mirror_of
from pipeline.storage import lease, retry
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import write_text
from pipeline.storage.mirror import Mirror
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.trained_lora import run_mirror
from pipeline.trained_lora.export.earlier_step import exported_step, forget_exported_step
from pipeline.trained_lora.run_folder import RunLayout, run_folder
from pipeline.trained_lora.run_mirror import mirrored_run

RUN = "0123456789abcdef"

MakeRecipe = Callable[[str], Recipe]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRecipe:
    """Returns the recipe as a machine sees it: the address is the same, the working copy is not."""
    monkeypatch.setattr(run_mirror, "_POLL_S", 0.02)
    monkeypatch.setattr(run_mirror, "_PAUSE_AFTER_FAILURE_S", 0.0)
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


def save(layout: RunLayout, step: int, *, damaged: bool = False) -> None:
    """Write a checkpoint as the worker does, and the logs so far."""
    folder = layout.checkpoints / f"step-{step:08d}"
    temp = folder.with_name(f".{folder.name}.tmp")
    files = {"adapter.safetensors": f"adapter {step}", "optimizer.pt": f"optimizer {step}"}
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    files |= {"pytorch_lora_weights.safetensors": f"lora {step}", "lora.json": "{}"}
    if damaged:
        files["optimizer.pt"] = "damaged"
    for name, text in files.items():
        write_text(temp / name, text)
    write_text(temp / "COMPLETE", json.dumps({"step": step, "run": RUN, "sha256": hashes}))
    write_text(layout.metrics, f"steps up to {step}\n")
    temp.rename(folder)


def prune(layout: RunLayout, step: int) -> None:
    for name in ("COMPLETE", "optimizer.pt", "adapter.safetensors"):
        (layout.checkpoints / f"step-{step:08d}" / name).unlink()


def steps_at_address(recipe: Recipe, name: str = "COMPLETE") -> list[int]:
    names = mirror_of(recipe).names(f"runs/{RUN}/checkpoints/*/{name}")
    return [int(Path(each).parent.name.removeprefix("step-")) for each in names]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def train(recipe: Recipe, work: Callable[[RunLayout], object], lines: list[str] | None = None) -> None:
    """Train the run with `work` in place of the worker."""
    layout = layout_of(recipe)
    log = ([] if lines is None else lines).append

    def launch(module: str, order: Path, meanwhile: object = None) -> None:
        work(layout)

    with mirrored_run(recipe, layout, log) as run:
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
    assert not mirror_of(recipe).names(f"runs/{RUN}/lease")


def test_another_machine_pulls_the_logs_and_the_newest_complete_checkpoint(machine: MakeRecipe) -> None:
    train(machine("one"), lambda layout: [save(layout, step) for step in (2, 4)])
    mirror_of(machine("one")).remote.put(f"runs/{RUN}/checkpoints/step-00000006/optimizer.pt", b"partial")
    two = layout_of(machine("two"))
    with mirrored_run(machine("two"), two, lambda _line: None):
        assert [path.name for path in two.checkpoints.iterdir()] == ["step-00000004"]
        assert (two.checkpoints / "step-00000004/optimizer.pt").read_text("utf-8") == "optimizer 4"
        assert two.metrics.read_text("utf-8") == "steps up to 4\n"


def test_a_run_that_another_machine_deleted_is_trained_anew_and_uploaded_completely(
    machine: MakeRecipe,
) -> None:
    one, runs = machine("one"), RemoteRuns(mirror_of(machine("two")))
    train(one, lambda layout: [save(layout, step) for step in (2, 4)])
    runs.survey(num_newest=0, recipes=[], wait=False)
    runs.delete(run_folder(machine("two").output_dir, RUN))
    assert mirror_of(one).names("*") == []
    write_text(layout_of(one).folder.parent / "other" / "run.json", "{}")
    mirror_of(one).push("runs/other/*")  # the address holds other runs

    steps_at_start: list[Path] = []
    train(one, lambda layout: [steps_at_start.extend(layout.checkpoints.glob("*/*")), save(layout, 6)])
    assert steps_at_start == []
    assert steps_at_address(one) == [6]
    assert f"runs/{RUN}/run.json" in mirror_of(one).names("*")
    assert runs.survey(num_newest=0, recipes=[], wait=False).leftovers == {}


def test_an_export_that_another_machine_undid_does_not_come_back(machine: MakeRecipe) -> None:
    one, two = machine("one"), machine("two")
    train(one, lambda layout: save(layout, 2))
    write_text(one.output_dir / "runs" / "exported_step.json", json.dumps({"run": RUN, "step": 2}))
    mirror_of(one).push("runs/exported_step.json")

    mirror = mirror_of(two)
    mirror.pull("runs/*")
    assert forget_exported_step(two.output_dir) == (RUN, 2)
    mirror.push("runs/exported_step.json")
    with mirrored_run(one, layout_of(one), print):
        assert exported_step(one.output_dir, RUN) is None


def test_a_damaged_checkpoint_at_the_address_is_skipped(machine: MakeRecipe) -> None:
    train(machine("one"), lambda layout: [save(layout, 2), save(layout, 4, damaged=True)])
    lines: list[str] = []
    two = layout_of(machine("two"))
    with mirrored_run(machine("two"), two, lines.append):
        assert (two.checkpoints / "step-00000002/COMPLETE").is_file()
    assert "skipped the damaged checkpoint" in "\n".join(lines)


@pytest.mark.parametrize("name", ["adapter.safetensors", "COMPLETE"])
def test_a_checkpoint_that_a_crash_damaged_here_is_pulled_again_and_never_uploaded(
    machine: MakeRecipe, name: str
) -> None:
    recipe, lines = machine("one"), list[str]()
    train(recipe, lambda layout: [save(layout, 2), save(layout, 4)])
    files = {each: mirror_of(recipe).remote.read(each) for each in mirror_of(recipe).names("*")}
    newest = layout_of(recipe).checkpoints / "step-00000004"
    (newest / name).write_bytes(b"")

    resumed: list[str] = []
    train(recipe, lambda _layout: resumed.append((newest / "adapter.safetensors").read_text("utf-8")), lines)
    assert resumed == ["adapter 4"]
    assert (newest / "COMPLETE").stat().st_size > 0
    assert {each: mirror_of(recipe).remote.read(each) for each in files} == files
    assert "deleted the damaged checkpoint" in "\n".join(lines)


def test_a_training_that_stops_uploads_its_last_checkpoint(machine: MakeRecipe) -> None:
    def work(layout: RunLayout) -> None:
        save(layout, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(machine("one"), work)
    assert steps_at_address(machine("one")) == [3]
    assert not mirror_of(machine("one")).names(f"runs/{RUN}/lease")


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


@pytest.fixture
def push_times_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Start of each push so far."""
    times_s: list[float] = []
    push = Mirror.push

    def note(mirror: Mirror, *patterns: str, **options: Any) -> list[str]:
        times_s.append(time.monotonic())
        return push(mirror, *patterns, **options)

    monkeypatch.setattr(Mirror, "push", note)
    return times_s


def test_an_uploaded_checkpoint_is_not_pushed_again(machine: MakeRecipe, push_times_s: list[float]) -> None:
    recipe = machine("one")

    def work(layout: RunLayout) -> None:
        for number, step in enumerate((2, 4), start=1):
            num_pushes = len(push_times_s)
            save(layout, step)
            wait_for(lambda number=number: len(steps_at_address(recipe)) == number)
            time.sleep(0.4)  # the markers are read 20 times
            assert len(push_times_s) == num_pushes + 1

    train(recipe, work)


def test_after_a_failed_upload_there_is_a_pause(
    machine: MakeRecipe, monkeypatch: pytest.MonkeyPatch, push_times_s: list[float]
) -> None:
    monkeypatch.setattr(run_mirror, "_PAUSE_AFTER_FAILURE_S", 0.5)
    outage, recipe = Outage(monkeypatch), machine("one")
    during_s: list[float] = []

    def work(layout: RunLayout) -> None:
        outage.active = True
        num_pushes = len(push_times_s)
        save(layout, 2)
        wait_for(lambda: len(push_times_s) >= num_pushes + 3)
        during_s.extend(push_times_s[num_pushes:])
        outage.active = False
        wait_for(lambda: steps_at_address(recipe) == [2])

    train(recipe, work)
    pauses_s = [after_s - before_s for before_s, after_s in pairwise(during_s)]
    assert min(pauses_s) >= 0.5


def test_if_the_last_upload_fails_the_step_fails_and_the_next_one_uploads(
    machine: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage, recipe = Outage(monkeypatch), machine("one")

    def work(layout: RunLayout) -> None:
        outage.active = True
        save(layout, 2)

    with pytest.raises(StoreError, match="cannot be written") as caught:
        train(recipe, work)
    assert str(recipe.output_dir) in caught.value.fix
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
    mirror = mirror_of(recipe)
    mirror.remote.put(f"runs/{RUN}/lease", b'{"machine": "two", "copy": "of two", "token": "of two"}')
    return {name: mirror.remote.read(name) for name in mirror.names("*")}


def test_a_training_whose_lease_is_lost_is_stopped_and_uploads_nothing_more(
    machine: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
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
    assert caught.value.where.endswith(f"/runs/{RUN}")
    assert "start the job again" in caught.value.fix
    remote = mirror_of(recipe).remote
    assert {name: remote.read(name) for name in mirror_of(recipe).names("*")} == at_takeover
    layout = layout_of(recipe)
    assert not layout.stop_request.exists()
    assert not list(layout.checkpoints.glob("step-00000004/*")), "the next job would upload it"
    assert (layout.checkpoints / "step-00000002/COMPLETE").is_file()


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
    remote = mirror_of(recipe).remote
    assert {name: remote.read(name) for name in mirror_of(recipe).names("*")} == at_takeover


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
    content = (
        b'{"machine": "gpu-7", "copy": "of gpu-7", "token": "x", "beat": 3, "doing": "deleting this run"}'
    )
    remote.put(f"runs/{RUN}/lease", content)
    remote.put(f"runs/{RUN}/run.json", b"{}")

    result = CliRunner().invoke(latentline, ["export", "flowers", "--run", RUN, *arguments])
    assert result.exit_code == 1
    assert "gpu-7 is deleting this run" in str(result.exception)
    assert sorted(remote.list_files()) == [f"runs/{RUN}/lease", f"runs/{RUN}/run.json"]
