"""Workspaces of complete jobs. One is cached once per session, and tests work on copies of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.workspace import Workspace, write_photographs


@pytest.fixture
def fresh(tmp_path: Path, tiny_sd: Path) -> Workspace:
    """A workspace with an empty cache."""
    workspace = Workspace(tmp_path, tiny_sd)
    write_photographs(workspace.data)
    workspace.recipe()
    return workspace


@pytest.fixture(scope="session")
def cached_once(shared_folder: Callable[[str, Callable[[Path], object]], Path], tiny_sd: Path) -> Workspace:
    """The workspace from which `cached` copies; do not change it."""

    def cache(root: Path) -> None:
        workspace = Workspace(root, tiny_sd)
        write_photographs(workspace.data)
        workspace.recipe()
        assert workspace.execute("cache").success

    return Workspace(shared_folder("cached_workspace", cache), tiny_sd)


@pytest.fixture
def cached(cached_once: Workspace, tmp_path: Path) -> Workspace:
    """A workspace after the cache job, which the test may change."""
    return cached_once.copy_to(tmp_path)
