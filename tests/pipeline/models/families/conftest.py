from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import check_case

FOLDER = Path(__file__).parent

BY_DEFAULT = ("test_flux2.py", "test_sd.py", "test_sdxl.py")
"""Families whose complete jobs run by default: both kinds of denoisers, of noise and of text encoders.

The classes of all families are compared with diffusers one by one in `models/worker/`: codecs in
`test_vae.py`, text in `test_text.py`, noise in `test_noise.py`.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the complete jobs of all other families as slow."""
    for item in items:
        is_complete_job = item.path.parent == FOLDER and "the_complete_job" in item.name
        if is_complete_job and item.path.name not in BY_DEFAULT:
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
