from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import check_case
from tests.pipeline.models.families.cover import cover
from tools.docs.families_page import module_of

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the complete jobs of families outside of the cover as slow."""
    by_default = {f"test_{module_of(spec)}.py" for spec in cover()}
    for item in items:
        is_complete_job = item.path.parent == FOLDER and "the_complete_job" in item.name
        if is_complete_job and item.path.name not in by_default:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def check_family(tmp_path: Path, photos: Path) -> Callable[[Case], None]:
    """Return a function that runs a case's complete job and compares each step with diffusers."""
    return lambda case: check_case(case, tmp_path, photos)
