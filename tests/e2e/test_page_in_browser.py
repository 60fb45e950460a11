"""The page of a recipe in Chromium, from the first start to a published step, and after an edited caption."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.experiments import changed_demo
from pipeline.reporting.reports import read_report
from tests.e2e.daemon import make_home, running, until
from tests.e2e.test_browser import WAIT_S, environment_of
from tests.pipeline.page.accessibility import problems
from tools.docs.browser import Browser, browsing, missing

STEPS = 90

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]


@contextmanager
def page_of_the_demo(folder: Path) -> Generator[str]:
    """Start `latentline ui demo`, and provide the address that it prints."""
    log = folder / "page.log"
    command = [
        sys.executable,
        "-c",
        "from pipeline.cli.main import main; main()",
        "ui",
        "demo",
        "--port",
        "0",
    ]
    with running(command, environment=environment_of(folder), cwd=folder, log=log):
        until(lambda: "token=" in log.read_text("utf-8"), "the page", seconds=WAIT_S, log=log)
        yield log.read_text("utf-8").split()[0]


def pictures(browser: Browser, section: str) -> int:
    """Return the number of pictures of a section that the browser has loaded."""
    browser.run("for (const image of document.images) image.loading = 'eager'")
    script = f"return [...document.querySelectorAll('#{section} img')].filter(i => i.naturalWidth).length"
    return int(browser.run(script))


def text_of(browser: Browser, section: str) -> str:
    return str(browser.run(f"return document.getElementById('{section}').innerText"))


def steps_done(browser: Browser) -> int:
    match = re.search(r"step ([\d,]+) of", text_of(browser, "training"))
    return int(match[1].replace(",", "")) if match else 0


def train(browser: Browser, log: Path) -> None:
    """Start a training, stop it, and resume it to its end; everything appears without a reload."""
    browser.click("Start")
    browser.wait_for("started: latentline run demo", "Stop after a checkpoint", seconds=WAIT_S)
    browser.run("window.sameDocument = true")
    until(lambda: pictures(browser, "previews") >= 2, "previews", seconds=WAIT_S, log=log)
    until(lambda: steps_done(browser) > 2, "steps", seconds=WAIT_S, log=log)
    assert browser.run("return document.querySelectorAll('#training .chart polyline').length") > 1
    assert browser.run("return window.sameDocument")
    assert problems(browser) == []

    browser.click("Stop after a checkpoint")
    browser.wait_for("stopping: a training ends after a checkpoint", seconds=60)
    browser.wait_for("Resume", f"of {STEPS}", seconds=WAIT_S)
    assert 0 < steps_done(browser) < STEPS
    browser.click("Resume")
    browser.wait_for(f"finished after {STEPS} steps", seconds=WAIT_S)
    until(lambda: pictures(browser, "previews") >= 8, "all previews", seconds=WAIT_S, log=log)


def draw_and_publish(browser: Browser, page: str, output_dir: Path, log: Path) -> None:
    """Draw a prompt with the newest step, and publish an earlier one."""
    browser.fill("textarea[name=prompt]", "a blue zorp on a pink background")
    browser.click("Draw")
    browser.wait_for("started: latentline sample demo --run", seconds=60)
    until(lambda: pictures(browser, "drawings") >= 1, "the drawing", seconds=WAIT_S, log=log)

    browser.open(f"{page}runs")
    browser.run("document.querySelector('select[name=step]').value = '30'")
    browser.click("Publish in lora/")
    browser.wait_for("lora/ holds step 30", "Step 30 is in lora/.", seconds=WAIT_S)
    [run] = (output_dir / "runs").glob("*/run.json")
    published = json.loads((output_dir / "lora" / "provenance.json").read_text("utf-8"))
    assert (published["run"], published["step"]) == (run.parent.name, 30)


def edit_a_caption(browser: Browser, page: str, output_dir: Path, log: Path) -> None:
    """Edit one caption, and start the job, which encodes this text and nothing else."""
    browser.open(f"{page}dataset?search=red_zorp_white")
    browser.click("Open, edit")
    browser.wait_for("Save")
    browser.fill("textarea[name=text]", "a red ring with a bar that no other caption has")
    browser.click("Save")
    browser.wait_for("latentline edit-caption demo concept/red_zorp_white.png", "the next job uses it")
    assert problems(browser) == []
    browser.open(page)
    browser.click("Start")

    def encoded(asset: str) -> int | None:
        return (read_report(output_dir, asset) or {}).get("encoded")

    until(lambda: encoded("text_embeddings") == 1, "one encoded caption", seconds=WAIT_S, log=log)
    browser.wait_for("1 encoded", seconds=60)
    assert encoded("vae_latents") == 0
    browser.click("Stop after a checkpoint")
    browser.wait_for("stopping", seconds=60)
    ended = (
        "return [...document.querySelectorAll('#job button')].some(b => /Start|Resume/.test(b.textContent))"
    )
    until(lambda: browser.run(ended), "the end of the job", seconds=WAIT_S, log=log)


def test_a_demo_is_trained_stopped_resumed_drawn_published_and_a_caption_edited(tmp_path: Path) -> None:
    previews = {"steps": 2, "guidance_scale": 1.0}
    training = {
        "steps": STEPS,
        "warmup_steps": 5,
        "checkpoint_every": 30,
        "sample_every": 30,
        "sample_prompts": [{"prompt": "a red zorp", **previews}, {"prompt": "a green star", **previews}],
    }
    recipe = changed_demo(tmp_path, training=training)
    make_home(tmp_path / "home")
    captions = {file: file.read_bytes() for file in (tmp_path / "pictures").rglob("*.txt")}
    log = tmp_path / "home" / "page" / "demo.log"
    with page_of_the_demo(tmp_path) as address, browsing(tmp_path, size=(1400, 1000)) as browser:
        page = address.partition("?")[0]
        browser.open(address)
        assert "not yet run" in text_of(browser, "stages")
        assert problems(browser) == []
        train(browser, log)
        draw_and_publish(browser, page, recipe.output_dir, log)
        edit_a_caption(browser, page, recipe.output_dir, log)
        for end in ("dataset", "results", "runs", "recipe"):
            browser.emulate(scheme="dark", width=420)
            browser.open(f"{page}{end}")
            assert problems(browser) == [], end
    assert {file: file.read_bytes() for file in captions} == captions, "the dataset is as it was"
