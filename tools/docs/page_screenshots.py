"""`python -m tools.docs.page_screenshots`: take the screenshots of the recipe's page with Chromium.

It runs the demo in a temporary folder, and opens `latentline ui` on it. Run it by hand after a change of the
page.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click

from pipeline.recipe.load import project_root
from tools.docs.browser import Browser, browsing, missing
from tools.docs.screenshots import IMAGES, prepare_demo, wait_until

LATENTLINE = [sys.executable, "-c", "from pipeline.cli.main import main; main()"]

WINDOW = (1360, 1000)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=IMAGES, show_default=True)
def main(output: Path) -> None:
    """Take the screenshots of the page and write them to a folder."""
    if programs := missing():
        raise click.ClickException(f"not installed: {', '.join(programs)}")
    with tempfile.TemporaryDirectory(prefix="latentline-") as name:
        folder = Path(name)
        environment = prepare_demo(folder)
        subprocess.run([*LATENTLINE, "run", "demo"], env=environment, check=True)
        with page(environment, folder) as address, browsing(folder, size=WINDOW) as browser:
            take_screenshots(browser, address, output)


@contextmanager
def page(environment: dict[str, str], folder: Path) -> Generator[str]:
    """Start `latentline ui demo`, provide its address with the token, and stop it after the body."""
    log = folder / "page.log"
    with log.open("wb") as file:
        command = [*LATENTLINE, "ui", "demo", "--port", "0"]
        process = subprocess.Popen(command, env=environment, cwd=project_root(), stdout=file)
    try:
        wait_until(lambda: "token=" in log.read_text("utf-8"), "the page")
        yield log.read_text("utf-8").split()[0]
    finally:
        process.terminate()
        process.wait()


def take_screenshots(browser: Browser, address: str, output: Path) -> None:
    """Take all screenshots of the page at `address`, light and dark."""
    width, height = WINDOW

    def take(name: str, *texts: str, scheme: str = "light") -> None:
        browser.emulate(scheme=scheme, width=width, height=height)
        browser.run("for (const image of document.images) image.loading = 'eager'")
        browser.wait_for(*texts, seconds=300)
        loaded = "return [...document.images].every(i => !i.getAttribute('src') || i.complete)"
        wait_until(lambda: browser.run(loaded), "the pictures")
        browser.screenshot(output / name)

    browser.open(address)
    take("page.png", "Training loss")
    browser.run("[...document.querySelectorAll('#previews-table tr:last-child a')][0].click()")
    browser.run("const box = document.querySelector('dialog input[type=checkbox]'); box.click()")
    take("page_preview.png", "Keys: left", scheme="dark")
    base = address.partition("?")[0]
    browser.open(f"{base}dataset")
    take("page_dataset.png", "48 images", scheme="dark")
    browser.open(f"{base}sample?id=concept%2Fred_zorp_white.png")
    take("page_caption.png", "Save")


if __name__ == "__main__":
    main()
