"""Settings of torch and Accelerate for tests that train in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.in_process_worker import forget_precision
from tests.pipeline.trained_lora.rank_server import RankServer


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because parallel test processes that use all cores slow each other down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Return the server of training processes, which has imported torch once for all tests."""
    with RankServer(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def any_precision() -> Iterator[None]:
    """Reset Accelerate's state, which otherwise fixes the precision for the lifetime of the process."""
    forget_precision()
    yield
    forget_precision()
