"""`latentline run` on a pseudo-terminal: what a person sees, the exit status, and the run in the instance."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance, DagsterRunStatus
from diffusers import StableDiffusionPipeline

from pipeline.recipe.check_specs import SPECS
from resources.recipe_executor import COMMAND_TAG
from resources.run_worker import MACHINE_TAG
from tests.command_line import latentline_command
from tests.e2e.daemon import make_home
from tests.e2e.problems import problem_of
from tests.e2e.pseudo_terminal import Transcript, run_on_terminal
from tests.e2e.workspace import Workspace, write_photographs
from tests.waiting import until

ENDLESS = {
    "steps": 100_000,
    "batch_size": 2,
    "checkpoint_every": 100_000,
    "sample_every": 0,
    "lora": {"rank": 2, "alpha": 2.0},
}

CI_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "run" / "ci.yaml"

pytestmark = pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo-terminals")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "dagster home")


def run_small(workspace: Any, home: Path, *options: str, **keywords: Any) -> Transcript:
    environment = {**workspace.environment(), "DAGSTER_HOME": str(home)}
    command = latentline_command("run", "small", *options)
    return run_on_terminal(command, environment=environment, cwd=workspace.root, **keywords)


def training_has_started(workspace: Any) -> bool:
    return any(file.stat().st_size > 0 for file in workspace.out.glob("runs/*/logs/metrics.jsonl"))


def test_a_run_prints_a_line_per_asset_and_a_summary_and_is_in_the_instance(fresh, home) -> None:
    """The only complete job of the default tests that starts each of its processes."""
    transcript = run_small(fresh, home)
    assert transcript.status == 0, transcript.text
    assert len(transcript.lines) < 40
    assert transcript.lines[0] == "starting small"
    names = [match[1] for line in transcript.lines if (match := re.fullmatch(r"  (\w+) +[0-9.]+ s", line))]
    assert sorted(names) == sorted(SPECS), "one line per asset"
    (note,) = [line for line in transcript.lines if "note: " in line]
    assert re.search(
        r"note: \d+ steps? to train: run \w{16} is new; it is the first run of this recipe", note
    )
    assert f"  LoRA      {fresh.out / 'lora'}" in transcript.lines
    assert "DEBUG" not in transcript.raw
    assert "steps, loss" in transcript.raw, "a progress bar was drawn"
    assert re.search(r"loss [0-9.]+ \(first\) to [0-9.]+ \(last\)", transcript.text), (
        "the summary has the loss"
    )

    instance = DagsterInstance.from_config(str(home))
    [run] = instance.get_runs()
    assert (run.job_name, run.status) == ("small_train", DagsterRunStatus.SUCCESS)
    assert run.tags["latentline/recipe"] == "small"
    materialized = [
        asset for asset in SPECS if instance.get_latest_materialization_event(AssetKey(["small", asset]))
    ]
    assert materialized == list(SPECS)


@pytest.mark.slow
def test_a_project_path_with_blanks_umlauts_and_quotes_trains_draws_and_exports(
    tiny_sd: Path, tmp_path: Path
) -> None:
    root = tmp_path / 'J\u00f6rg\'s "beste" Bilder, 100% & $HOME'
    workspace = Workspace(root, shutil.copytree(tiny_sd, root / "models" / "ein Modell"))
    write_photographs(workspace.data)
    training = {
        "steps": 2,
        "checkpoint_every": 1,
        "sample_every": 1,
        "sample_prompts": [{"prompt": "a cat", "steps": 1}],
        "lora": {"rank": 2, "alpha": 2.0, "modules": ["mid_block.*.to_q"]},
    }
    workspace.recipe(training=training)
    home = make_home(root / "dagster home")
    transcript = run_small(workspace, home)
    assert transcript.status == 0, transcript.text
    again = run_small(workspace, home)
    assert "already finished and unchanged" in again.text
    for command in (["sample", "small"], ["export", "small", "--step", "1"], ["verify", "small"]):
        completed = workspace.latentline(*command)
        assert completed.returncode == 0, completed.stdout + completed.stderr
    pipeline: Any = StableDiffusionPipeline.from_pretrained(workspace.model, safety_checker=None)
    pipeline.load_lora_weights(workspace.out / "lora")


@pytest.mark.slow
def test_O02_a_closed_gate_is_printed_once_and_without_a_traceback(cached, home) -> None:
    (cached.data / "photo1.txt").unlink()
    transcript = run_small(cached, home, "--cache-only")
    assert transcript.status == 1
    assert len(transcript.lines) < 25
    assert transcript.text.count(": 1 image has no caption") == 1
    assert transcript.text.count("GateClosedError: ") == 1
    assert transcript.text.count("  fix:   ") == 1
    assert "Traceback" not in transcript.raw
    assert "small_cache: failed after" in transcript.text


@pytest.mark.slow
def test_a_recipe_edited_in_mid_run_counts_for_the_next_run_only(cached, home) -> None:
    training = {**ENDLESS, "steps": 120, "checkpoint_every": 60}
    recipe = cached.recipe(training=training)
    with cached.start("train") as running:
        until(lambda: training_has_started(cached), seconds=240)
        cached.recipe(training={**training, "learning_rate": 7e-5}, buckets={"resolution": 32, "step": 8})
        _, stderr = running.communicate()
    assert running.returncode == 0, stderr[-3000:]

    [first] = cached.out.glob("runs/*")
    provenance = json.loads((cached.out / "lora" / "provenance.json").read_text("utf-8"))
    assert provenance["run"] == first.name
    assert provenance["recipe"]["training"]["learning_rate"] == recipe.training.learning_rate
    assert provenance["recipe"]["buckets"]["resolution"] == 64

    cached.recipe(training=training)
    assert cached.execute("train").success
    assert [*cached.out.glob("runs/*")] == [first], "the first recipe still has its finished run"
    cached.recipe(training={**training, "learning_rate": 7e-5})
    assert cached.execute("train").success
    assert len([*cached.out.glob("runs/*")]) == 2


@pytest.mark.slow
def test_ctrl_c_prints_that_the_run_was_stopped_and_how_to_resume_it(cached, home) -> None:
    cached.recipe(training=ENDLESS)
    transcript = run_small(cached, home, press_ctrl_c=lambda: training_has_started(cached))
    assert transcript.status == 130, transcript.text
    assert len(transcript.lines) < 16
    checkpoint = max(cached.out.glob("runs/*/checkpoints/step-*"))
    assert transcript.lines[-4:] == [
        "Stopped: the run was stopped by SIGINT, SIGTERM or Dagster",
        "  where: asset small/trained_lora",
        f"         checkpoint {checkpoint}",
        "  fix:   run latentline run small again; it resumes from this checkpoint",
    ]
    assert "Traceback" not in transcript.raw
    assert "failed" not in transcript.text
    (run,) = DagsterInstance.from_config(str(home)).get_runs()
    assert (run.status, run.tags[COMMAND_TAG]) == (DagsterRunStatus.CANCELED, "latentline run small")


def test_a_run_whose_terminal_is_closed_stops_with_a_checkpoint(cached, home) -> None:
    cached.recipe(training=ENDLESS)
    run_small(cached, home, close=lambda: training_has_started(cached))
    (run,) = DagsterInstance.from_config(str(home)).get_runs()
    assert run.status == DagsterRunStatus.CANCELED
    assert list(cached.out.glob("runs/*/checkpoints/step-*"))


@pytest.mark.slow
def test_ctrl_c_while_the_command_starts_prints_that_it_was_stopped(cached, home) -> None:
    transcript = run_small(cached, home, press_ctrl_c=(home / "latentline.lock").exists)
    # If Ctrl-C interrupts code from a string, as in the creation of a dataclass, Python ends itself with the
    # signal although the interruption was handled. A shell reports 130 for that too.
    assert transcript.status in (130, -signal.SIGINT)
    assert "Stopped: " in transcript.text
    assert "Traceback" not in transcript.raw
    assert len(transcript.lines) < 10


@pytest.mark.slow
def test_R18_a_corrected_caption_goes_on_with_the_training(cached, home) -> None:
    training = {**ENDLESS, "steps": 4, "checkpoint_every": 2}
    cached.recipe(training=training)
    assert cached.execute("train").success
    [before] = cached.out.glob("runs/*")
    (cached.data / "photo1.txt").write_text("a corrected caption", encoding="utf-8")
    cached.recipe(training={**training, "steps": 6})
    transcript = run_small(cached, home, "--continue", "latest")
    assert transcript.status == 0, transcript.text
    assert f"it continues run {before.name} at step 4; it differs from" in transcript.text
    assert "6 steps, loss " in transcript.text
    assert "resumed from step 4" in transcript.text


def test_several_recipes_run_in_turn_and_a_failure_stops_the_others_only_with_stop(cached, home) -> None:
    """The first recipe fails at once: its images are in no folder."""
    text = cached.file.read_text("utf-8")
    for name in ("first", "last"):
        copy = text.replace(str(cached.out), str(cached.root / name))
        data = "gone" if name == "first" else cached.data.name
        copy = copy.replace(str(cached.data), str(cached.data.with_name(data)))
        cached.file.with_name(f"{name}.yaml").write_text(copy, encoding="utf-8")
    both = latentline_command("run", "first", "last", "--cache-only")
    stopped = cached.run([*both, "--stop"], DAGSTER_HOME=str(home))
    assert stopped.returncode == 1
    assert stopped.stdout.splitlines()[-4:] == [
        "2 recipes: 1 failed, 1 not started",
        *[line for line in stopped.stdout.splitlines() if line.startswith("  first  failed ")],
        "  last   not started",
        "  to continue: latentline run first last --cache-only",
    ]
    completed = cached.run([*both, "--json"], DAGSTER_HOME=str(home))
    assert completed.returncode == 1
    assert "2 recipes: 1 failed, 1 done" in completed.stderr
    assert "last_cache: done after" in completed.stderr
    assert "to continue: latentline run first --cache-only" in completed.stderr
    first, last = json.loads(completed.stdout)["recipes"]
    assert (first["outcome"], first["status"], first["reports"]) == ("failed", 1, {})
    assert [error.keys() for error in first["errors"]] == [{"what", "where", "fix"}]
    assert (last["outcome"], last["status"], last["errors"]) == ("done", 0, [])
    assert last["reports"]["vae_latents"] == json.loads(
        (cached.root / "last" / "reports" / "vae_latents.json").read_text("utf-8")
    )
    assert last["checks"].keys() == last["reports"].keys()
    runs = DagsterInstance.from_config(str(home)).get_runs()
    assert sorted(run.job_name for run in runs) == ["first_cache", "first_cache", "last_cache"]


LOST_INTERRUPT = """
import os, signal, sys
from pathlib import Path
import assets.run

