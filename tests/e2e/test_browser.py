"""The UI in a browser: the demo, started through GraphQL, its graph, a contact sheet and a closed gate.

The test also takes the README's screenshots, in the folder of LATENTLINE_SCREENSHOTS:

    LATENTLINE_SCREENSHOTS=docs/images python -m pytest -m browser
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import photographs
from tests.e2e.browser import (
    Browser,
    browsing,
    ended,
    free_port,
    graphql,
    launch,
    launch_from_failure,
    missing,
    newest_run,
    responds,
)
from tests.e2e.daemon import ROOT, make_home, running, until

MAX_SCREENSHOT_BYTES = 200_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(missing()),
        reason=f"not installed: {', '.join(missing())} (apt-get install chromium chromium-driver)",
    ),
]


@pytest.fixture
def folder(tmp_path: Path, tiny_sd: Path) -> Path:
    """Return a folder that contains the demo and all its outputs."""
    text = (ROOT / "configs" / "demo.yaml").read_text("utf-8")
    places = {"data/demo": "photos", ".cache/latentline": "cache", "outputs/demo": "out"}
    for place, name in places.items():
        assert f" {place}" in text
        text = text.replace(f" {place}", f" {tmp_path / name}")
    (tmp_path / "configs").mkdir()
    text = text.replace(" models/tiny-sd", f" {tiny_sd}")
    (tmp_path / "configs" / "demo.yaml").write_text(text, encoding="utf-8")
    photographs.write_photographs(tmp_path / "photos")
    return tmp_path


@pytest.fixture
def ui(folder: Path) -> Iterator[str]:
    """Start `dagster dev` as `make ui` does, and provide its address."""
    port, log, home = free_port(), folder / "dev.log", make_home(folder / "home")
    command = [sys.executable, "-m", "dagster", "dev", "-w", "workspace.yaml", "--host", "127.0.0.1"]
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "LATENTLINE_CONFIGS": str(folder / "configs"),
        "DO_NOT_TRACK": "1",
    }
    with running([*command, "--port", str(port)], environment=environment, cwd=ROOT, log=log):
        url = f"http://127.0.0.1:{port}"
        until(lambda: responds(f"{url}/server_info"), "the UI", seconds=120, log=log)
        graphql(url, "mutation { setNuxSeen }")
        yield url


def finished(url: str, run: str, folder: Path) -> str | None:
    until(lambda: ended(url, run), "the end of the run", seconds=400, log=folder / "dev.log")
    return ended(url, run)


def take_screenshot(browser: Browser, folder: Path, name: str) -> None:
    shots = Path(os.environ.get("LATENTLINE_SCREENSHOTS", folder / "screenshots"))
    browser.screenshot(shots / f"{name}.png")
    assert (shots / f"{name}.png").stat().st_size <= MAX_SCREENSHOT_BYTES


def test_the_ui_shows_the_graph_a_contact_sheet_and_a_closed_gate(folder: Path, ui: str) -> None:
    overrides = {"steps": 10, "rank": 2}
    config = {"ops": {"demo__trained_lora": {"config": overrides}}}
    assert finished(ui, launch(ui, "demo_train", config), folder) == "SUCCESS"
    with browsing(folder) as browser:
        browser.open(f"{ui}/locations/latentline/asset-groups/demo/lineage")
        browser.wait_for("raw_images", "validated_dataset", "aspect_buckets", "trained_lora")
        take_screenshot(browser, folder, "graph")

        browser.open(f"{ui}/assets/demo/validated_dataset")
        browser.wait_for("picture_kept", "in 24 → kept 24 → rejected 0")
        browser.click("[Show Markdown]")
        browser.wait_for("Close")
        until(browser.pictures, "the contact sheet", seconds=20, log=folder / "dev.log")
        assert all(width > 300 for width, _ in browser.pictures())
        take_screenshot(browser, folder, "contact_sheet")

        browser.open(f"{ui}/assets/demo/vae_latents")
        browser.wait_for("picture_decoded", "psnr_db", "latent_std", "channels")
        browser.click("[Show Markdown]")
        browser.wait_for("Close", "PSNR")
        assert len(browser.pictures()) == 4
        assert all(width > 50 for width, _ in browser.pictures())

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
            seconds=120,
            log=folder / "dev.log",
        )
        check_run = newest_run(ui)
        assert check_run["assetCheckSelection"] == [{"name": "finite_values"}]
        assert check_run["assetMaterializations"] == []

        caption = folder / "photos" / "cat_face.txt"
        text = caption.read_text("utf-8")
        caption.unlink()
        (folder / "photos" / "rocket_pad.png").write_bytes(b"\x89PNG no more than that")
        failed = launch(ui, "demo_cache")
        assert finished(ui, failed, folder) == "FAILURE"
        browser.open(f"{ui}/assets/demo/validated_dataset?view=checks&checkDetail=captions_present")
        browser.wait_for("captions_present", "Latest execution", "cat_face", "fix:")
        take_screenshot(browser, folder, "closed_gate")

        caption.write_text(text, encoding="utf-8")
        assert finished(ui, launch_from_failure(ui, failed), folder) == "SUCCESS"
