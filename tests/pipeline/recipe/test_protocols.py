"""Addresses use listed protocols in each link of a chain, wherever a recipe may name an address."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import available_protocols

from pipeline.errors import RecipeError
from pipeline.raw_images.manifest import walk_manifest
from pipeline.recipe import load_recipe, project_root, recipe_from_mapping
from pipeline.recipe.validators import PROTOCOLS
from pipeline.storage.remote_source import source_at

# A text that starts with a name such as arrow_hdfs is a path, because an address has no underscore there.
OTHERS = sorted(name for name in set(available_protocols()) - PROTOCOLS if "_" not in name)

PLACES: dict[str, dict[str, Any]] = {
    "datasets[0].path": {"datasets": {"path": "@"}},
    "datasets[0].images": {"datasets": {"path": "data/list.csv", "images": "@"}},
    "datasets[0].mask.path": {"datasets": {"mask": {"path": "@"}}},
    "datasets[0].references[0].path": {"datasets": {"references": [{"path": "@"}]}},
    "cache_dir": {"cache_dir": "@"},
    "output_dir": {"output_dir": "@"},
    "training.lora.start_from": {"training": {"lora": {"start_from": "@"}}},
    "training.sample_prompts[0].references[0]": {
        "training": {"sample_prompts": [{"prompt": "a", "references": ["@"]}]}
    },
}


def recipe_with(changes: dict[str, Any], address: str) -> dict[str, Any]:
    values = {"output_dir": "outputs/r", "model": {"base": "a/b"}, **changes}
    values["datasets"] = [{"name": "d", "path": "data/photos", **changes.get("datasets", {})}]
    text = json.dumps(values)
    return json.loads(text.replace('"@"', json.dumps(address)))


def test_protocols_that_open_what_data_name_are_not_listed() -> None:
    assert {"reference", "generic", "dir", "data", "jupyter", "jlab", "git", "dask", "wandb"} <= set(OTHERS)
    assert {"s3", "gs", "abfs", "https", "sftp", "zip", "hf"} <= PROTOCOLS


@pytest.mark.parametrize("protocol", OTHERS)
@pytest.mark.parametrize(
    "address",
    [
        "{}://x",
        "{}::s3://bucket/x",
        "zip://photos::{}://x",
        "simplecache::{}::https://host/x",
        "zip://a::tar://b::{}://c::s3://bucket/x",
    ],
)
def test_every_other_protocol_of_fsspec_is_refused_in_every_link(protocol: str, address: str) -> None:
    with pytest.raises(RecipeError, match=f"the address must .*{protocol}"):
        recipe_from_mapping("r", recipe_with({"datasets": {"path": "@"}}, address.format(protocol)))


@pytest.mark.parametrize("key", PLACES)
@pytest.mark.parametrize("address", ["reference://x", "zip://x::generic://y", "Reference://x", "DIR::/etc"])
def test_the_error_names_the_key_and_its_line(tmp_path: Path, key: str, address: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(json.dumps(recipe_with(PLACES[key], address), indent=1), encoding="utf-8")
    with pytest.raises(RecipeError, match="address") as caught:
        load_recipe(file)
    assert key in caught.value.where
    assert "r.yaml:" in caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize(
    "cell",
    [
        "reference://a.json",
        "reference::https://host/a.json",
        "data:text/plain,x",
        "generic://file:///etc/passwd",
    ],
)
def test_a_cell_of_a_manifest_opens_no_address(tmp_path: Path, cell: str) -> None:
    manifest = tmp_path / "list.jsonl"
    manifest.write_text(json.dumps({"path": cell}) + "\n", encoding="utf-8")
    settings = recipe_from_mapping("r", recipe_with({"datasets": {"path": "@"}}, str(manifest))).datasets[0]
    result = walk_manifest(settings, source_at(settings.root))
    assert [problem.reason for problem in result.problems] in (["outside_dataset"], ["not_found"])
    assert result.images == []


def test_the_documentation_lists_the_protocols() -> None:
    text = (project_root() / "docs/remote_storage.md").read_text(encoding="utf-8")
    assert [name for name in sorted(PROTOCOLS) if f"`{name}`" not in text] == []