class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def load_job(name, real=assets.run.load_job):
    Interrupted()
    return real(name)

assets.run.load_job = load_job
sys.exit(assets.run.main(Path(sys.argv[1]), "small_train"))
"""


def test_a_ctrl_c_that_a_destructor_discards_still_stops_the_start(cached, home) -> None:
    command = [sys.executable, "-c", LOST_INTERRUPT, str(cached.file)]
    completed = cached.run(command, DAGSTER_HOME=str(home))
    assert "Exception ignored in" in completed.stderr, "Python discarded the KeyboardInterrupt"
    assert "Stopped: the command was stopped before the run started" in completed.stderr
    assert completed.returncode == 130
    assert DagsterInstance.from_config(str(home)).get_runs() == []


def test_a_missing_instance_folder_is_an_error_with_a_fix(cached) -> None:
    completed = cached.run(latentline_command("run", "small"), DAGSTER_HOME=str(cached.root / "nowhere"))
    problem = problem_of(completed)
    assert str(cached.root / "nowhere") in problem.what
    assert "unset DAGSTER_HOME" in problem.fix


@pytest.mark.parametrize("config", [None, pytest.param(CI_CONFIG, marks=pytest.mark.slow)])
def test_O02_dagster_job_execute_prints_a_closed_gate_once_with_its_fix(
    cached, home, config: Path | None
) -> None:
    (cached.data / "photo1.txt").unlink()
    command = cached.command("job", "execute", "-m", "assets.definitions", "-j", "small_cache")
    command += [] if config is None else ["-c", str(config)]
    completed = cached.run(command, DAGSTER_HOME=str(home))
    assert completed.returncode == 1
    assert len(completed.stderr.splitlines()) < 25
    assert completed.stderr.count(": 1 image has no caption") == 1
    assert completed.stderr.count("GateClosedError: ") == 1
    assert "Traceback" not in completed.stderr
    assert "Stack Trace" not in completed.stderr
    problem = problem_of(completed)
    assert "captions_present" in problem.what
    assert "photo1" in problem.what + problem.where
    assert problem.fix


@pytest.mark.slow
def test_O08_a_run_starts_although_an_earlier_one_was_killed_while_it_used_the_gpu_pool(cached, home) -> None:
    cached.recipe(training=ENDLESS)
    environment = {**cached.environment(), "DAGSTER_HOME": str(home)}
    killed = subprocess.Popen(
        latentline_command("run", "small"), env=environment, cwd=cached.root, stderr=subprocess.DEVNULL
    )
    while not training_has_started(cached):
        assert killed.poll() is None
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.wait()

    transcript = run_small(cached, home, "--cache-only", timeout_s=120)
    assert transcript.status == 0, transcript.text
    runs = DagsterInstance.from_config(str(home)).get_runs()
    statuses = {run.job_name: run.status for run in runs}
    assert statuses == {"small_train": DagsterRunStatus.FAILURE, "small_cache": DagsterRunStatus.SUCCESS}
    assert {run.tags[MACHINE_TAG] for run in runs} == {platform.node()}


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-", "2>&1 | true"])
def test_a_closed_or_broken_standard_output_does_not_fail_a_run(cached, streams: str) -> None:
    command = [sys.executable, "-c", "from pipeline.cli.main import main; main()"]
    script = f'{{ "$@" {streams.removesuffix(" | true")}; echo $? > status; }}'
    script += " | true" if streams.endswith("| true") else ""
    completed = cached.run(["sh", "-c", script, "sh", *command, "run", str(cached.file), "--cache-only"])
    assert (cached.root / "status").read_text() == "0\n", completed.stderr[-2000:]
