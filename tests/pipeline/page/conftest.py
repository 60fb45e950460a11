"""The fixture of the pages."""

from __future__ import annotations

import pytest

from tests.pipeline.dataset_folder import Folder
from tests.pipeline.page.trained import Page


@pytest.fixture
def page(folder: Folder) -> Page:
    return Page(folder)
