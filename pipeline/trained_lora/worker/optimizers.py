"""The optimizer and its learning-rate schedule, from the libraries."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from diffusers.optimization import get_scheduler
from transformers.optimization import get_wsd_schedule

from pipeline.errors import TrainingError
from pipeline.recipe.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR

    from pipeline.recipe import TrainingSettings

SCHEDULES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "polynomial": "polynomial",
}
"""A recipe's `lr_scheduler` and what diffusers calls it; each rises from zero over `warmup_steps` first."""


def make_optimizer(
    weights: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]], settings: TrainingSettings
) -> torch.optim.Optimizer:
    """The recipe's optimizer over the LoRA's weights, with its library's defaults where nothing is said.

    Args:
        weights: Parameters, or groups of them as torch has them: `params`, and `lr` if it is their own.
        settings: The kind, its arguments, and the learning rate where a group has none.

    Raises:
        TrainingError: Its package is missing, its import path leads nowhere, or it takes no such argument.
    """
    kind: Any = optimizer_class(settings)
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.optimizer_arguments.given().items()
    }
    if averages_itself(settings):
        arguments["warmup_steps"] = settings.warmup_steps
    try:
        optimizer = kind(weights, lr=settings.learning_rate, **arguments)
    except (TypeError, ValueError, AssertionError) as err:
        raise TrainingError(
            f"{kind.__name__} cannot be made with these arguments: {err}",
            where="training.optimizer_arguments",
            fix=f"it takes {inspect.signature(kind.__init__)}",
        ) from err
    if averages_itself(settings):
        optimizer.train()
    return optimizer


def optimizer_class(settings: TrainingSettings) -> type[torch.optim.Optimizer]:
    """The class that `training.optimizer` names, after its arguments' names are checked.

    Raises:
        TrainingError: As `make_optimizer`.
    """
    known = OPTIMIZERS.get(settings.optimizer)
    path = known.path if known else settings.optimizer
    module, _, name = path.rpartition(".")
    package = known.package if known and known.package else module.partition(".")[0]
    try:
        kind = getattr(import_module(module), name)
    except ImportError as err:
        fix = f"install it, for example by `pip install {package}`, or use another optimizer"
        raise TrainingError(f"{path} cannot be imported: {err}", where="training.optimizer", fix=fix) from err
    except AttributeError as err:
        fix = "use the import path of a class derived from torch.optim.Optimizer"
        raise TrainingError(f"{module} has no {name}", where="training.optimizer", fix=fix) from err
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        fix = "use the import path of a class derived from torch.optim.Optimizer"
        raise TrainingError(f"{path} is no optimizer", where="training.optimizer", fix=fix)
    _require_arguments(kind, settings)
    return kind


def averages_itself(settings: TrainingSettings) -> bool:
    """Whether the optimizer keeps the result beside the weights that it steps, as schedule-free does."""
    known = OPTIMIZERS.get(settings.optimizer)
    return known is not None and known.own_schedule


def _require_arguments(kind: type[torch.optim.Optimizer], settings: TrainingSettings) -> None:
    parameters = inspect.signature(kind.__init__).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    taken = sorted(set(parameters) - {"self", "params", "lr"})
    for name in settings.optimizer_arguments.given():
        if name not in taken:
            raise TrainingError(
                f"{kind.__name__} takes no argument {name}",
                where=f"training.optimizer_arguments.{name}",
                fix=f"it takes {', '.join(taken)}",
            )


def make_schedule(optimizer: torch.optim.Optimizer, settings: TrainingSettings) -> LambdaLR:
    """A schedule that is stepped once an optimizer step, whatever the number of processes.

    It is not given to accelerate, which would step it once a process and step (FAILURES R04).
    """
    if averages_itself(settings):  # it warms up by itself
        return get_scheduler("constant", optimizer=optimizer)
    if settings.lr_scheduler == "wsd":
        return get_wsd_schedule(
            optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_decay_steps=settings.decay_steps,
            num_training_steps=settings.num_steps,
        )
    return get_scheduler(
        SCHEDULES[settings.lr_scheduler],
        optimizer=optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.num_steps,
        num_cycles=settings.lr_cycles,
        power=settings.lr_power,
    )
