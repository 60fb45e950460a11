from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.worker.checkpoint import TrainingState
from pipeline.trained_lora.worker.engine import Engine, QueuedStep
from pipeline.trained_lora.worker.optimizers import UpdateOnDevice, can_skip_updates
from tests.pipeline.trained_lora.worker.engine_steps import engine_of, inputs_of, one_step
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

FUSED: dict[str, Any] = {"optimizer": "torch.optim.AdamW", "optimizer_arguments": {"fused": True}}


def checking_on_device(job: TrainingJob) -> Engine:
    """Return an engine whose updates are checked as on a GPU."""
    engine = engine_of(job)
    engine._on_device = UpdateOnDevice(engine._optimizer.optimizer, engine.weights)
    return engine


def state_of(engine: Engine) -> TrainingState:
    return copy.deepcopy(engine.state(0))


def require_equal(actual: Any, expected: Any) -> None:
    """Compare states bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            require_equal(actual[name], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            require_equal(one, other)
    else:
        assert actual == expected


def averaging_as_on_a_gpu(engine: Engine) -> Engine:
    """Average all weights at once, as on a GPU; the last bits of the average depend on it."""
    if engine._average._ema is not None:
        engine._average._ema.foreach = True
    return engine


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_finite_steps_give_the_weights_of_updates_that_the_host_checks(
    make_project: Callable[..., Project], ema_decay: float | None
) -> None:
    job = make_project(steps=3, lr_scheduler="linear", max_grad_norm=0.05, ema_decay=ema_decay, **FUSED).job()
    engines = [averaging_as_on_a_gpu(engine_of(job)), checking_on_device(job)]
    expected, actual = ([one_step(engine, job, step) for step in range(3)] for engine in engines)
    assert actual == expected
    on_host, on_device = map(state_of, map(averaging_as_on_a_gpu, engines))
    require_equal(on_device.adapter, on_host.adapter)
    require_equal(on_device.optimizer, on_host.optimizer)


@pytest.mark.parametrize("ema_decay", [None, 0.9])
@pytest.mark.parametrize("quantity", ["loss", "gradient"])
def test_R05_a_step_that_is_not_finite_and_the_steps_queued_after_it_change_nothing(
    make_project: Callable[..., Project], quantity: str, ema_decay: float | None
) -> None:
    project = make_project(
        steps=4,
        gradient_accumulation=1,
        lr_scheduler="linear",
        batch_size=2,
        ema_decay=ema_decay,
        **FUSED,
    )
    job = project.job()
    engine = checking_on_device(job)
    for step in range(2):  # the average of the first step is its weights, however often they are included
        one_step(engine, job, step)
    before = state_of(engine)

    batch, later = job.plan()[2], job.plan()[3]
    ((_, micro),) = inputs_of(job, engine, batch)
    if quantity == "loss":
        micro.latent[1] = math.nan
        bad = engine.start(batch, iter([(batch, micro)]), stop=False)
    else:
        overflow = engine.weights[0].register_hook(lambda gradient: gradient + math.inf)
        bad = engine.start(batch, iter([(batch, micro)]), stop=False)
        overflow.remove()
    good = engine.start(later, iter(inputs_of(job, engine, later)), stop=False)
    assert not bad.is_read
    assert bool(good.is_finite())

    with pytest.raises(TrainingError, match=f"the {quantity} of step 2 must be finite") as excinfo:
        engine.finish(bad)
    assert micro.variant_ids[1] in excinfo.value.where
    assert (micro.variant_ids[0] in excinfo.value.where) == (quantity == "gradient")
    after = state_of(engine)
    require_equal(after.adapter, before.adapter)
    require_equal(after.optimizer, before.optimizer)

    engine.restore(before)
    one_step(engine, job, 3)
    trained = state_of(engine).adapter
    assert differing_tensors(trained, before.adapter), "the step must change weights"


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_a_step_on_the_device_does_not_wait_for_the_host(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch, ema_decay: float | None
) -> None:
    """Reading a value of a tensor is what makes the host wait for a GPU."""
    job = make_project(steps=2, ema_decay=ema_decay, **FUSED).job()
    engine = checking_on_device(job)
    inputs = inputs_of(job, engine, job.plan()[0])

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the host reads a tensor's value")

    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    step = engine.start(job.plan()[0], iter(inputs), stop=False)
    with pytest.raises(AssertionError, match="reads a tensor's value"):
        engine.finish(step)


@pytest.mark.parametrize(
    ("device", "fused", "can_skip"), [("cuda", True, True), ("cpu", True, False), ("cuda", False, False)]
)
def test_only_a_gpu_with_a_fused_adamw_checks_updates_itself(
    device: str, *, fused: bool, can_skip: bool
) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=fused)
    assert can_skip_updates(optimizer, device=torch.device(device)) == can_skip


def test_on_a_cpu_the_host_reads_each_step_before_the_update(make_project: Callable[..., Project]) -> None:
    job = make_project(steps=2, **FUSED).job()
    engine = engine_of(job)
    batch = job.plan()[0]
    step = engine.start(batch, iter(inputs_of(job, engine, batch)), stop=False)
    assert step.is_read
    assert step.outcome() is step.outcome()


def test_a_loss_that_is_not_finite_is_an_error_also_if_the_gradient_may_overflow(
    make_project: Callable[..., Project],
) -> None:
    batch = make_project(steps=2).job().plan()[0]
    values = torch.full((3, batch.num_samples), math.nan)
    step = QueuedStep(batch, values, torch.ones(()), learning_rate=0.1, lr_scheduler_state={}, num_averaged=0)
    with pytest.raises(TrainingError, match="the loss of step 0 must be finite"):
        step.outcome(may_overflow=True)


def test_an_update_after_one_that_was_skipped_uses_the_gradients_as_they_are() -> None:
    """torch's gradient scaler would otherwise halve its scale after a gradient that is not finite."""
    moments: list[torch.Tensor] = []
    for skips_one in (False, True):
        weights = [torch.nn.Parameter(torch.ones(2))]
        optimizer = torch.optim.AdamW(weights, fused=True)
        updates = UpdateOnDevice(optimizer, weights)
        for is_finite in (False, True) if skips_one else (True,):
            weights[0].grad = torch.full((2,), 0.25)
            updates.step(torch.tensor(is_finite))
            updates.reset()
        moments.append(optimizer.state[weights[0]]["exp_avg"])
    assert torch.equal(*moments)


def test_a_first_weight_without_a_gradient_does_not_end_the_update() -> None:
    """With modules of one's own, a layer that the model does not use may come first."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    updates = UpdateOnDevice(optimizer, weights)
    for is_finite in (True, False):
        before = weights[1].detach().clone()
        weights[1].grad = torch.full((2,), 0.25)
        updates.step(torch.tensor(is_finite))
        assert torch.equal(weights[1], before) != is_finite
    assert torch.equal(weights[0], torch.ones(2))
