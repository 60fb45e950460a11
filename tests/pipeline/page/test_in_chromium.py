"""The pages in Chromium: nothing that a dataset brings runs, and labels, texts and contrast are complete."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn

from pipeline.page.actions import Jobs
from pipeline.page.live import Recipes
from pipeline.page.server import application
from pipeline.page.static import write_page
from pipeline.reporting.findings import Finding, write_findings
from pipeline.storage.atomic import write_text
from tests.pipeline.page.accessibility import problems
from tests.pipeline.page.test_static import EVIL
from tests.pipeline.page.trained import add_drawing, add_preview, recipes_of
from tests.waiting import until
from tools.docs.browser import Browser, browsing, free_port, missing

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


def check(browser: Browser, address: str) -> None:
    """Open a page in light, dark and narrow windows, and verify it; an open alert fails every command."""
    for scheme, width in (("light", 1280), ("dark", 400)):
        browser.emulate(scheme=scheme, width=width)
        browser.open(address)
        assert problems(browser) == [], (address, scheme, width)
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
        pages += ("small/recipe", f"small/sample?{urlencode({'id': 'd/<img src=x onerror=alert(3)>.png'})}")
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


@pytest.mark.parametrize("part", ["img", "p[dir]"])
def test_a_click_on_a_picture_or_a_caption_opens_the_image(page: Any, tmp_path: Path, part: str) -> None:
    page.ingest()
    with serving(recipes_of(page, tmp_path), tmp_path / "jobs") as url, browsing(tmp_path) as browser:
        browser.open(f"{url}/small/dataset?search=rose&token={TOKEN}")
        box = f"const b = document.querySelector('.cards {part}').getBoundingClientRect(); "
        browser.run(box + "document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2).click()")
        browser.wait_for("Save", "latentline edit-caption small d/rose.png")


def test_what_is_open_stays_open_after_a_change_and_a_notice_ends_with_its_job(
    page: Any, tmp_path: Path
) -> None:
    first = Finding("captions_present", False, "warn", "a caption is missing", "write it", [], {})
    second = Finding("look_alikes", False, "warn", "2 similar images", "remove one", [], {})
    write_findings(page.out, "validated_dataset", [first])
    # The job ends at once, because the recipe's base model does not exist.
    with serving(recipes_of(page, tmp_path), tmp_path / "jobs") as url, browsing(tmp_path) as browser:
        browser.open(f"{url}/small/?token={TOKEN}")
        browser.run("document.querySelector('#stages details').open = true")
        write_findings(page.out, "validated_dataset", [first, second])
        browser.wait_for("2 similar images", "write it")
        assert "remove one" not in browser.text(), "a new warning is closed"

        browser.click("Start")
        browser.wait_for("started: latentline run small", "Stop after a checkpoint")
        until(lambda: "started:" not in browser.text(), seconds=120)
        assert "Stop after a checkpoint" not in browser.text()


def test_a_button_publishes_a_step_and_shows_what_the_command_has_printed(page: Any, tmp_path: Path) -> None:
    layout = page.add_run("aaaa", began_s=1_000_000)
    write_text(layout.checkpoints / "step-00000004" / "lora.json", "{}")
    with serving(recipes_of(page, tmp_path), tmp_path / "jobs") as url, browsing(tmp_path) as browser:
        browser.open(f"{url}/small/runs?token={TOKEN}")
        browser.click("Publish in lora/")
        browser.wait_for("the LoRA of step 4 is damaged", seconds=120)


def test_a_preview_opens_with_a_slider_before_and_after_zoom_and_keys(page: Any, tmp_path: Path) -> None:
    layout = page.add_run("aaaa", began_s=1_000_000)
    for number, prompt in enumerate(("a rose", "a <b>tulip</b>")):
        for step in (0, 2, 4):
            add_preview(layout, step, prompt, number)
    shown = "const v = document.querySelector('dialog.viewer'); return "
    with serving(recipes_of(page, tmp_path), tmp_path / "jobs") as url, browsing(tmp_path) as browser:
        browser.open(f"{url}/small/?token={TOKEN}")
        browser.run("document.querySelectorAll('#previews-table a')[0].click()")
        browser.wait_for("step 0", "a rose", "Keys: left")
        assert problems(browser) == []

        def press(key: str) -> None:
            browser.run(
                "document.querySelector('dialog .stage').dispatchEvent("
                f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true}}))"
            )

        press("ArrowRight")
        browser.wait_for("step 2")
        press("ArrowDown")
        browser.wait_for("a <b>tulip</b>", "step 2")
        press("b")
        browser.wait_for("a <b>tulip</b> (left step 0, right step 2)")
        assert "inset" in browser.run(f"{shown} v.querySelectorAll('.stage img')[1].style.clipPath")
        press("+")
        # The picture is loaded before its size is known.
        width = f"{shown} v.querySelectorAll('.stage img')[1].clientWidth"
        until(lambda: browser.run(width) == 64)
        press("+")
        assert browser.run(width) == 128
        browser.run("document.querySelector('dialog button').click()")
        assert browser.run(f"{shown} v.open") is False


def test_a_typed_prompt_stays_when_the_page_changes(page: Any, tmp_path: Path) -> None:
    layout = page.add_run("aaaa", began_s=1_000_000)
    write_text(layout.checkpoints / "step-00000002" / "lora.json", "{}")
    with serving(recipes_of(page, tmp_path), tmp_path / "jobs") as url, browsing(tmp_path) as browser:
        browser.open(f"{url}/small/?token={TOKEN}")
        browser.fill("textarea[name=prompt]", "a rose in the rain")
        browser.run("document.activeElement.blur()")
        write_text(layout.checkpoints / "step-00000004" / "lora.json", "{}")
        add_drawing(page, "001", "a drawing that appears")
        browser.wait_for("a drawing that appears")
        assert (
            browser.run("return document.querySelector('textarea[name=prompt]').value")
            == "a rose in the rain"
        )
