"""Entry point of the command `latentline`.

Exit statuses: 0 success; 1 a `LatentlineError` or file access error; 2 wrong usage. See docs/scripting.md.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from importlib import import_module
from typing import Any, NoReturn

import click

from pipeline.cli.json_output import (
    Outcome,
    add_json_option,
    printed_errors,
    record_error,
    recorded_usage_errors,
)
from pipeline.errors import LatentlineError
from pipeline.escaping import printable_lines, without_secrets
from pipeline.reporting.colours import coloured
from pipeline.reporting.terminal import find_terminal

DEPLOYMENT_VARIABLE = "LATENTLINE_DEPLOYMENT"
"""See pipeline/recipe/deployment.py, which is imported only if the variable is set."""

COMMANDS = {
    "init": "pipeline.cli.init",
    "new": "pipeline.cli.new",
    "validate": "pipeline.cli.validate",
    "fit-buckets": "pipeline.cli.fit_buckets",
    "plan": "pipeline.cli.plan",
    "run": "pipeline.cli.run",
    "ui": "pipeline.cli.ui",
    "explain": "pipeline.cli.explain",
    "edit-caption": "pipeline.cli.edit_caption",
    "verify": "pipeline.cli.verify",
    "caption": "pipeline.cli.caption",
    "pack": "pipeline.cli.pack",
    "gc": "pipeline.cli.gc",
    "sample": "pipeline.cli.sample",
    "compare": "pipeline.cli.compare",
    "diagnose": "pipeline.cli.diagnose",
    "evaluate": "pipeline.cli.evaluate",
    "sweep": "pipeline.cli.sweep",
    "export": "pipeline.cli.export",
    "upload": "pipeline.cli.upload",
    "provenance": "pipeline.cli.provenance",
    "lora": "pipeline.cli.lora",
    "convert-checkpoint": "pipeline.cli.convert_checkpoint",
    "encode": "pipeline.cli.encode",
    "train": "pipeline.cli.train",
}
"""Subcommand to module, which has a `click.Command` named `command`; in the order of `latentline --help`."""


class _Commands(click.Group):
    """Group that imports a subcommand on first use, so that no command waits for another's libraries."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = import_module(module).command
        add_json_option(command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with recorded_usage_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with recorded_usage_errors(ctx):
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in COMMANDS or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        closest = difflib.get_close_matches(args[0], COMMANDS, n=1)
        hint = f"Did you mean {closest[0]}?" if closest else f"Use one of {', '.join(COMMANDS)}."
        raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="latentline")
def latentline() -> None:
    """Train diffusion LoRAs that are declared by recipes.

    A recipe is a YAML file with the settings of the dataset, the base model and the training. Where a command
    takes a RECIPE, pass its name, such as flowers for configs/flowers.yaml, or the path of the file.
    LATENTLINE_CONFIGS names a folder to use instead of configs/.

    To start, use new, validate, plan and run, in this order. Without a checkout, use init before them.
    """
    # Every command reports a broken deployment file, even a command that does not need it.
    if os.environ.get(DEPLOYMENT_VARIABLE):
        from pipeline.recipe.deployment import load_deployment

        load_deployment()


def main() -> None:
    """Run the command line and exit."""
    # `RecipeArgument` stores the recipe's name here, and it replaces `<recipe>` in error messages.
    outcome = dict[str, Any]()
    _open_closed_streams()
    find_terminal()
    with printed_errors(sys.argv[1:], outcome):
        _run(outcome)


def _run(outcome: Outcome) -> None:
    try:
        latentline(prog_name="latentline", obj=outcome)
    except LatentlineError as error:
        _exit_with(error, outcome)
    except Exception as error:
        from pipeline.storage.os_errors import as_file_access_error, os_error_number

        # Only errors with a number come from the operating system; Polars and safetensors have own classes
        # for them. For any other, the traceback helps.
        is_of_system = isinstance(error, OSError) or os_error_number(error) is not None
        access_error = as_file_access_error(error) if is_of_system else None
        if access_error is None:
            # A bug. The message may quote a name or a caption, which Python would print as it is.
            click.echo(printable_lines(without_secrets(traceback.format_exc())), err=True, nl=False)
            record_error(error, outcome)
            sys.exit(1)
        _exit_with(access_error, outcome)


def _open_closed_streams() -> None:
    """Connect standard streams that are closed, as by `>&-`, to the null device."""
    # Otherwise the next file that any library opens, such as a database, gets the number of the stream, and
    # what a child process prints is written into this file.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDWR) == number:
            os.set_inheritable(number, True)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _exit_with(error: LatentlineError, outcome: Outcome) -> NoReturn:
    record_error(error, outcome)
    text = error.text().replace("<recipe>", outcome.get("recipe", "<recipe>"))
    click.echo(coloured(f"{type(error).__name__}: {text}", sys.stderr), err=True)
    sys.exit(1)
