"""The UI in a browser: after the demo, during a second training, and with a closed gate."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from demo.experiments import copy_demo
from pipeline.recipe import load_recipe
from pipeline.recipe.check_specs import SPECS
from pipeline.reporting import tensorboard
from tests.e2e.daemon import ROOT, make_home, running, until
from tools.docs.browser import (
    Browser,
    browsing,
    ended,
    free_port,
    graphql,
    launch,
    launch_from_failure,
    missing,
    newest_run,
    request,
    responds,
    terminate,
)

WINDOW = (1600, 2400)
"""Size of the browser's window. TensorBoard draws only the charts inside it."""

NUM_PICTURES = 48

ENDLESS = {"ops": {"demo__trained_lora": {"config": {"steps": 20_000, "seed": 1}}}}
"""Run configuration of a second training, which the test stops."""

WAIT_S = 900
"""Seconds that a process or a run may take on a busy machine."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        bool(missing()),
        reason=f"not installed: {', '.join(missing())} (apt-get install chromium chromium-driver)",
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that contains the demo and all its outputs."""
    copy_demo(tmp_path)
    make_home(tmp_path / "home")
    return tmp_path


def environment_of(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "DAGSTER_HOME": str(folder / "home"),
        "LATENTLINE_CONFIGS": str(folder / "configs"),
        "DO_NOT_TRACK": "1",
    }


@contextmanager
def serving(folder: Path, *, tensorboard_port: int) -> Generator[str]:
    """Start `make ui`, and provide the address of Dagster's UI."""
    port, log = free_port(), folder / "ui.log"
    command = [sys.executable, "-m", "tools.ui", "--port", str(port)]
    command += ["--tensorboard-port", str(tensorboard_port), "--page-port", "0"]
    with running(command, environment=environment_of(folder), cwd=ROOT, log=log):
        url = f"http://127.0.0.1:{port}"
        until(lambda: responds(f"{url}/server_info"), "the UI", seconds=WAIT_S, log=log)
        yield url


def finished(url: str, run: str, folder: Path) -> str | None:
    until(lambda: ended(url, run), "the end of the run", seconds=WAIT_S, log=folder / "ui.log")
    return ended(url, run)


def run_the_demo(folder: Path, *, tensorboard_port: int) -> None:
    """Execute the command of `make demo` and `latentline run`, with links to the port of TensorBoard."""
    subprocess.run(
        [sys.executable, "-c", "from pipeline.cli.main import main; main()", "run", "demo"],
        env={**environment_of(folder), tensorboard.PORT_VARIABLE: str(tensorboard_port)},
        cwd=folder,
        check=True,
    )


def open_sheet(browser: Browser, page: str, key: str, log: Path) -> list[list[int]]:
    """Open the Markdown of a metadata key, and return width and height of its pictures."""
    browser.open(page)
    browser.wait_for(key)
    browser.click("[Show Markdown]", row=key)
    browser.wait_for("Close")
    until(browser.pictures, key, seconds=60, log=log)
    return browser.pictures()


def metadata_path(browser: Browser, pattern: str) -> str:
    """Return the only path on the page that matches a regular expression."""
    [path] = set(re.findall(rf"^\s*(/\S*{pattern})\s*$", browser.text(), re.MULTILINE))
    return path


def test_after_the_demo_the_ui_shows_assets_thumbnails_before_after_and_the_loss(folder: Path) -> None:
    board_port, log = free_port(), folder / "ui.log"
    run_the_demo(folder, tensorboard_port=board_port)
    with serving(folder, tensorboard_port=board_port) as url, browsing(folder, size=WINDOW) as browser:
        # The first page greets nobody with Dagster's sign-up dialog, and all assets are materialized.
        assert graphql(url, "{ shouldShowNux }") == {"shouldShowNux": False}
        browser.open(f"{url}/locations/latentline/asset-groups/demo/list")
        browser.wait_for(*SPECS, "Materialized")
        until(lambda: browser.text().count("Materialized\n") == len(SPECS), "6 assets", seconds=60, log=log)
        assert "Never materialized" not in browser.text()

        # The contact sheet is in the metadata, and so is the path of the page with all thumbnails.
        dataset = f"{url}/assets/demo/validated_dataset"
        [(width, _)] = open_sheet(browser, dataset, "picture_kept", log)
        assert width > 600
        browser.open(dataset)
        browser.wait_for("dataset_page")
        browser.open(f"file://{metadata_path(browser, 'index[.]html')}")
        browser.wait_for(f"{NUM_PICTURES} images kept")
        browser.run("for (const image of document.images) image.loading = 'eager'")
        widths = "return [...document.images].map(image => image.naturalWidth)"
        until(lambda: all(browser.run(widths)), "all thumbnails", seconds=60, log=log)
        thumbnails = browser.run(widths)
        assert len(thumbnails) == NUM_PICTURES
        assert min(thumbnails) > 50, thumbnails
        captions = [file.read_text("utf-8").strip() for file in (folder / "pictures").rglob("*.txt")]
        assert len(captions) == NUM_PICTURES
        assert [caption for caption in captions if caption not in browser.text()] == []

        [(width, height)] = open_sheet(
            browser, f"{url}/assets/demo/trained_lora", "picture_before_after", log
        )
        assert width > 1000, "two pictures of 64 px, enlarged"
        assert height > 500
        [(width, _)] = open_sheet(browser, f"{url}/assets/demo/trained_lora", "picture_loss", log)
        assert width > 300

        # The link of the metadata opens TensorBoard, which draws the curve of this run.
        [link] = {link for link in browser.links() if f":{board_port}/" in link}
        browser.open(link)
        browser.wait_for("loss", "/logs", "learning_rate", seconds=WAIT_S)
        assert browser.run("return document.querySelectorAll('line-chart').length") > 1
        base = f"http://127.0.0.1:{board_port}/data/plugin/scalars/scalars"
        [run] = [path.name for path in (folder / "out" / "runs").iterdir()]
        assert (
            len(request(f"{base}?tag=loss&run=demo%2F{run}%2Flogs"))
            == load_recipe(folder / "configs" / "demo.yaml").training.steps
        )


