from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.recipe import TrainingSettings
from pipeline.recipe.optimizer_classes import OPTIMIZERS
from pipeline.trained_lora.worker.adapter.lora import adapter_state
from pipeline.trained_lora.worker.checkpoint import load_checkpoint, save_checkpoint
from pipeline.trained_lora.worker.optimizers import fuses_steps, make_lr_scheduler, make_optimizer
from tests.pipeline.trained_lora.worker.engine_steps import engine_of, one_step
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

ON_THE_CPU = [name for name, known in OPTIMIZERS.items() if known.package is None]


def settings(**values: Any) -> TrainingSettings:
    return TrainingSettings(**values)


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, 6).reshape(2, 3))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_named_optimizer_accepts_exactly_the_arguments_of_the_recipe_schema(name: str) -> None:
    module, _, kind = OPTIMIZERS[name].path.rpartition(".")
    if OPTIMIZERS[name].package:
        pytest.importorskip(str(OPTIMIZERS[name].package))
    parameters = inspect.signature(getattr(import_module(module), kind).__init__).parameters
    assert set(OPTIMIZERS[name].arguments) <= set(parameters)
    assert {"betas", "eps", "weight_decay"} & set(parameters) <= set(OPTIMIZERS[name].arguments)
    defaults = {argument: parameters[argument].default for argument in OPTIMIZERS[name].arguments}
    assert defaults == OPTIMIZERS[name].arguments


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_each_optimizer_lowers_a_simple_loss(name: str) -> None:
    chosen = settings(optimizer=name, learning_rate=1.0 if name == "prodigy" else 1e-2)
    parameters = weights()
    optimizer = make_optimizer(parameters, chosen)
    before = float((parameters[0] ** 2).sum().detach())
    for _ in range(20):
        loss = (parameters[0] ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float((parameters[0] ** 2).sum().detach()) < before


def test_arguments_reach_the_optimizer_and_lists_become_tuples() -> None:
    chosen = settings(optimizer_arguments={"weight_decay": 0.25, "betas": (0.8, 0.9)})
    group = make_optimizer(weights(), chosen).param_groups[0]
    assert (group["weight_decay"], tuple(group["betas"])) == (0.25, (0.8, 0.9))


def test_adafactors_eps_may_contain_null() -> None:
    for eps in ((None, 0.01), (1e-30, 0.01)):
        chosen = settings(optimizer="adafactor", optimizer_arguments={"eps": eps})
        optimizer = make_optimizer(parameters := weights(), chosen)
        assert optimizer.param_groups[0]["eps"] == eps
        parameters[0].sum().backward()
        optimizer.step()
        assert parameters[0].isfinite().all()


def test_an_import_path_works_and_its_arguments_are_checked() -> None:
    chosen = settings(optimizer="torch.optim.NAdam", optimizer_arguments={"momentum_decay": 0.01})
    assert isinstance(make_optimizer(weights(), chosen), torch.optim.NAdam)
    wrong = settings(optimizer="torch.optim.NAdam", optimizer_arguments={"momentum_decai": 0.01})
    with pytest.raises(TrainingError, match=r"(?s)not accept the argument momentum_decai.*momentum_decay"):
        make_optimizer(weights(), wrong)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.Optimizer", "cannot be imported"),
        ("torch.optim.Nothing", "does not define Nothing"),
        ("torch.nn.Linear", "must be a torch optimizer"),
    ],
)
def test_an_invalid_import_path_is_an_error_with_a_fix(path: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message) as excinfo:
        make_optimizer(weights(), settings(optimizer=path))
    assert excinfo.value.where == "training.optimizer"
    if "imported" in message:
        assert "`pip install no`" in excinfo.value.fix


def test_a_value_that_the_optimizer_does_not_accept_is_an_error_with_its_signature() -> None:
    with pytest.raises(TrainingError, match="does not accept these arguments") as excinfo:
        make_optimizer(weights(), settings(optimizer_arguments={"eps": -1.0}))
    assert "eps" in excinfo.value.fix


def rates(**values: Any) -> list[float]:
    """Return the learning rates of ten steps."""
    chosen = settings(steps=10, learning_rate=1.0, **values)
    optimizer = make_optimizer(weights(), chosen)
    schedule = make_lr_scheduler(optimizer, chosen)
    used_rates: list[float] = []
    for _ in range(10):
        used_rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return used_rates


def half_cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


def test_schedules_follow_their_formulas() -> None:
    linear = [max(0.0, (10 - step) / 8) for step in range(2, 10)]
    assert rates(lr_scheduler="linear", warmup_steps=2) == pytest.approx([0, 0.5, *linear])
    assert rates(lr_scheduler="cosine") == pytest.approx([half_cosine(step / 10) for step in range(10)])
    restarts = [half_cosine((2 * step / 10) % 1.0) for step in range(10)]
    assert rates(lr_scheduler="cosine_with_restarts", lr_cycles=2) == pytest.approx(restarts)
    power = [(1 - 1e-7) * (1 - step / 10) ** 2 + 1e-7 for step in range(10)]
    assert rates(lr_scheduler="polynomial", lr_power=2.0) == pytest.approx(power)
    decay = [1.0] * 6 + [half_cosine(step / 4) for step in range(4)]
    assert rates(lr_scheduler="wsd", decay_steps=4) == pytest.approx(decay)
    rising = [0.1 * 1000 ** (step / 9) for step in range(10)]
    assert rates(lr_scheduler="rising") == pytest.approx(rising)
    assert rates(optimizer="schedule_free") == rates(optimizer="schedule_free", warmup_steps=2) == [1.0] * 10


