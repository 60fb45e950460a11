"""The option `--json` of every command: one JSON document on standard output, all lines on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

import click

from pipeline.errors import LatentlineError
from pipeline.escaping import json_text, without_secrets

OPTION = "--json"

_STREAM = f"{__name__}.stream"
"""Key in the meta data of click's context: the stream of the document."""

Outcome = MutableMapping[str, Any]
"""`obj` of click's context: `recipe`, the recipe's name; `error`; `given`, if the result has been printed."""


def json_option(text: str, *, expose_value: bool = True) -> Callable[..., Any]:
    """Return a decorator that adds the option to a command, with this help text, as parameter `as_json`."""
    return click.option(
        OPTION,
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=_begin,
        expose_value=expose_value,
        help=text,
    )


def add_json_option(command: click.Command) -> None:
    """Add the option to a command, or to each subcommand of a group, unless it has one of its own."""
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            add_json_option(subcommand)
    elif not any(OPTION in each.opts for each in command.params):
        json_option("Print the result as JSON; see docs/scripting.md.", expose_value=False)(command)


def _begin(context: click.Context, _: click.Parameter, as_json: bool) -> bool:
    if as_json and _STREAM not in context.meta:
        context.meta[_STREAM] = sys.stdout
        # The root's context ends the redirection, because click does not close the context of a subcommand
        # that rejects an argument.
        context.find_root().with_resource(redirect_stdout(sys.stderr))
    return as_json


def is_json() -> bool:
    """Return True if the command that is running has the option."""
    context = click.get_current_context(silent=True)
    return context is not None and _STREAM in context.meta


def give(result: Mapping[str, Any]) -> None:
    """Print the result of a command if it has the option; each command calls this once, after its work."""
    if not is_json():
        return
    context = click.get_current_context()
    click.echo(json_text(result), file=context.meta[_STREAM])
    if isinstance(context.obj, dict):
        context.obj["given"] = True


@contextmanager
def recorded_usage_errors(context: click.Context) -> Generator[None]:
    """Record an error about the arguments. Click prints its text and ends the command."""
    try:
        yield
    except click.ClickException as error:
        if isinstance(context.obj, dict):
            place = getattr(error, "ctx", None) or context
            context.obj["error"] = {
                "type": type(error).__name__,
                "what": without_secrets(error.format_message()),
                "where": place.command_path,
                "fix": f"see {place.command_path} --help",
            }
        raise


def record_error(error: Exception, outcome: Outcome) -> None:
    """Record the error that ends a command."""
    if isinstance(error, LatentlineError):
        what, where, fix = error.what, error.where, error.fix
    else:
        what, where = without_secrets(str(error)), "latentline"
        fix = "report it with the traceback on standard error"
    fix = fix.replace("<recipe>", outcome.get("recipe", "<recipe>"))
    outcome["error"] = {"type": type(error).__name__, "what": what, "where": where, "fix": fix}


@contextmanager
def printed_errors(arguments: Sequence[str], outcome: Outcome) -> Generator[None]:
    """Print the recorded error as JSON if a command with the option ends without a result."""
    # Click rejects an unknown option or command before it calls the callback of this one.
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        yield
    except SystemExit as end:
        if end.code and OPTION in options and "given" not in outcome:
            stopped = {
                "type": "StoppedError",
                "what": "the command was stopped",
                "where": "latentline",
                "fix": "run the same command again",
            }
            with suppress(OSError):
                click.echo(json_text({"error": outcome.get("error", stopped)}))
        raise