def test_during_a_training_the_ui_shows_a_live_observation_before_it_ends(folder: Path) -> None:
    port, log = free_port(), folder / "ui.log"
    with serving(folder, tensorboard_port=port) as url, browsing(folder) as browser:
        run = launch(url, "demo_train", ENDLESS)

        def shows_an_observation() -> bool:
            # Dagster's page lists the events of the moment in which it was opened or refreshed.
            browser.open(f"{url}/assets/demo/trained_lora?view=events")
            with suppress(TimeoutError):
                browser.wait_for("Observed", "steps_per_second", "learning_rate")
                return True
            return False

        until(shows_an_observation, "a live observation", seconds=WAIT_S, log=log)
        assert ended(url, run) is None
        assert "Materialized in run" not in browser.text()

        # The page of the run has the newest line of progress, without a refresh.
        browser.open(f"{url}/runs/{run}")
        browser.wait_for("training: step ")
        terminate(url, run)
        until(lambda: ended(url, run), "the end of the training", seconds=WAIT_S, log=log)


def test_the_ui_shows_the_graph_a_contact_sheet_and_a_closed_gate(folder: Path) -> None:
    overrides = {"steps": 30, "rank": 2}
    config = {"ops": {"demo__trained_lora": {"config": overrides}}}
    with serving(folder, tensorboard_port=free_port()) as ui, browsing(folder) as browser:
        assert finished(ui, launch(ui, "demo_train", config), folder) == "SUCCESS"
        browser.open(f"{ui}/locations/latentline/asset-groups/demo/lineage")
        browser.wait_for("raw_images", "validated_dataset", "aspect_buckets", "trained_lora")

        browser.open(f"{ui}/assets/demo/validated_dataset")
        browser.wait_for("picture_kept", "in 48 → kept 48 → rejected 0")
        browser.click("[Show Markdown]")
        browser.wait_for("Close")
        until(browser.pictures, "the contact sheet", seconds=20, log=folder / "ui.log")
        assert [size for size in browser.pictures() if size[0] <= 300] == []

        browser.open(f"{ui}/assets/demo/vae_latents")
        browser.wait_for("picture_decoded", "psnr_db", "latent_std", "channels")
        browser.click("[Show Markdown]")
        browser.wait_for("Close", "PSNR")
        assert len(browser.pictures()) == 4
        assert [size for size in browser.pictures() if size[0] <= 50] == []

        browser.open(f"{ui}/assets/demo/text_embeddings")
        browser.wait_for("picture_tokens")

        browser.open(f"{ui}/assets/demo/trained_lora")
        browser.wait_for("picture_loss", "picture_samples", "checkpoint_list", "overrides", '"rank": 2')

        browser.open(f"{ui}/assets/demo/vae_latents?view=checks&checkDetail=finite_values")
        browser.wait_for("finite_values", "Execute")
        browser.click("Execute")
        until(
            lambda: (newest_run(ui)["jobName"], newest_run(ui)["status"]) == ("__ASSET_JOB", "SUCCESS"),
            "a run of the check without its asset",
            seconds=WAIT_S,
            log=folder / "ui.log",
        )
        check_run = newest_run(ui)
        assert check_run["assetCheckSelection"] == [{"name": "finite_values"}]
        assert check_run["assetMaterializations"] == []

        caption = folder / "pictures" / "concept" / "red_zorp_white.txt"
        text = caption.read_text("utf-8")
        caption.unlink()
        (folder / "pictures" / "known" / "red_circle_white.png").write_bytes(b"\x89PNG no more than that")
        failed = launch(ui, "demo_cache")
        assert finished(ui, failed, folder) == "FAILURE"
        browser.open(f"{ui}/assets/demo/validated_dataset?view=checks&checkDetail=captions_present")
        browser.wait_for("captions_present", "Latest execution", "red_zorp_white", "fix:")

        caption.write_text(text, encoding="utf-8")
        assert finished(ui, launch_from_failure(ui, failed), folder) == "SUCCESS"
