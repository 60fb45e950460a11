from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.before_training import largest_step, run_trial_step
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.loop import train
from pipeline.trained_lora.worker.stop_request import StopRequest
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


class Phases:
    """A report that records the phases."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def info(self, text: str) -> None: ...

    def phase(self, text: str) -> None:
        self.names.append(text.partition(" (")[0])

    def progress(self, done: int, total: int, text: str, **details: str) -> None: ...


def test_memory_that_runs_out_in_a_step_shows_before_checkpoint_and_export_are_tested(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(optimizer="tests.pipeline.trained_lora.oversized_optimizer.OversizedStep").job()
    phases = Phases()
    with pytest.raises(TrainingError, match="memory ran out in the trial step before training") as excinfo:
        train(job, phases, StopRequest())
    assert "training.batch_size 2" in excinfo.value.where
    assert "gradient_checkpointing: true" in excinfo.value.fix
    assert "batch_size: 1 and gradient_accumulation: 4" in excinfo.value.fix
    assert phases.names == ["loading the UNet", "adding the LoRA", "trial step"]
    assert not RunLayout(job.folder).checkpoints.exists()


def test_the_trial_step_precedes_the_preflight_and_a_resumed_run_has_none(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(steps=1)
    phases = Phases()
    assert train(project.job(), phases, StopRequest())
    assert phases.names[2:5] == ["trial step", "testing checkpoint and export", "first step"]
    resumed = Phases()
    assert train(project.job(), resumed, StopRequest())
    assert "trial step" not in resumed.names


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": "adamw", "ema_decay": 0.9, "lr_scheduler": "cosine", "warmup_steps": 2},
        {"optimizer": "prodigy", "learning_rate": 1.0},
        {"optimizer": "schedule_free"},
        pytest.param({"optimizer": "adafactor"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "lion"}, marks=pytest.mark.slow),
    ],
    ids=lambda training: training["optimizer"],
)
def test_training_after_a_trial_step_is_bit_equal_to_training_without_it(
    make_project: Callable[..., Project], training: dict[str, Any]
) -> None:
    job = make_project(gradient_accumulation=1, **training).job()
    family, plan = load_family(job.base), job.plan()

    def trained(*, trial: bool) -> tuple[list[torch.Tensor], list[float]]:
        engine = Engine(job, family)
        maker = MicroBatchMaker(job, family, engine.noise_scheduler)
        if trial:
            run_trial_step(engine, largest_step(plan, job.inputs), maker.make)
        steps = [plan[number] for number in range(3)]
        losses = [
            engine.step(
                each, iter([(each, maker.make(each.step, each.micro_batches[0][0]))]), stop=False
            ).loss
            for each in steps
        ]
        with engine.result_weights():
            return [weight.detach().clone() for weight in engine.weights], losses

    weights, losses = trained(trial=True)
    expected_weights, expected_losses = trained(trial=False)
    assert losses == expected_losses
    assert differing_tensors(weights, expected_weights) == []
    assert max(float(weight.abs().max()) for weight in weights) > 0


def test_the_largest_step_has_the_bucket_with_the_most_latent_values(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(sizes={"32x96": 6, "64x64": 1}, steps=7, gradient_accumulation=1, batch_size=1).job()
    (slot,) = largest_step(job.plan(), job.inputs).slots()
    assert "64x64" in slot.variant_id
