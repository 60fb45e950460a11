"""The optimizers a recipe can name and their arguments; imports no torch.

Any other optimizer is given by its import path, such as `torch.optim.NAdam`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

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
