from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pipeline.recipe import TrainingSettings
from pipeline.trained_lora.worker.ema import AveragedWeights
from pipeline.trained_lora.worker.optimizers import make_optimizer


def setting_of(**values: Any) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, AveragedWeights]:
    settings = TrainingSettings(learning_rate=0.1, **values)
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 6))]
    optimizer = make_optimizer(weights, settings)
    return weights, optimizer, AveragedWeights(weights, optimizer, settings)


def train(
    weights: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    averaging: AveragedWeights,
    steps: int,
) -> list[torch.Tensor]:
    history = [weights[0].detach().clone()]
    for step in range(steps):
        ((weights[0] - step) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaging.update()
        history.append(weights[0].detach().clone())
    return history


def test_the_moving_average_follows_its_formula() -> None:
    weights, optimizer, averaging = setting_of(ema_decay=0.3)
    history = train(weights, optimizer, averaging, 6)
    shadow = history[0]
    for step, weight in enumerate(history[1:]):
        decay = 0.0 if step == 0 else min(0.3, (1 + step) / (10 + step))
        shadow = decay * shadow + (1 - decay) * weight
    with averaging.applied():
        torch.testing.assert_close(weights[0].data, shadow)
    assert torch.equal(weights[0].data, history[-1])


class Names(TorchFunctionMode):
    """Record the names of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_average_of_many_weights_is_updated_at_once_except_on_a_cpu(device: str) -> None:
    """The meta device stands in for a GPU."""
    weights = [torch.nn.Parameter(torch.zeros(4, device=device)) for _ in range(3)]
    settings = TrainingSettings(ema_decay=0.5)
    averaging = AveragedWeights(weights, torch.optim.SGD(weights), settings)
    with Names() as recorded:
        averaging.update()
    assert ("_foreach_sub_" in recorded.names) == (device == "meta")


@pytest.mark.parametrize("values", [{"ema_decay": 0.9}, {"optimizer": "schedule_free"}], ids=str)
def test_applying_the_average_restores_the_weights_even_after_a_failure(values: dict[str, Any]) -> None:
    weights, optimizer, averaging = setting_of(**values)
    history = train(weights, optimizer, averaging, 4)

    def fail_inside() -> None:
        with averaging.applied():
            assert not torch.equal(weights[0].data, history[-1])
            raise RuntimeError("inside the context")

    with pytest.raises(RuntimeError, match="inside the context"):
        fail_inside()
    assert torch.equal(weights[0].data, history[-1])
    others, other_optimizer, other = setting_of(**values)
    train(others, other_optimizer, other, 4)
    for _ in range(2):
        for one, its_optimizer in ((weights, optimizer), (others, other_optimizer)):
            (one[0] ** 2).sum().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert torch.equal(weights[0].data, others[0].data)


def test_without_an_average_the_weights_stay_unchanged() -> None:
    weights, optimizer, averaging = setting_of()
    history = train(weights, optimizer, averaging, 2)
    with averaging.applied():
        assert torch.equal(weights[0].data, history[-1])
    assert averaging.state() == {}


def test_a_restored_average_continues_as_the_saved_one() -> None:
    weights, optimizer, averaging = setting_of(ema_decay=0.9)
    train(weights, optimizer, averaging, 3)
    others, other_optimizer, other = setting_of(ema_decay=0.9)
    with torch.no_grad():
        others[0].copy_(weights[0])
    other.restore(averaging.state())
    for one, its_optimizer, its_average in (
        (weights, optimizer, averaging),
        (others, other_optimizer, other),
    ):
        its_optimizer.state.clear()
        train(one, its_optimizer, its_average, 2)
    with averaging.applied(), other.applied():
        assert torch.equal(weights[0], others[0])


def test_an_average_that_was_saved_on_another_device_is_restored_on_that_of_the_weights() -> None:
    """The meta device stands in for a GPU."""
    _, _, saved = setting_of(ema_decay=0.5)
    weights = [torch.nn.Parameter(torch.zeros(6, device="meta"))]
    averaging = AveragedWeights(weights, torch.optim.SGD(weights), TrainingSettings(ema_decay=0.5))
    averaging.restore(saved.state())
    (shadow,) = averaging.state()["ema"]["shadow_params"]
    assert shadow.device == weights[0].device


def test_without_an_average_nothing_is_restored_or_updated() -> None:
    weights, _, averaging = setting_of()
    averaging.update()
    averaging.restore({})
    assert torch.equal(weights[0].data, torch.linspace(-1, 1, 6))
