"""The trained weights in groups, their optimizer, its learning-rate scheduler, and updates on a GPU."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusers.optimization import get_scheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import get_wsd_schedule

from pipeline.errors import TrainingError
from pipeline.processes.worker.imports import import_hidden
from pipeline.recipe.optimizer_classes import OPTIMIZERS
from pipeline.recipe.training import RISE

if TYPE_CHECKING:
    from pipeline.recipe import TrainingSettings
    from pipeline.trained_lora.worker.adapter.lora import Networks

_ADAPTER_WEIGHT = re.compile(r"\.(lora|hada|lokr|oft)_")
"""Where the path of a module ends in the name of one of its adapter's weights."""

_UP_MATRIX = ".lora_B."


def weight_groups(networks: Networks, settings: TrainingSettings) -> list[dict[str, Any]]:
    """Return torch's parameter groups: first for the denoiser, then for the text encoders.

    In both, the weights without a learning rate of their own come first. Groups of `training.learning_rate`
    have no `lr`.
    """
    text = settings.lora.text_encoders
    text_networks = [network for prefix, network in networks.items() if prefix]
    return [
        *_groups([networks[""]], settings, None, is_text=False),
        *_groups(text_networks, settings, text and text.learning_rate, is_text=True),
    ]


def _groups(
    networks: list[nn.Module], settings: TrainingSettings, default: float | None, *, is_text: bool
) -> Iterator[dict[str, Any]]:
    """Yield the groups of some networks; None stands for `training.learning_rate`."""
    # The default's group comes first, because optimizer states refer to groups by their place.
    weights: dict[float | None, list[nn.Parameter]] = {default: []}
    for network in networks:
        for name, weight in network.named_parameters():
            if weight.requires_grad:
                module = _ADAPTER_WEIGHT.split(name)[0]
                own_rate = None if is_text else settings.lora.learning_rate_of(module)
                rate = default if own_rate is None else own_rate
                if settings.lora.loraplus_ratio is not None and _UP_MATRIX in name:
                    rate = (rate or settings.learning_rate) * settings.lora.loraplus_ratio
                weights.setdefault(rate, []).append(weight)
    for rate, group in weights.items():
        if group:
            yield {"params": group} if rate is None else {"params": group, "lr": rate}


def make_optimizer(
    weights: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
    settings: TrainingSettings,
    *,
    device: str = "cpu",
    scaled: bool = False,
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer; arguments that the recipe omits keep their library's defaults.

    `weights` are parameters, or torch's parameter groups with `params` and an optional `lr`. `scaled` means
    that fp16's gradient scaler steps the optimizer.

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

    An argument of the recipe that chooses an implementation has precedence.
    """
    chosen = {"fused", "foreach", "differentiable"} & arguments.keys()

    # With fp16, accelerate could not detect the steps that the gradient scaler skips, because a fused
    # optimizer skips them itself.
    return optimizer_type is torch.optim.AdamW and device.startswith("cuda") and not scaled and not chosen


def optimizer_class(settings: TrainingSettings) -> type[torch.optim.Optimizer]:
    """Return the class that `training.optimizer` names, and check the names of its arguments."""
    named = OPTIMIZERS.get(settings.optimizer)
    path = named.path if named else settings.optimizer
    module, _, name = path.rpartition(".")
    package = named.package if named and named.package else module.partition(".")[0]
    where, fix = "training.optimizer", "use the import path of a subclass of torch.optim.Optimizer"
    try:
        optimizer_type = getattr(import_hidden(module), name)
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

    # Arguments that the class passes on are checked by its constructor.
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


def make_lr_scheduler(optimizer: torch.optim.Optimizer, settings: TrainingSettings) -> LambdaLR:
    """Return the learning-rate schedule; step it once per optimizer step."""
    if averages_weights(settings):  # such an optimizer includes the warm-up
        return get_scheduler("constant", optimizer=optimizer)
    if settings.lr_scheduler == "wsd":
        return get_wsd_schedule(
            optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_decay_steps=settings.decay_steps,
            num_training_steps=settings.num_steps,
        )

    if settings.lr_scheduler == "rising":
        (low, high), last = RISE, max(1, settings.num_steps - 1)
        return LambdaLR(optimizer, lambda step: low * (high / low) ** min(1.0, step / last))

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


class UpdateOnDevice:
    """Updates of a fused optimizer; the first step that is not finite and all later ones change nothing.

    If the host checked the numbers before each update, the GPU would have no work until the host has read
    them, started the optimizer and begun the next forward pass. Here the host queues the update and the next
    step at once, and reads the numbers later:

        host   step 0 | step 1 | read 0 | step 2     | read 1 | ...
        GPU           | step 0          | step 1              | step 2 ...
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]) -> None:
        """Update `weights` by `optimizer`: torch's own, not accelerate's wrapper."""
        self._optimizer = optimizer
        self._weights = weights
        device = weights[0].device

        # The scaler gives a fused optimizer a flag on the device that makes it skip the update of its weights
        # and its state. With the scale 1 the gradients stay as they are.
        self._scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
        self._scaler.scale(torch.zeros((), device=device))  # the scaler creates its state in the first call
        self._are_finite = torch.ones((), dtype=torch.bool, device=device)

    def step(self, is_finite: Tensor) -> Tensor:
        """Queue an update, which takes place if `is_finite`, a boolean scalar, holds for all steps so far.

        Returns whether it takes place, a boolean scalar on the device.
        """
        self._are_finite &= is_finite

        # The scaler looks for gradients that are not finite; one is enough to skip the update of all weights.
        # A layer that the model does not use has no gradient.
        gradient = next(weight.grad for weight in self._weights if weight.grad is not None)

        # NaN in one gradient is the signal to skip; 1.0 leaves finite steps bit for bit as they are.
        gradient.mul_(torch.where(self._are_finite, 1.0, math.nan))
        self._scaler.step(self._optimizer)
        self._scaler.update(1.0)
        return self._are_finite

    def reset(self) -> None:
        """Update again after a step that was not finite; call it once the state before is restored."""
        self._are_finite.fill_(True)


def update_on_device(
    optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]
) -> UpdateOnDevice | None:
    """Return the updates if the device can check them (see `can_skip_updates`), otherwise None."""
    can_skip = can_skip_updates(optimizer, device=weights[0].device)
    return UpdateOnDevice(optimizer, weights) if can_skip else None


def can_skip_updates(optimizer: torch.optim.Optimizer, *, device: torch.device) -> bool:
    """Return whether a GPU can check updates, which needs torch's fused AdamW."""
    # Other optimizers, such as bitsandbytes' 8-bit ones, Lion and Prodigy, have no flag on the device that
    # makes them skip a step. Copies of their weights and state, to undo it, would take the memory that some
    # of them save. On a CPU nothing is gained.
    is_fused = isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults["fused"])
    return is_fused and device.type == "cuda"
