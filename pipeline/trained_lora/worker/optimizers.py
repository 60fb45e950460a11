"""The optimizer and the learning-rate schedule, both taken from libraries."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from diffusers.optimization import get_scheduler
from transformers.optimization import get_wsd_schedule

from pipeline.errors import TrainingError
from pipeline.recipe.optimizer_classes import OPTIMIZERS

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR

    from pipeline.recipe import TrainingSettings


def make_optimizer(
    weights: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
    settings: TrainingSettings,
    *,
    device: str = "cpu",
    scaled: bool = False,
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer; arguments that the recipe omits keep their library's defaults.

    Args:
        weights: Parameters, or torch's parameter groups with `params` and an optional `lr`.
        settings: Optimizer and its arguments.
        device: Device of the weights.
        scaled: Whether fp16's gradient scaler steps the optimizer.

    Raises:
        TrainingError: The package or class does not exist, or the class does not accept the arguments.
    """
    optimizer_type: Any = optimizer_class(settings)
    arguments: dict[str, Any] = {
        # YAML has no tuples, and some optimizers require them for betas.
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.optimizer_arguments.given().items()
    }
    if averages_weights(settings):
        arguments["warmup_steps"] = settings.warmup_steps
    if fuses_steps(optimizer_type, arguments, device=device, scaled=scaled):
        arguments["fused"] = True

    try:
        optimizer = optimizer_type(weights, lr=settings.learning_rate, **arguments)
    except (TypeError, ValueError, AssertionError) as err:
        raise TrainingError(
            f"{optimizer_type.__name__} does not accept these arguments: {err}",
            where="training.optimizer_arguments",
            fix=f"its signature is {inspect.signature(optimizer_type.__init__)}",
        ) from err

    if averages_weights(settings):
        optimizer.train()
    return optimizer


def fuses_steps(
    optimizer_type: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    *,
    device: str,
    scaled: bool,
) -> bool:
    """Return whether the optimizer should be AdamW's fused implementation, which needs fewer CUDA kernels.

    With fp16, it should not: accelerate could not detect the steps that the gradient scaler skips, because a
    fused optimizer skips them itself.

    Args:
        optimizer_type: Class of the optimizer.
        arguments: Arguments from the recipe. One that chooses an implementation has precedence.
        device: Device of the weights, such as "cuda:0".
        scaled: Whether a gradient scaler is used, as with fp16.
    """
    chosen = {"fused", "foreach", "differentiable"} & arguments.keys()
    return optimizer_type is torch.optim.AdamW and device.startswith("cuda") and not scaled and not chosen


def optimizer_class(settings: TrainingSettings) -> type[torch.optim.Optimizer]:
    """Return the class that `training.optimizer` names, and check the names of its arguments.

    Raises:
        TrainingError: See `make_optimizer`.
    """
    named = OPTIMIZERS.get(settings.optimizer)
    path = named.path if named else settings.optimizer
    module, _, name = path.rpartition(".")
    package = named.package if named and named.package else module.partition(".")[0]
    where, fix = "training.optimizer", "use the import path of a subclass of torch.optim.Optimizer"
    try:
        optimizer_type = getattr(import_module(module), name)
    except ImportError as err:
        install = f"install it, for example with `pip install {package}`, or use another optimizer"
        raise TrainingError(f"{path} cannot be imported: {err}", where=where, fix=install) from err
    except AttributeError as err:
        raise TrainingError(f"{module} does not define {name}", where=where, fix=fix) from err

    if not (isinstance(optimizer_type, type) and issubclass(optimizer_type, torch.optim.Optimizer)):
        raise TrainingError(f"{path} must be a torch optimizer", where=where, fix=fix)
    _require_arguments(optimizer_type, settings)
    return optimizer_type


def averages_weights(settings: TrainingSettings) -> bool:
    """Return whether the optimizer averages the weights itself, as schedule-free does."""
    named = OPTIMIZERS.get(settings.optimizer)
    return named is not None and named.own_schedule


def _require_arguments(optimizer_type: type[torch.optim.Optimizer], settings: TrainingSettings) -> None:
    parameters = inspect.signature(optimizer_type.__init__).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    accepted = sorted(set(parameters) - {"self", "params", "lr"})
    for name in settings.optimizer_arguments.given():
        if name not in accepted:
            raise TrainingError(
                f"{optimizer_type.__name__} does not accept the argument {name}",
                where=f"training.optimizer_arguments.{name}",
                fix=f"it accepts {', '.join(accepted)}",
            )


def make_schedule(optimizer: torch.optim.Optimizer, settings: TrainingSettings) -> LambdaLR:
    """Return the learning-rate schedule; step it once per optimizer step.

    Do not pass it to `Accelerator.prepare`, which would step it once per process (FAILURES R04).
    """
    if averages_weights(settings):  # such an optimizer includes the warm-up
        return get_scheduler("constant", optimizer=optimizer)
    if settings.lr_scheduler == "wsd":
        return get_wsd_schedule(
            optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_decay_steps=settings.decay_steps,
            num_training_steps=settings.num_steps,
        )
    # Except for this one, diffusers' schedules have the recipe's names. All begin with a linear warm-up.
    is_constant = settings.lr_scheduler == "constant"
    return get_scheduler(
        "constant_with_warmup" if is_constant else settings.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.num_steps,
        num_cycles=settings.lr_cycles,
        power=settings.lr_power,
    )
