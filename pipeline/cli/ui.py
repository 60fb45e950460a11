"""`latentline ui`: serve the pages of recipes on this machine."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.cli.run import dagster_home
from pipeline.errors import FileAccessError
from pipeline.recipe import Recipe, project_root, recipes_dir
from pipeline.recipe.component_files import component_recipe_files

if TYPE_CHECKING:
    from pipeline.page.live import Recipes


@click.command(short_help="Show stages, images, curves and previews in the browser.")
@click.argument("recipes", metavar="[RECIPE]...", type=RECIPE_WITH_OUTPUTS, nargs=-1)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="Port; 0 chooses one."
)
@click.option("--dagster", default="", metavar="ADDRESS", help="Address of Dagster's UI, to link to.")
@click.option(
    "--public-url",
    default="",
    metavar="URL",
    callback=lambda _ctx, _option, value: _public_url(value),
    help="Address of a reverse proxy in front of the pages, such as https://training.example.",
)
@click.option("--write", is_flag=True, help="Write reports/index.html of each RECIPE, and serve nothing.")
@click.option("--token", envvar="LATENTLINE_UI_TOKEN", help="Token of the address. By default a random one.")
def command(
    recipes: tuple[Recipe, ...], port: int, dagster: str, public_url: str, token: str | None, *, write: bool
) -> None:
    """Serve the pages of RECIPE, or of all recipes, until Ctrl-C.

    The pages show the stages with their gates, the dataset, the curves and previews of a training while it
    runs, results and runs. They are only reachable from this machine, at the address that the command prints:
    it contains a random token. They also start and stop the recipe's job, publish a step, draw a prompt and
    edit captions.

    With --write, the page of each RECIPE becomes a file that needs no server, as jobs write it. Outputs at an
    address have this file only then.
    """
    if write:
        _write(recipes)
        return
    import socket

    import uvicorn

    from pipeline.page.actions import Jobs
    from pipeline.page.live import Recipes
    from pipeline.page.server import HOST, application

    token = token or secrets.token_urlsafe(24)
    with socket.socket() as listener:
        # A server that has just ended keeps its port for a minute otherwise.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as err:
            raise FileAccessError(
                f"port {port} is not available: {err.strerror}",
                where=f"{HOST}:{port}",
                fix="pass another one with --port, or stop the program that uses it",
            ) from err
        port = listener.getsockname()[1]
        served = Recipes([recipe.source for recipe in recipes]) if recipes else _all_recipes()
        app = application(
            served,
            Jobs(dagster_home() / "page"),
            token=token,
            port=port,
            dagster=dagster.rstrip("/"),
            public_url=public_url,
        )
        page = f"{recipes[0].name}/" if len(recipes) == 1 else ""
        address = f"{public_url or f'http://{HOST}:{port}'}/{page}?token={token}"
        echo(address)
        give({"address": address})
        # Its access log would show the token.
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def _write(recipes: Sequence[Recipe]) -> None:
    from pipeline.page.static import refresh_page

    if not recipes:
        raise click.UsageError("--write needs a RECIPE.")
    for recipe in recipes:
        echo(str(refresh_page(recipe, log_to_stderr)))


def _public_url(value: str) -> str:
    """Return scheme and host of the address; raises BadParameter if it has other parts."""
    match = re.fullmatch(r"(https?://[A-Za-z0-9.-]+(?::[0-9]{1,5})?)/?", value)
    if value and match is None:
        raise click.BadParameter(f"it must be https:// and a host, without a path, got {value!a}")
    # Browsers send names in lower case.
    return match[1].lower() if match else ""


def _all_recipes() -> Recipes:
    from pipeline.page.live import Recipes

    return Recipes(component_recipe_files(project_root()), recipes_dir())
