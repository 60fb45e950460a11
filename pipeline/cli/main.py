"""Entry point of the command `latentline`; a subcommand's module is imported when it is asked for.

Such a module holds one `click.Command` named `command`. Exit status: 0 done, 1 a `LatentlineError` or what
the system refuses (printed as what, where, fix), 2 a wrong call.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import NoReturn

import click

from pipeline.errors import LatentlineError

COMMANDS = {
    "new": "pipeline.cli.new",
    "validate": "pipeline.cli.validate",
    "fit-buckets": "pipeline.cli.fit_buckets",
    "plan": "pipeline.cli.plan",
    "explain": "pipeline.cli.explain",
    "verify": "pipeline.cli.verify",
    "gc": "pipeline.cli.gc",
    "provenance": "pipeline.cli.provenance",
    "convert-checkpoint": "pipeline.cli.convert_checkpoint",
}
"""Subcommand to module, in the order that `latentline --help` shows."""


class _Commands(click.Group):
    """Imports a subcommand only when it is used, so that none pays for another's libraries."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand; None where there is none of this name."""
        module = COMMANDS.get(cmd_name)
        return import_module(module).command if module else None


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def latentline() -> None:
    """Asks about a recipe, a cache or a LoRA; jobs are run by `dagster job execute` or in the UI."""


def main() -> None:
    """Run the command line and exit; messages about any recipe's job name that of the one asked for."""
    named = dict[str, str]()
    try:
        latentline(prog_name="latentline", obj=named)
    except LatentlineError as error:
        _end(error, named)
    except OSError as error:
        from pipeline.storage.os_errors import as_file_access_error

        refusal = as_file_access_error(error)
        if refusal is None:
            raise
        _end(refusal, named)


def _end(error: LatentlineError, named: Mapping[str, str]) -> NoReturn:
    text = error.text().replace("<recipe>", named.get("recipe", "<recipe>"))
    click.echo(f"{type(error).__name__}: {text}", err=True)
    sys.exit(1)
