from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder into which `latentline new` writes recipes."""
    folder = tmp_path / "configs"
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder
