"""`python -m tools.docs.screenshots`: take the screenshots of README.md and docs/ with Chromium.

It runs the demo in a temporary folder, opens the UI on it as `make ui` does, trains a second time for the
page of a running training, and then closes a gate. Run it by hand after a change of what the UI shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import click

from demo.experiments import copy_demo
from pipeline.recipe.load import CONFIGS_VARIABLE, project_root
from tools.docs.browser import Browser, browsing, ended, free_port, launch, missing, responds, terminate

IMAGES = Path("docs/images")

WINDOW = (1600, 1150)
"""Width and height of the browser's window. In smaller ones, the asset graph shows only names."""

SECOND_TRAINING = {"ops": {"demo__trained_lora": {"config": {"steps": 2000, "seed": 1}}}}
"""Run configuration of a training that lasts until it is stopped."""

WAIT_S = 900.0
"""Seconds that the UI, a run or its first observation may take."""


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=IMAGES, show_default=True)
def main(output: Path) -> None:
    """Take the screenshots of the documentation and write them to a folder."""
    if programs := missing():
        raise click.ClickException(
            f"not installed: {', '.join(programs)}; on Debian: apt-get install chromium chromium-driver"
        )
    with tempfile.TemporaryDirectory(prefix="latentline-") as name:
        folder = Path(name)
        environment = prepare_demo(folder)
        command = [sys.executable, "-c", "from pipeline.cli.main import main; main()", "run", "demo"]
        subprocess.run(command, env=environment, check=True)
        subprocess.run([sys.executable, "-m", "demo.checks", "demo"], env=environment, check=True)
        with serving(environment) as url, browsing(folder, size=WINDOW) as browser:
            take_screenshots(browser, url, folder, output)


def prepare_demo(folder: Path) -> dict[str, str]:
    """Write the demo and a Dagster instance below `folder`, and return the environment of its commands."""
    recipe = copy_demo(folder)

    home = folder / "home"
    home.mkdir()
    shutil.copy(project_root() / ".dagster" / "dagster.yaml", home)
    return {
        **os.environ,
        "DAGSTER_HOME": str(home),
        CONFIGS_VARIABLE: str(recipe.parent),
        "DO_NOT_TRACK": "1",
    }


@contextmanager
def serving(environment: dict[str, str]) -> Generator[str]:
    """Start the UI as `make ui` does, provide its address, and stop it after the body."""
    port = free_port()
    command = [sys.executable, "-m", "tools.ui", "--port", str(port)]
    command += ["--tensorboard-port", str(free_port()), "--page-port", "0"]
    ui = subprocess.Popen(command, env=environment, cwd=project_root())
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: responds(f"{url}/server_info"), "the UI")
        yield url
    finally:
        ui.terminate()
        ui.wait()


def take_screenshots(browser: Browser, url: str, folder: Path, output: Path) -> None:
    """Take all screenshots of the UI at `url`.

    Args:
        browser: The browser.
        url: Address of a UI in which the demo has run once.
        folder: The demo's folder. A caption file in it is deleted.
        output: Folder of the screenshots.
    """
    asset = f"{url}/assets/demo"
    browser.open(f"{url}/locations/latentline/asset-groups/demo/lineage")
    browser.wait_for("raw_images", "trained_lora", "Materialized")
    browser.screenshot(output / "graph.png")

    for name, key in (("validated_dataset", "picture_kept"), ("trained_lora", "picture_before_after")):
        browser.open(f"{asset}/{name}")
        browser.wait_for(key)
        browser.click("[Show Markdown]", row=key)
        wait_until(browser.pictures, key)
        browser.screenshot(output / f"{SHEETS[key]}.png")

    run = launch(url, "demo_train", SECOND_TRAINING)
    browser.open(f"{url}/runs/{run}")
    browser.wait_for("training: step", seconds=WAIT_S)
    browser.screenshot(output / "training.png")
    terminate(url, run)
    wait_until(lambda: ended(url, run), "the end of the training")

    (folder / "pictures" / "concept" / "red_zorp_white.txt").unlink()
    run = launch(url, "demo_cache")
    wait_until(lambda: ended(url, run), "the end of the run with a closed gate")
    browser.open(f"{asset}/validated_dataset?view=checks&checkDetail=captions_present")
    browser.wait_for("captions_present", "Latest execution", "red_zorp_white", "fix:")
    browser.screenshot(output / "closed_gate.png")


SHEETS = {"picture_kept": "contact_sheet", "picture_before_after": "before_after"}
"""File name of each sheet's screenshot, by metadata key."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait at most `WAIT_S` until the condition holds.

    Raises:
        TimeoutError: It does not.
    """
    end_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"timed out after {WAIT_S:g} s waiting for {what}")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
