"""A base model that is sharded over two processes, next to one that both processes hold completely."""

from __future__ import annotations

import json
import math
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from demo.tiny_models import TINY
from pipeline.errors import LaunchError
from pipeline.models.worker.family import load_family
from pipeline.processes.launch import LocalLaunch
from pipeline.recipe.errors import find_mistakes
from pipeline.recipe.yaml_document import dotted
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.worker.validation import NOISE_LEVELS
from tests.pipeline.trained_lora.rank_server import RankServer

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

WORKER = "pipeline.trained_lora.worker"


def flux_project(
    make_project: Callable[..., Project], bases: dict[str, Path], folder: Path, **more: Any
) -> Project:
    TINY["FLUX.1 dev"](folder / "flux")
    bases["flux"] = folder / "flux"
    return make_project(
        prediction="flux", batch_size=2, learning_rate=1e-3, sizes={"64x64": 5, "32x96": 5}, **more
    )


def pair(project: Project, *, shard: bool, **training: Any) -> TrainingJob:
    name = "sharded" if shard else "replicated"
    return project.changed(name, num_processes=2, shard=shard, **training).job()


def launch(job: TrainingJob) -> None:
    LocalLaunch(job.recipe.accelerate)(WORKER, job.write())


def assert_same_results(project: Project, ranks: RankServer, *, steps: int) -> None:
    replicated, sharded = pair(project, shard=False), pair(project, shard=True)
    assert replicated.run == sharded.run
    for job in (replicated, sharded):
        ranks.train(job)

    expected, actual = RunLayout(replicated.folder), RunLayout(sharded.folder)
    results = [json.loads(layout.result.read_text(encoding="utf-8")) for layout in (expected, actual)]
    assert [result["warnings"] for result in results] == [[], []]
    assert results[1]["output_change"] == pytest.approx(results[0]["output_change"], rel=1e-5)
    losses = [[line["loss"] for line in read_metrics(layout.metrics, steps)] for layout in (expected, actual)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == steps

    files = sorted(path.name for path in actual.exported.glob("*.safetensors"))
    assert len(files) == 3
    for name in files:
        before, after = load_file(expected.exported / name), load_file(actual.exported / name)
        assert before.keys() == after.keys() != set()
        assert max(float(tensor.abs().max()) for tensor in before.values()) > 0, name
        for key, tensor in before.items():
            torch.testing.assert_close(after[key], tensor, rtol=0, atol=1e-6)

    previews = sorted(path.name for path in expected.previews.iterdir())
    assert len(previews) > 1
    assert previews == sorted(path.name for path in actual.previews.iterdir())
    for name in previews:
        assert (expected.previews / name).read_bytes() == (actual.previews / name).read_bytes()
    lines = [
        [json.loads(line) for line in layout.validation.read_text().splitlines()]
        for layout in (expected, actual)
    ]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]] != []
    for one, two in zip(*lines, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_sharded_base_model_trains_the_lora_of_ddp(
    make_project: Callable[..., Project],
    rank_server: RankServer,
    tiny_bases: dict[str, Path],
    tmp_path: Path,
    steps: int,
) -> None:
    project = flux_project(
        make_project,
        tiny_bases,
        tmp_path,
        steps=steps,
        datasets={"photos": {"validation_fraction": 0.2}},
        validate_every=10,
        sample_every=10,
        gradient_checkpointing=True,
    )
    buckets = Counter(item.bucket for item in pair(project, shard=True).inputs.held_out)
    num_batches = sum(math.ceil(len(NOISE_LEVELS) * size / 2) for size in buckets.values())
    assert num_batches % 2 == 1, "one process has one batch of the holdout more than the other"
    assert_same_results(project, rank_server, steps=steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["lora", "lokr"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_a_sharded_unet_with_samples_of_the_class_trains_the_adapter_of_ddp(
    make_project: Callable[..., Project], rank_server: RankServer, checkpointing: bool, kind: str
) -> None:
    """Only one of the processes may have a sample that needs the base model's prediction."""
    project = make_project(
        batch_size=1,
        gradient_accumulation=2,
        learning_rate=1e-3,
        sizes={"64x64": 5, "32x96": 5},
        steps=8,
        validate_every=4,
        sample_every=4,
        datasets={"photos": {"validation_fraction": 0.2}, "class": {"role": "prior"}},
        lora={"rank": 4, "alpha": 2.0, "kind": kind},
        loss={"prior": "prediction"},
        gradient_checkpointing=checkpointing,
    )
    assert_same_results(project, rank_server, steps=8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_resumes_with_and_without_a_sharded_base_model(
    make_project: Callable[..., Project], tiny_bases: dict[str, Path], tmp_path: Path
) -> None:
    project = flux_project(make_project, tiny_bases, tmp_path, sample_every=0)
    expected = pair(project, shard=False, steps=6)
    launch(expected)
    for steps, shard in ((2, False), (4, True), (6, False)):
        resumed = project.changed("resumed", num_processes=2, shard=shard, steps=steps).job()
        launch(resumed)
        result = json.loads(RunLayout(resumed.folder).result.read_text(encoding="utf-8"))
        assert (result["resumed_from"], result["steps"]) == (steps - 2, steps)
    file = "pytorch_lora_weights.safetensors"
    before, after = (load_file(RunLayout(job.folder).exported / file) for job in (expected, resumed))
    for key, tensor in before.items():
        torch.testing.assert_close(after[key], tensor, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_each_process_holds_half_of_the_base_weights_and_all_of_the_lora(
    make_project: Callable[..., Project], tiny_bases: dict[str, Path], tmp_path: Path
) -> None:
    job = pair(flux_project(make_project, tiny_bases, tmp_path, steps=2), shard=True)
    file = job.write()
    LocalLaunch(job.recipe.accelerate)("tests.pipeline.trained_lora.worker.sharded_shares", file)
    ranks = [json.loads(file.with_name(f"rank-{rank}.json").read_text()) for rank in (0, 1)]

    base = load_family(job.base).denoiser.load("float32", "cpu")
    total = sum(weight.numel() * weight.element_size() for weight in base.parameters())
    for rank in ranks:
        assert rank["shares"] == [rank["shares"][0]] * 2, "gathered weights are freed"
        assert rank["shares"][0] == pytest.approx(total / 2, rel=0.01)
        assert rank["num_trained_weights"] == ranks[0]["num_trained_weights"] > 0
    assert sum(rank["shares"][0] for rank in ranks) == total


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_other_with_a_message(
    make_project: Callable[..., Project], tiny_bases: dict[str, Path], tmp_path: Path, rank: int
) -> None:
    job = pair(flux_project(make_project, tiny_bases, tmp_path, steps=10_000), shard=True)
    layout = RunLayout(job.folder)
    killed: list[psutil.Process] = []

    def kill_in_step_3() -> None:
        while not layout.metrics.exists() or len(read_metrics(layout.metrics, 10_000)) < 3:
            time.sleep(0.05)
        workers = {
            child.environ()["RANK"]: child
            for child in psutil.Process().children(recursive=True)
            if "RANK" in child.environ()
        }
        killed.extend(workers[name] for name in ("0", "1"))
        workers[str(rank)].send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill_in_step_3)
    killer.start()
    with pytest.raises(LaunchError) as excinfo:
        launch(job)
    killer.join()
    assert len(killed) == 2
    assert [process for process in killed if process.is_running()] == []
    # The launcher reports the process that it sees first: the killed one, or the one that lost its peer.
    assert re.search("SIGKILL|Connection", str(excinfo.value))
    assert not layout.result.exists()


SMALLEST: dict[str, Any] = {
    "datasets": [{"name": "p", "path": "p"}],
    "output_dir": "o",
    "model": {"base": "a/b"},
}


@pytest.mark.parametrize(
    ("processes", "training", "what"),
    [
        (1, {}, "shard: true requires num_processes of at least 2, got 1"),
        (2, {"offload": 0}, "shard: true cannot be combined with training.offload: 0"),
        (2, {"quantize": "int8"}, "cannot be combined with training.quantize: int8"),
        (2, {"compile": True}, "cannot be combined with training.compile: true"),
        (2, {"lora": {"dora": True}}, "cannot be combined with training.lora.dora: true"),
        (2, {"lora": {"init": "pissa"}}, "cannot be combined with training.lora.init: pissa"),
        (2, {"lora": {"text_encoders": {}}}, "cannot be combined with training.lora.text_encoders"),
    ],
    ids=str,
)
def test_settings_that_a_sharded_base_does_not_work_with_are_recipe_errors(
    processes: int, training: dict[str, Any], what: str
) -> None:
    accelerate = {"shard": True, "num_processes": processes}
    (mistake,) = find_mistakes({**SMALLEST, "accelerate": accelerate, "training": training})
    assert dotted(mistake.path) == "accelerate.shard"
    assert what in mistake.what
    assert "accelerate" in mistake.fix
    assert find_mistakes({**SMALLEST, "accelerate": {"shard": True, "num_processes": 2}}) == []
