"""The optimizers that a recipe can name, and the arguments each takes; imports no torch.

Any other optimizer is named by its import path, such as `torch.optim.NAdam`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pipeline.recipe.rules import Broken, one_of, reject


@dataclass(frozen=True)
class OptimizerClass:
    """Where an optimizer lies.

    Attributes:
        path: Module and class.
        arguments: What `optimizer_arguments` may hold, beside the learning rate.
        package: What to install when the module is missing; None where it comes with Latentline.
        own_schedule: It averages its steps itself, and wants a constant learning rate.
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
"""By their names in a recipe. The papers: AdamW https://arxiv.org/abs/1711.05101, 8-bit
https://arxiv.org/abs/2110.02861, Adafactor https://arxiv.org/abs/1804.04235, Prodigy
https://arxiv.org/abs/2306.06101, Lion https://arxiv.org/abs/2302.06675, schedule-free
https://arxiv.org/abs/2405.15682."""

POLYNOMIAL_END = 1e-7
"""The learning rate that the polynomial schedule ends at."""


class Schedule(Protocol):
    """The settings of training that decide the learning rate's course."""

    @property
    def optimizer(self) -> str: ...  # noqa: D102 - as in the recipe
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
    """`value` if it is a name of `OPTIMIZERS`, or looks like an import path."""
    if value in OPTIMIZERS or _IMPORT_PATH.fullmatch(value):
        return value
    close = difflib.get_close_matches(value, OPTIMIZERS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return reject(
        f"optimizer is the text {json.dumps(value)}, which is none of them",
        f"{hint}use {one_of(OPTIMIZERS)}, or an import path such as torch.optim.NAdam",
    )


def unknown_arguments(optimizer: str, arguments: Iterable[str]) -> list[Broken]:
    """The arguments that a named optimizer does not take; training looks at those of an import path."""
    if optimizer not in OPTIMIZERS:
        return [_given_elsewhere(name) for name in arguments if name == "lr"]
    known = OPTIMIZERS[optimizer].arguments
    broken: list[Broken] = []
    for name in arguments:
        if name == "lr":
            broken.append(_given_elsewhere(name))
        elif name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            what = f"{optimizer} takes no argument {name}"
            broken.append(Broken(f"optimizer_arguments.{name}", what, f"{hint}it takes {', '.join(known)}"))
    return broken


def _given_elsewhere(name: str) -> Broken:
    what = f"{name} is the learning rate, which has a key of its own"
    return Broken(f"optimizer_arguments.{name}", what, "set training.learning_rate")


def broken_schedule(settings: Schedule) -> list[Broken]:
    """What contradicts itself in the course of the learning rate."""
    kind = settings.lr_scheduler
    broken: list[Broken] = []
    known = OPTIMIZERS.get(settings.optimizer)
    if known is not None and known.own_schedule and kind != "constant":
        what = f"{settings.optimizer} averages its steps instead of lowering the learning rate as {kind} does"
        broken.append(Broken("lr_scheduler", what, "set lr_scheduler: constant; warmup_steps is heeded"))
    for key, default, owner in (
        ("lr_cycles", 1, "cosine_with_restarts"),
        ("lr_power", 1.0, "polynomial"),
        ("decay_steps", 0, "wsd"),
    ):
        value = getattr(settings, key)
        if value != default and kind != owner:
            fix = f"remove {key}, or set lr_scheduler: {owner}"
            broken.append(Broken(key, f"{key} {value} has no effect with lr_scheduler: {kind}", fix))
    if kind == "wsd":
        broken += _broken_decay(settings)
    if kind == "polynomial" and settings.learning_rate <= POLYNOMIAL_END:
        what = f"learning_rate {settings.learning_rate} is not above {POLYNOMIAL_END}, where polynomial ends"
        broken.append(Broken("learning_rate", what, "raise it, or use another lr_scheduler"))
    return broken


def _broken_decay(settings: Schedule) -> list[Broken]:
    if settings.decay_steps == 0:
        what = "lr_scheduler wsd needs decay_steps: the last steps, in which the learning rate goes down"
        return [Broken("decay_steps", what, "set it, for example to a fifth of the steps")]
    if settings.epochs is not None:
        return []
    most = settings.num_steps - settings.warmup_steps
    if settings.decay_steps > most:
        what = f"decay_steps {settings.decay_steps} is more than the {most} steps after warm-up"
        return [Broken("decay_steps", what, f"use at most {most}")]
    return []
