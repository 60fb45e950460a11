"""The options `--run` and `--step`, which choose LoRAs of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.errors import DrawingError

if TYPE_CHECKING:
    from pipeline.trained_lora.pictures.choice import Steps

Command = TypeVar("Command", bound=Callable[..., Any])


def step_options(*, run: str, steps: str) -> Callable[[Command], Command]:
    """Add `--run` and `--step` to a command, as its parameters `run` and `steps`, with these help texts."""

    def decorate(command: Command) -> Command:
        add_steps = click.option(
            "--step",
            "steps",
            multiple=True,
            metavar="N[,N...]|all",
            callback=lambda _ctx, _option, values: parse_steps(values),
            help=steps,
        )
        add_run = click.option("--run", help=f"{run}: a folder name in runs/. By default the run of lora/.")
        return add_run(add_steps(command))

    return decorate


def parse_steps(values: Iterable[str]) -> Steps:
    """Return the steps of repeated or comma-separated options, without repetitions."""
    texts = comma_separated(values)
    if "all" in texts:
        return "all"
    for text in texts:
        # `isdecimal` alone accepts the digits of other scripts.
        if not (text.isascii() and text.isdecimal() and int(text) > 0):
            raise DrawingError(
                f"a step must be a positive integer or all, got {text!r}",
                where="--step",
                fix="pass steps such as --step 250,500, or --step all",
            )
    return tuple(dict.fromkeys(map(int, texts)))


def comma_separated(values: Iterable[str]) -> list[str]:
    """Return the parts of repeated or comma-separated options."""
    return [text.strip() for value in values for text in value.split(",")]
