"""The graph of 20 recipes and an asset's page in a browser, before and after a shared folder changes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from tests.e2e.daemon import make_home
from tools.docs.browser import Browser, browsing, ended, graphql, launch, launch_assets, missing
from tools.docs.screenshots import serving, wait_until

WINDOW = (1600, 2600)
"""Size of the browser's window, in which the graph of all recipes and a complete asset page fit."""

FLOWERS = [f"flowers_{number:02}" for number in range(12)]
FACES = [f"faces_{number:02}" for number in range(8)]

SOURCES = ["source_datasets/data/flowers", "source_datasets/data/faces", "source_models/base"]

WORKSPACE = "load_from:\n  - python_module: {module_name: assets.definitions, location_name: latentline}\n"

STALE = "{ assetNodes { assetKey { path } staleStatus } }"

LINEAGE = """
query($key: AssetKeyInput!) {
  assetNodeOrError(assetKey: $key) { ... on AssetNode { metadataEntries {
    ... on TableColumnLineageMetadataEntry { lineage {
      columnName columnDeps { assetKey { path } columnName }
    } }
  } } }
}
"""

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
def project(tmp_path: Path, photos_once: Path, tiny_sd: Path) -> Path:
    """A project folder in which 12 recipes share one folder of images, and 8 share another one."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "workspace.yaml").write_text(WORKSPACE, encoding="utf-8")
    (tmp_path / "base").symlink_to(tiny_sd)
    make_home(tmp_path / "home")
    for folder, names in (("flowers", FLOWERS), ("faces", FACES)):
        shutil.copytree(photos_once, tmp_path / "data" / folder)
        for name in names:
            recipe = {
                "datasets": [{"name": folder, "path": f"data/{folder}"}],
                "output_dir": f"outputs/{name}",
                "owners": ["team:research"],
                "model": {"base": "base"},
                "buckets": {"resolution": 64, "step": 16},
                "training": {"steps": 2, "batch_size": 1, "lora": {"rank": 2}},
            }
            (tmp_path / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return tmp_path


def succeed(url: str, run: str) -> None:
    wait_until(lambda: ended(url, run), "the end of a run")
    assert ended(url, run) == "SUCCESS"


def unsynced(url: str, asset: str) -> set[str]:
    """Return the recipes with an unsynced asset of this name."""
    paths = {
        tuple(node["assetKey"]["path"]): node["staleStatus"] for node in graphql(url, STALE)["assetNodes"]
    }
    return {path[0] for path, status in paths.items() if path[-1] == asset and status == "STALE"}


def lineage(url: str, *key: str) -> dict[str, set[str]]:
    """Return the source columns of each column of an asset as `<asset>.<column>`."""
    entries = graphql(url, LINEAGE, key={"path": list(key)})["assetNodeOrError"]["metadataEntries"]
    (columns,) = (entry["lineage"] for entry in entries if "lineage" in entry)
    return {
        each["columnName"]: {
            f"{dep['assetKey']['path'][-1]}.{dep['columnName']}" for dep in each["columnDeps"]
        }
        for each in columns
    }


def open_graph(browser: Browser, url: str) -> None:
    """Open the graph of all groups, and wait for their states."""
    browser.open(f"{url}/asset-groups")
    browser.wait_for("sources", *FLOWERS, *FACES, seconds=300)


def test_M3_20_recipes_on_two_folders_and_the_page_of_an_asset(project: Path) -> None:
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(project / "home"),
        "LATENTLINE_PROJECT": str(project),
        "LATENTLINE_CONFIGS": str(project / "configs"),
        "DO_NOT_TRACK": "1",
    }
    with serving(environment) as url, browsing(project, size=WINDOW) as browser:
        succeed(url, launch_assets(url, *SOURCES))
        for rate in (1.0e-4, 2.0e-4):
            config = {"ops": {"flowers_00__trained_lora": {"config": {"learning_rate": rate}}}}
            succeed(url, launch(url, "flowers_00_train", config))
        succeed(url, launch_assets(url, *(f"{name}/raw_images" for name in FLOWERS + FACES)))
        assert unsynced(url, "raw_images") == set()
        open_graph(browser, url)

        (project / "data" / "flowers" / "cat.txt").write_text("a cat in the sun", encoding="utf-8")
        succeed(url, launch_assets(url, SOURCES[0]))
        assert unsynced(url, "raw_images") == set(FLOWERS)
        assert unsynced(url, "trained_lora") == set(), "raw_images may find that its table stays equal"
        browser.open(f"{url}/locations/latentline/asset-groups/flowers_07/lineage")
        browser.wait_for("raw_images", "flowers", "Unsynced", seconds=300)
        browser.open(f"{url}/locations/latentline/asset-groups/faces_03/lineage")
        browser.wait_for("raw_images", "faces", "Materialized", seconds=300)
        assert "Unsynced" not in browser.text()

        # Columns with all of their descriptions, rows, storage, tags, owner and the section of the recipe.
        browser.open(f"{url}/assets/flowers_00/vae_latents")
        browser.wait_for("Columns", "Target size as <height>x<width>.", "Row count\n5", seconds=300)
        browser.wait_for("flowers_00.vae_latents", "outputs/flowers_00/tables/vae_latents.parquet")
        browser.wait_for("research", "dataset/flowers", "latentline/base_model: base")
        browser.wait_for("Source code", "latents in flowers_00.yaml")
        assert any("flowers_00.yaml" in link for link in browser.links())

        # Dagster's open-source UI has no view of a column's lineage. Its API has it.
        assert lineage(url, "flowers_00", "vae_latents")["bucket"] == {"aspect_buckets.bucket"}
        assert lineage(url, "flowers_00", "trained_lora")["latent_keys"] == {"vae_latents.key"}

        browser.open(f"{url}/assets/flowers_00/trained_lora")
        browser.wait_for("Metadata", "last_loss", seconds=300)
        browser.click("Plots")
        browser.wait_for("last_loss", "learning_rate", "override_learning_rate")
        wait_until(lambda: browser.run("return document.querySelectorAll('canvas').length") > 5, "plots")
