"""Real training processes: one that is stopped and killed, and two that train together."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from demo.tiny_models import TINY
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.worker.checkpoint import checkpoint_path, load_checkpoint
from pipeline.trained_lora.worker.validation import NOISE_LEVELS
from tests.pipeline.trained_lora.project import ALL_MODULES
from tests.pipeline.trained_lora.rank_server import RankServer
from tests.pipeline.trained_lora.runs import run_until
from tests.pipeline.trained_lora.slider_project import slider_project
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

STEPS = 40


def outcome(job: TrainingJob) -> tuple[list[tuple[int, float]], dict[str, torch.Tensor]]:
    layout, steps = RunLayout(job.folder), job.recipe.training.steps
    state = load_checkpoint(checkpoint_path(layout.checkpoints, steps), job.run)
    return [(line["step"], line["loss"]) for line in read_metrics(layout.metrics, steps)], state.adapter


def in_this_process(job: TrainingJob) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run_until(job)[0]
    finally:
        torch.set_num_threads(threads)
    return outcome(job)


def started(job: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "pipeline.trained_lora.worker", str(job)])


def wait_for_steps(job: TrainingJob, number: int, child: subprocess.Popen[bytes]) -> None:
    while len(read_metrics(RunLayout(job.folder).metrics, STEPS)) < number:
        assert child.poll() is None, "the child ended before it was to be stopped"
        time.sleep(0.02)


@pytest.mark.slow
def test_R01_R12_a_stopped_and_then_killed_process_ends_with_the_weights_of_an_uninterrupted_one(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(steps=STEPS, gradient_accumulation=1, checkpoint_every=4)
    expected = in_this_process(project.changed("whole").job())
    job = project.changed("cut").job()
    path = job.write()

    stopped = started(path)
    wait_for_steps(job, 3, stopped)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 128 + signal.SIGTERM
    num_steps_done = len(read_metrics(RunLayout(job.folder).metrics, STEPS))
    assert 3 <= num_steps_done < STEPS
    assert (
        load_checkpoint(checkpoint_path(RunLayout(job.folder).checkpoints, num_steps_done), job.run).step
        == num_steps_done
    )

    killed = started(path)
    wait_for_steps(job, min(num_steps_done + 6, STEPS - 2), killed)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    assert not RunLayout(job.folder).result.exists()

    assert started(path).wait(120) == 0
    actual = outcome(job)
    assert actual[0] == expected[0]
    assert differing_tensors(actual[1], expected[1]) == []
    assert json.loads(RunLayout(job.folder).result.read_text())["resumed_from"] >= num_steps_done


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resumed_run_uses_the_compiled_blocks_of_the_scratch_folder(
    make_project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    deployment, scratch = tmp_path / "deployment.yaml", tmp_path / "scratch"
    deployment.write_text(f"scratch: {scratch}\n")
    monkeypatch.setenv("LATENTLINE_DEPLOYMENT", str(deployment))
    project = make_project(sizes={"64x64": 4}, compile=True)
    libraries: list[set[Path]] = []
    for steps in (1, 2):
        assert started(project.changed("run", steps=steps).job().write()).wait(500) == 0
        libraries.append(set(scratch.glob("compiled/**/*.so")))
    assert json.loads(RunLayout(project.changed("run").job().folder).result.read_text())["resumed_from"] == 1
    assert libraries[0], "the first process compiled nothing"
    assert libraries[1] == libraries[0]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "more",
    [
        {"datasets": {"photos": {"validation_fraction": 0.2}}},
        pytest.param(
            {
                "datasets": {"photos": {"validation_fraction": 0.2}, "class": {"role": "prior"}},
                "loss": {"prior": "prediction"},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "with prior prediction"],
)
def test_R03_R04_two_processes_reach_the_weights_rate_and_validation_loss_of_one_process(
    make_project: Callable[..., Project], rank_server: RankServer, more: dict[str, Any]
) -> None:
    project = make_project(
        batch_size=4,
        lr_scheduler="linear",
        warmup_steps=1,
        learning_rate=1e-3,
        sizes={"64x64": 5, "32x96": 5},
        validate_every=2,
        lora=ALL_MODULES,
        **more,
    )
    alone = project.changed("alone").job()
    pair = project.changed("pair", num_processes=2, batch_size=2).job()
    assert [step.slots() for step in alone.plan()] == [step.slots() for step in pair.plan()]
    shares = [share for step in pair.plan() for micro in step.micro_batches for share in micro]
    assert any(slot.weight == 0 for share in shares for slot in share), "no rank is ever without a sample"
    _require_the_same_training(alone, pair, rank_server)
    rates = [read_metrics(RunLayout(job.folder).metrics, 6)[-1]["learning_rate"] for job in (alone, pair)]
    assert rates[0] == rates[1]
    _require_the_same_validation(alone, pair)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_R03_two_processes_train_a_slider_like_one_process(
    make_project: Callable[..., Project], rank_server: RankServer
) -> None:
    sizes = {"64x64": 6, "32x96": 4}
    project = slider_project(make_project, sizes=sizes, batch_size=4, learning_rate=1e-3, steps=4)
    alone = project.changed("alone").job()
    pair = project.changed("pair", num_processes=2, batch_size=2).job()
    _require_the_same_training(alone, pair, rank_server)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_processes_train_a_model_with_unused_text_layers_like_one_process(
    make_project: Callable[..., Project],
    rank_server: RankServer,
    tiny_bases: dict[str, Path],
    tmp_path: Path,
) -> None:
    TINY["Qwen-Image"](tmp_path / "qwen")
    tiny_bases["qwen"] = tmp_path / "qwen"
    lora = {"rank": 4, "targets": "blocks"}
    project = make_project(prediction="qwen", batch_size=4, learning_rate=1e-3, steps=3, lora=lora)
    alone = project.changed("alone").job()
    pair = project.changed("pair", num_processes=2, batch_size=2).job()
    _require_the_same_training(alone, pair, rank_server)


def _require_the_same_training(alone: TrainingJob, pair: TrainingJob, ranks: RankServer) -> None:
    """Train one job in this process and one in two, and compare their losses and weights."""
    ranks.train(pair)
    expected, actual = in_this_process(alone), outcome(pair)
    assert actual[0] == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in expected[0]]
    for name, weight in expected[1].items():
        torch.testing.assert_close(actual[1][name], weight, rtol=1e-2, atol=1e-5)


def _require_the_same_validation(alone: TrainingJob, pair: TrainingJob) -> None:
    """Check that both runs measured the same; the pair's ranks get different numbers of batches."""
    buckets = Counter(item.bucket for item in pair.inputs.held_out)
    assert sum(math.ceil(len(NOISE_LEVELS) * size / 2) for size in buckets.values()) % 2 == 1
    lines = [
        [json.loads(line) for line in RunLayout(job.folder).validation.read_text().splitlines()]
        for job in (alone, pair)
    ]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]] == [0, 2, 4, 6]
    for one, two in zip(*lines, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["by_level"] == pytest.approx(one["by_level"], rel=1e-5)
    assert lines[0][0]["loss"] != pytest.approx(lines[0][-1]["loss"], rel=1e-4)