def test_schedule_free_warms_up_itself() -> None:
    group = make_optimizer(weights(), settings(optimizer="schedule_free", warmup_steps=3)).param_groups[0]
    assert group["warmup_steps"] == 3


class Refusing(torch.optim.SGD):
    """An optimizer that accepts arguments of any name, and refuses their values in one of several ways."""

    def __init__(self, params: Any, lr: float, **arguments: Any) -> None:
        for name, value in arguments.items():
            assert name == "kind", f"unknown argument {name}"
            raise {"type": TypeError, "value": ValueError}[value]("refused")
        super().__init__(params, lr=lr)


@pytest.mark.parametrize(
    "arguments",
    [{"kind": "type"}, {"kind": "value"}, {"other": 1}],
    ids=["TypeError", "ValueError", "assert"],
)
def test_an_optimizer_that_refuses_its_arguments_in_any_way_is_an_error_with_a_fix(
    arguments: dict[str, Any],
) -> None:
    path = f"{Refusing.__module__}.Refusing"
    assert isinstance(make_optimizer(weights(), settings(optimizer=path)), Refusing)
    with pytest.raises(TrainingError, match="Refusing does not accept these arguments") as excinfo:
        make_optimizer(weights(), settings(optimizer=path, optimizer_arguments=arguments))
    assert "its signature is" in excinfo.value.fix


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": "prodigy", "learning_rate": 1.0},
        {"optimizer": "lion", "optimizer_arguments": {"weight_decay": 0.1}},
        {"optimizer": "adafactor"},
        {"optimizer": "schedule_free", "warmup_steps": 2},
        {"ema_decay": 0.9},
        {"optimizer": "schedule_free", "ema_decay": 0.9},
        {"lr_scheduler": "wsd", "decay_steps": 3},
        {"lr_scheduler": "cosine_with_restarts", "lr_cycles": 2},
    ],
    ids=str,
)
def test_R01_an_interrupted_run_resumes_bit_for_bit_with_every_optimizer(
    make_project: Callable[..., Project], tmp_path: Path, training: dict[str, Any]
) -> None:
    job = make_project(steps=4, gradient_accumulation=1, **training).job()
    uninterrupted = engine_of(job)
    for step in range(4):
        one_step(uninterrupted, job, step)
        if step == 1:
            checkpoint = save_checkpoint(tmp_path / "checkpoints", job.run, uninterrupted.state(2))
    resumed = engine_of(job)
    resumed.restore(load_checkpoint(checkpoint, job.run))
    for step in (2, 3):
        with resumed.result_weights():
            averaged = adapter_state(resumed.denoiser)
        assert averaged, "evaluating the result between two steps leaves no trace"
        one_step(resumed, job, step)
    with uninterrupted.result_weights(), resumed.result_weights():
        left, right = adapter_state(uninterrupted.denoiser), adapter_state(resumed.denoiser)
    assert differing_tensors(left, right) == []
    left, right = adapter_state(uninterrupted.denoiser), adapter_state(resumed.denoiser)
    assert differing_tensors(left, right) == []


@pytest.mark.parametrize(
    ("device", "arguments", "scaled", "fused"),
    [
        ("cuda:0", {}, False, True),
        ("cuda:0", {"weight_decay": 0.1}, False, True),
        ("cpu", {}, False, False),
        ("cuda:0", {}, True, False),
        ("cuda:0", {"fused": False}, False, False),
        ("cuda:0", {"foreach": True}, False, False),
    ],
    ids=str,
)
def test_adamw_is_fused_on_cuda_unless_gradients_are_scaled_or_the_recipe_chooses(
    device: str, arguments: dict[str, Any], scaled: bool, fused: bool
) -> None:
    assert fuses_steps(torch.optim.AdamW, arguments, device=device, scaled=scaled) == fused
    assert not fuses_steps(torch.optim.SGD, arguments, device=device, scaled=scaled)


def test_a_fused_step_equals_an_unfused_one_up_to_rounding() -> None:
    """The CPU has a fused AdamW, too; a checkpoint of one resumes in the other."""
    plain, fused = weights(), weights()
    for parameters, chosen in ((plain, False), (fused, True)):
        own = settings(optimizer="torch.optim.AdamW", optimizer_arguments={"fused": chosen})
        optimizer = make_optimizer(parameters, own)
        for _ in range(5):
            (parameters[0] ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_adamw_on_a_gpu_is_fused() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, device="cuda"))]
    assert make_optimizer(parameters, settings(), device="cuda:0").param_groups[0]["fused"]
