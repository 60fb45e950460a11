"""The pages in Chromium: nothing that a dataset brings runs, and labels, texts and contrast are complete."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from pipeline.page.actions import Jobs
from pipeline.page.live import Recipes
from pipeline.page.server import application
from pipeline.page.static import write_page
from pipeline.reporting.findings import Finding, write_findings
from pipeline.storage.atomic import write_text
from tests.pipeline.page.accessibility import PROBLEMS
from tests.pipeline.page.test_static import EVIL
from tests.pipeline.page.trained import add_preview, recipes_of
from tools.docs.browser import Browser, browsing, free_port, missing, request

TOKEN = "token"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]


@contextmanager
def serving(recipes: Recipes, folder: Path) -> Generator[str]:
    port = free_port()
    app = application(recipes, Jobs(folder), token=TOKEN, port=port)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end_s = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def add_hostile_images_and_run(page: Any) -> None:
    page.folder.add("evil.png", caption=EVIL)
    page.folder.add("<img src=x onerror=alert(3)>.png", caption=EVIL)
    page.folder.add("empty <script>alert(4)<!--.png", b"", caption=EVIL)
    page.ingest()
    page.add_run("aaaa", began_s=1_000_000, prompt=EVIL, optimizer={"kind": EVIL})
    page.add_run("bbbb", began_s=2_000_000, prompt=EVIL, optimizer={"kind": EVIL[:20]})


def use(browser: Browser, *, scheme: str, width: int) -> None:
    """Choose light or dark and the width of the window."""

    def command(name: str, **values: Any) -> None:
        request(f"{browser.session}/goog/cdp/execute", {"cmd": name, "params": values})

    feature = {"name": "prefers-color-scheme", "value": scheme}
    command("Emulation.setEmulatedMedia", features=[feature])
    sizes = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    command("Emulation.setDeviceMetricsOverride", **sizes)


def check(browser: Browser, address: str) -> None:
    """Open a page in light, dark and narrow windows, and verify it; an open alert fails every command."""
    for scheme, width in (("light", 1280), ("dark", 400)):
        use(browser, scheme=scheme, width=width)
        browser.open(address)
        assert browser.run(PROBLEMS) == [], (address, scheme, width)
    for script in (
        "return document.querySelectorAll('img[onerror], [onclick], img[src=x]').length",
        # Pictures that are not loaded yet are not complete.
        "return [...document.images].filter(i => i.complete && !i.naturalWidth).length",
    ):
        assert browser.run(script) == 0, (address, script)


def test_hostile_names_run_nothing_and_pages_are_accessible(page: Any, tmp_path: Path) -> None:
    add_hostile_images_and_run(page)
    with serving(recipes_of(page, tmp_path), tmp_path / "jobs") as url, browsing(tmp_path) as browser:
        browser.open(f"{url}/?token={TOKEN}")
        assert browser.run("return location.href") == f"{url}/"
        pages = ("", "small/", "small/dataset", "small/dataset?show=rejected", "small/results", "small/runs")
        for end in pages:
            check(browser, f"{url}/{end}")
        check(browser, f"file://{write_page(page.folder.recipe)}")


def test_an_open_page_shows_new_steps_and_previews_and_keeps_what_is_open(page: Any, tmp_path: Path) -> None:
    layout = page.add_run("aaaa", began_s=1_000_000)
    failed = Finding("captions_present", False, "warn", "a caption is missing", "write it", [], {})
    write_findings(page.out, "validated_dataset", [failed])
    with serving(recipes_of(page, tmp_path), tmp_path / "jobs") as url, browsing(tmp_path) as browser:
        browser.open(f"{url}/small/?token={TOKEN}")
        browser.wait_for("step 4 of 4")
        browser.run("document.querySelector('details').open = true; window.sameDocument = true")
        with layout.metrics.open("a") as file:
            file.write(json.dumps({"step": 4, "loss": 0.1, "samples": 2, "seconds": 0.5}) + "\n")
        add_preview(layout, 5, "a rose")
        browser.wait_for("step 5 of 4", "3 steps of 3")
        assert browser.run("return window.sameDocument && document.querySelector('details').open") is True


def test_a_button_publishes_a_step_and_shows_what_the_command_has_printed(page: Any, tmp_path: Path) -> None:
    layout = page.add_run("aaaa", began_s=1_000_000)
    write_text(layout.checkpoints / "step-00000004" / "lora.json", "{}")
    with serving(recipes_of(page, tmp_path), tmp_path / "jobs") as url, browsing(tmp_path) as browser:
        browser.open(f"{url}/small/runs?token={TOKEN}")
        browser.click("Publish in lora/")
        browser.wait_for("the LoRA of step 4 is damaged", seconds=120)
