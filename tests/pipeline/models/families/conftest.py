from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.complete_job import check_case


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
