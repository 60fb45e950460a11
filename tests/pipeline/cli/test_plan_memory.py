"""The memory forecast of `latentline plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from bench.gpu.configurations import PUBLISHED
from pipeline.cli.main import latentline
from pipeline.cli.plan import GIB, show_memory, show_times
from pipeline.errors import ModelError
from pipeline.memory.job import Change, ComputedTimes, MemoryForecast, StageMemory

TEXT = """\
datasets: [{{name: photos, path: {folder}/photos}}]
output_dir: {folder}/out
model: {{base: {folder}/model}}
training: {{batch_size: 2, lora: {{rank: 16, alpha: 16}}}}
accelerate: {{mixed_precision: bf16}}
"""


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "flowers.yaml").write_text(TEXT.format(folder=tmp_path), encoding="utf-8")
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(folder))
    return tmp_path


@pytest.mark.slow
def test_plan_forecasts_a_published_model_from_its_configuration_files(configs: Path) -> None:
    next(each for each in PUBLISHED if each.name == "Stable Diffusion 1.5").write(configs / "model")
    completed = CliRunner().invoke(latentline, ["plan", "flowers", "--only-memory", "--json", "--vram", "5"])
    assert completed.exception is None, completed.output
    memory = json.loads(completed.stdout)["memory"]
    assert GIB < memory["machine_bytes"] <= psutil.virtual_memory().total
    stages = [stage["stage"] for stage in memory["stages"]]
    assert stages == ["encode latents", "encode text", "train", "draw previews"]
    assert memory["card_bytes"] == 5 * GIB
    # Batch 2 without checkpointing needs about 10 GiB.
    assert memory["stages"][2]["device_bytes"] > 5 * GIB
    assert memory["change"]["settings"] == ["training.gradient_checkpointing: true"]
    assert memory["change"]["fits"]
    assert 2 * GIB < memory["change"]["device_bytes"] < 4 * GIB


@pytest.mark.slow
def test_plan_computes_times_for_a_named_card(configs: Path) -> None:
    next(each for each in PUBLISHED if each.name == "Stable Diffusion 1.5").write(configs / "model")
    arguments = ["plan", "flowers", "--only-memory", "--json", "--card", "rtx 3090"]
    completed = CliRunner().invoke(latentline, arguments)
    assert completed.exception is None, completed.output
    memory = json.loads(completed.stdout)["memory"]
    assert (memory["card"], memory["card_bytes"]) == ("RTX 3090", 24 * GIB)
    times = memory["times"]
    assert (times["gpu"], times["not_counted"]) == ("RTX 3090", "")
    assert 0.1 < times["step_s"] < 2
    assert 0.01 < times["latent_s"] < 0.2


@pytest.mark.slow
def test_missing_configuration_files_are_named(configs: Path) -> None:
    folder = next(each for each in PUBLISHED if each.name == "SDXL").write(configs / "model")
    (folder / "unet" / "config.json").unlink()
    completed = CliRunner().invoke(latentline, ["plan", "flowers", "--only-memory"])
    assert isinstance(completed.exception, ModelError)
    assert "unet" in completed.exception.where


def test_the_two_memory_options_exclude_each_other(configs: Path) -> None:
    completed = CliRunner().invoke(latentline, ["plan", "flowers", "--only-memory", "--no-memory"])
    assert completed.exit_code == 2


def test_a_card_has_its_own_memory(configs: Path) -> None:
    completed = CliRunner().invoke(latentline, ["plan", "flowers", "--card", "H100", "--vram", "24"])
    assert completed.exit_code == 2
    assert "--vram and --card exclude each other" in completed.output


def test_computed_times_of_a_job_have_the_range_of_the_comparison(capsys: Any) -> None:
    times = ComputedTimes("RTX 4090", 1024, 768, 0.05, 1.2, lowest=0.5, highest=1.5)
    show_times(times, 2, images=10_000, steps=1000)
    title, latents, step, note = capsys.readouterr().out.splitlines()
    assert title == "time, computed for the RTX 4090 and images of 1024 x 768 px"
    assert latents == "  encode latents     0.05 s per image, 4 min for 10,000 images"
    assert step == "  train              1.2 s per step, 20 min for 1,000 steps (range 10 min to 30 min)"
    assert "0.5 to 1.5 times" in note

    show_times(times, 1)
    assert "1.2 s per step\n" in capsys.readouterr().out


def test_a_time_that_is_not_computed_has_its_reason(capsys: Any) -> None:
    show_times(None, 1, images=1, steps=1)
    assert capsys.readouterr().out == ""
    show_times(ComputedTimes("H100", 512, 512, 0.05, None, "training.quantize: nf4"), 1, images=0, steps=10)
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "  train              not computed with training.quantize: nf4"


@pytest.mark.parametrize(
    ("card", "change", "line"),
    [
        (None, None, "compare with one by --vram 24 or --card H100"),
        ("a GPU of 24 GB", None, "Training fits into a GPU of 24 GB: about 23.0 GiB of it are usable."),
        ("a GPU of 24 GB", Change(("a: b",), 20 * GIB, True), "change that fits: a: b (about 20.0 GiB)"),
        ("a GPU of 24 GB", Change(("a: b",), 30 * GIB, False), "which does not fit either"),
    ],
)
def test_the_table_says_whether_training_fits_and_what_to_change(
    card: str | None, change: Change | None, line: str, capsys: Any
) -> None:
    stages = (StageMemory("encode latents", GIB, GIB, "a note"), StageMemory("train", 25 * GIB, 2 * GIB))
    bytes_of = (None, None) if card is None else (24 * GIB, 23 * GIB)
    show_memory(MemoryForecast(stages, card, *bytes_of, change, machine_bytes=2 * GIB))
    shown = capsys.readouterr().out
    assert "encode latents        1.0 GiB    1.0 GiB   a note" in shown
    assert line in shown
    assert "host's memory" not in shown


@pytest.mark.parametrize(
    ("stage", "fix"),
    [("train", "set training.quantize: int8 or nf4"), ("encode text", "use a machine with more memory")],
)
def test_a_stage_that_needs_more_than_the_machines_memory_is_a_warning(
    stage: str, fix: str, capsys: Any
) -> None:
    stages = (StageMemory("encode latents", GIB, GIB), StageMemory(stage, GIB, 2 * GIB + 1))
    show_memory(MemoryForecast(stages, None, None, None, None, machine_bytes=2 * GIB))
    _, warning, last = capsys.readouterr().out.rstrip().rsplit("\n", 2)
    assert warning == (
        f"warning: {stage} needs 2.0 GiB of the host's memory per process, but this machine has 2.0 GiB"
    )
    assert last.startswith("  fix: ")
    assert fix in last
