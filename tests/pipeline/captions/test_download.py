"""Captioning models that are named by their Hub id, from a local server that answers as the Hub does."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.hub_server import HubRepository, hub_server
from tests.pipeline.captions.conftest import Captioned

NAME = "anna/flowers"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[HubRepository]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_server(monkeypatch) as repository:
        yield repository


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_tagger_is_downloaded_by_its_hub_id_once_and_without_other_files(
    captioned: Captioned, captioner: Callable[[str], Path], hub: HubRepository
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    others = {"model.safetensors": b"x" * 1000, "README.md": b"a tagger", "config.json": b"{}"}
    hub.push({**files_of(captioner("tagger")), **others})
    tagger: dict[str, Any] = {"threshold": 0.1}
    captioned.captions = {"from": "model", "model": NAME, "tagger": tagger}
    table, report, _ = captioned.run()
    assert report["encoded"] == 3
    assert set(hub.read) == {"model.onnx", "selected_tags.csv"}

    # The same files in a folder have the same keys.
    local, report, _ = captioned.run(model=str(captioner("tagger")))
    assert (report["encoded"], report["reused"]) == (0, 3)
    assert local["key"].to_list() == table["key"].to_list()

    hub.read.clear()
    hub.commits.clear()
    _, report, _ = captioned.run()
    assert (report["encoded"], hub.read) == (0, []), "the model on this machine is used without requests"


def test_a_vision_language_model_is_downloaded_by_its_hub_id(
    captioned: Captioned, captioner: Callable[[str], Path], hub: HubRepository
) -> None:
    hub.push({**files_of(captioner("idefics3")), "pytorch_model.bin": b"a pickle"})
    captioned.captions = {"from": "model", "model": NAME, "max_tokens": 8}
    table, report, _ = captioned.run()
    assert report["encoded"] == 3
    assert "pytorch_model.bin" not in hub.read
    local, report, _ = captioned.run(model=str(captioner("idefics3")))
    assert (report["encoded"], local["key"].to_list()) == (0, table["key"].to_list())
