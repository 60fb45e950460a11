"""The optimizers a recipe can name and their arguments; imports no torch.

Any other optimizer is given by its import path, such as `torch.optim.NAdam`.
`pipeline/trained_lora/worker/optimizers.py` creates the optimizer.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pipeline.recipe.settings import Violation, one_of, reject


@dataclass(frozen=True)
class OptimizerClass:
    """Import path and arguments of an optimizer.

    Attributes:
        arguments: Arguments that `optimizer_arguments` may contain, with the library's defaults. The learning
            rate is not one of them.
        package: Package to install if the module is missing; None if Latentline depends on it.
        own_schedule: True if the optimizer averages its steps and needs a constant learning rate.
    """

    path: str
    arguments: Mapping[str, Any]
    package: str | None = None
    own_schedule: bool = False


OPTIMIZERS: dict[str, OptimizerClass] = {
    "adamw": OptimizerClass(
        "torch.optim.AdamW",
        {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False},
    ),
    # The defaults of bitsandbytes 0.50.2; where it is installed, a test compares them with its signature.
    "adamw8bit": OptimizerClass(
        "bitsandbytes.optim.AdamW8bit",
        {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "min_8bit_size": 4096},
        package="bitsandbytes",
    ),
    "adafactor": OptimizerClass(
        "torch.optim.Adafactor",
        {"beta2_decay": -0.8, "eps": (None, 0.001), "d": 1.0, "weight_decay": 0.0},
    ),
    "prodigy": OptimizerClass(
        "prodigyopt.Prodigy",
        {
            "betas": (0.9, 0.999),
            "beta3": None,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "decouple": True,
            "use_bias_correction": False,
            "safeguard_warmup": False,
            "d0": 1e-6,
            "d_coef": 1.0,
            "growth_rate": math.inf,
            "slice_p": 1,
        },
    ),
    "lion": OptimizerClass(
        "lion_pytorch.Lion",
        {"betas": (0.9, 0.99), "weight_decay": 0.0, "decoupled_weight_decay": False},
    ),
    "schedule_free": OptimizerClass(
        "schedulefree.AdamWScheduleFree",
        {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "r": 0.0, "weight_lr_power": 2.0},
        own_schedule=True,
    ),
}
"""Optimizers by their names in a recipe.

Papers: AdamW https://arxiv.org/abs/1711.05101, 8-bit https://arxiv.org/abs/2110.02861, Adafactor
https://arxiv.org/abs/1804.04235, Prodigy https://arxiv.org/abs/2306.06101, Lion
https://arxiv.org/abs/2302.06675, schedule-free https://arxiv.org/abs/2405.15682.
"""

_POWER_OF_TEN = re.compile(r"[+-]?\d+[eE][+-]?\d+")
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


def check_argument(value: Any) -> Any:
    """Return `value` if an optimizer's argument may have its type, a list as a tuple."""
    # Pydantic alone would report one mistake for each of the accepted types.
    if isinstance(value, list | tuple):
        items = tuple(cast("list[Any]", value))
        if all(_is_number(item) or item is None for item in items):
            return items
    elif _is_number(value) or value is None or isinstance(value, bool | str):
        return value
    return reject(
        f"the argument must be a number, true, false, text, null or a list of numbers, got "
        f"{json.dumps(value, default=str)}",
        "write a finite number, or a list such as [0.9, 0.999]",
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def argument_violations(optimizer: str, arguments: Mapping[str, Any]) -> list[Violation]:
    """Return a violation for each argument or list of numbers that the optimizer does not accept.

    The arguments of an import path are checked when training starts.
    """
    accepted = OPTIMIZERS[optimizer].arguments if optimizer in OPTIMIZERS else None
    violations: list[Violation] = []
    for name, value in arguments.items():
        key = f"optimizer_arguments.{name}"
        if name == "lr":
            what = "optimizer_arguments must not contain lr"
            violations.append(Violation(key, what, "set training.learning_rate"))
        elif accepted is not None and name not in accepted:
            close = difflib.get_close_matches(name, accepted, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            what = f"{optimizer} does not accept the argument {name}"
            violations.append(Violation(key, what, f"{hint}use {one_of(accepted)}"))
        elif accepted is not None:
            violations += _value_violations(key, value, accepted[name])
    return violations


def _value_violations(key: str, value: Any, default: Any) -> Iterator[Violation]:
    # A value must have the kind of the library's default: a list has its length, and null is valid only where
    # the default is null.
    if isinstance(default, tuple):
        required = f"a list of {len(default)} numbers"
        required += ", and the first may be null" if default[0] is None else ""
        is_list = isinstance(value, tuple) and len(value) == len(default)
        is_valid = is_list and all(
            each is not None or other is None for each, other in zip(value, default, strict=True)
        )
    elif isinstance(default, bool):
        required, is_valid = "true or false", isinstance(value, bool)
    else:
        required = "a number or null" if default is None else "a number"
        is_valid = _is_number(value) or (value is None and default is None)

    if not is_valid:
        # YAML 1.1 reads 1e-8 as text, because it has no decimal point.
        is_power = isinstance(value, str) and _POWER_OF_TEN.fullmatch(value) is not None
        example = str(value).lower().replace("e", ".0e") if is_power else json.dumps(default)
        what = f"{key} must be {required}, got {json.dumps(value)}"
        yield Violation(key, what, f"write {key.rpartition('.')[2]}: {example}")
