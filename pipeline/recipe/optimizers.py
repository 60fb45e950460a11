"""The optimizers a recipe can name, their arguments, and the learning rate schedule; imports no torch.

Any other optimizer is given by its import path, such as `torch.optim.NAdam`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pipeline.recipe.settings import Violation, one_of, reject


@dataclass(frozen=True)
class OptimizerClass:
    """Import path and arguments of an optimizer.

    Attributes:
        path: Module and class.
        arguments: Names that `optimizer_arguments` may contain, without the learning rate.
        package: Package to install if the module is missing; None if Latentline depends on it.
        own_schedule: True if the optimizer averages its steps and needs a constant learning rate.
    """

    path: str
    arguments: tuple[str, ...]
    package: str | None = None
    own_schedule: bool = False


OPTIMIZERS: dict[str, OptimizerClass] = {
    "adamw": OptimizerClass("torch.optim.AdamW", ("betas", "eps", "weight_decay", "amsgrad")),
    "adamw8bit": OptimizerClass(
        "bitsandbytes.optim.AdamW8bit",
        ("betas", "eps", "weight_decay", "min_8bit_size"),
        package="bitsandbytes",
    ),
    "adafactor": OptimizerClass("torch.optim.Adafactor", ("beta2_decay", "eps", "d", "weight_decay")),
    "prodigy": OptimizerClass(
        "prodigyopt.Prodigy",
        (
            *("betas", "beta3", "eps", "weight_decay", "decouple", "use_bias_correction"),
            *("safeguard_warmup", "d0", "d_coef", "growth_rate", "slice_p"),
        ),
    ),
    "lion": OptimizerClass("lion_pytorch.Lion", ("betas", "weight_decay", "decoupled_weight_decay")),
    "schedule_free": OptimizerClass(
        "schedulefree.AdamWScheduleFree",
        ("betas", "eps", "weight_decay", "r", "weight_lr_power"),
        own_schedule=True,
    ),
}
"""Optimizers by their names in a recipe.

Papers: AdamW https://arxiv.org/abs/1711.05101, 8-bit https://arxiv.org/abs/2110.02861, Adafactor
https://arxiv.org/abs/1804.04235, Prodigy https://arxiv.org/abs/2306.06101, Lion
https://arxiv.org/abs/2302.06675, schedule-free https://arxiv.org/abs/2405.15682.
"""

POLYNOMIAL_END = 1e-7
"""Final learning rate of the polynomial schedule."""


class Schedule(Protocol):
    """Settings of `training` that define the learning rate schedule."""

    @property
    def optimizer(self) -> str: ...  # noqa: D102 - described in TrainingSettings, like all of these
    @property
    def learning_rate(self) -> float: ...  # noqa: D102
    @property
    def lr_scheduler(self) -> str: ...  # noqa: D102
    @property
    def lr_cycles(self) -> int: ...  # noqa: D102
    @property
    def lr_power(self) -> float: ...  # noqa: D102
    @property
    def decay_steps(self) -> int: ...  # noqa: D102
    @property
    def warmup_steps(self) -> int: ...  # noqa: D102
    @property
    def epochs(self) -> int | None: ...  # noqa: D102
    @property
    def num_steps(self) -> int: ...  # noqa: D102


_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def check_optimizer(value: str) -> str:
    """Return `value` if it is a name in `OPTIMIZERS` or has the form of an import path."""
    if value in OPTIMIZERS or _IMPORT_PATH.fullmatch(value):
        return value
    close = difflib.get_close_matches(value, OPTIMIZERS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return reject(
        f'training.optimizer must be a supported name or an import path, got "{value}"',
        f"{hint}use {one_of(OPTIMIZERS)}, or an import path such as torch.optim.NAdam",
    )


def argument_violations(optimizer: str, arguments: Iterable[str]) -> list[Violation]:
    """Return a violation for each argument that the optimizer does not accept.

    The arguments of an import path are checked when training starts.
    """
    accepted = OPTIMIZERS[optimizer].arguments if optimizer in OPTIMIZERS else None
    violations: list[Violation] = []
    for name in arguments:
        key = f"optimizer_arguments.{name}"
        if name == "lr":
            what = "optimizer_arguments must not contain lr"
            violations.append(Violation(key, what, "set training.learning_rate"))
        elif accepted is not None and name not in accepted:
            close = difflib.get_close_matches(name, accepted, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            what = f"{optimizer} does not accept the argument {name}"
            violations.append(Violation(key, what, f"{hint}its arguments are {', '.join(accepted)}"))
    return violations


def schedule_violations(settings: Schedule) -> list[Violation]:
    """Return all contradictions in the learning rate schedule."""
    kind = settings.lr_scheduler
    violations: list[Violation] = []

    optimizer = OPTIMIZERS.get(settings.optimizer)
    if optimizer is not None and optimizer.own_schedule and kind != "constant":
        what = f"{settings.optimizer} averages its steps and needs lr_scheduler: constant, got {kind}"
        violations.append(
            Violation("lr_scheduler", what, "set lr_scheduler: constant; warmup_steps is still used")
        )

    for key, default, scheduler in (
        ("lr_cycles", 1, "cosine_with_restarts"),
        ("lr_power", 1.0, "polynomial"),
        ("decay_steps", 0, "wsd"),
    ):
        value = getattr(settings, key)
        if value != default and kind != scheduler:
            what = f"{key} requires lr_scheduler: {scheduler}, got lr_scheduler: {kind}"
            violations.append(Violation(key, what, f"remove {key}, or set lr_scheduler: {scheduler}"))

    if kind == "wsd":
        violations += _decay_violations(settings)
    if kind == "polynomial" and settings.learning_rate <= POLYNOMIAL_END:
        what = f"training.learning_rate must be greater than {POLYNOMIAL_END}, the final rate of "
        what += f"lr_scheduler: polynomial, got {settings.learning_rate}"
        violations.append(Violation("learning_rate", what, "raise it, or use another lr_scheduler"))
    return violations


def _decay_violations(settings: Schedule) -> list[Violation]:
    if settings.decay_steps == 0:
        what = "lr_scheduler: wsd needs decay_steps, the number of steps in which the rate decays to zero"
        return [Violation("decay_steps", what, "set it, for example to a fifth of the steps")]
    # The number of steps of a recipe with epochs is known only when the dataset has been counted.
    if settings.epochs is not None:
        return []
    most = settings.num_steps - settings.warmup_steps
    if settings.decay_steps > most:
        what = (
            f"training.decay_steps must be at most the {most} steps after warm-up, got {settings.decay_steps}"
        )
        return [Violation("decay_steps", what, f"use at most {most}")]
    return []
