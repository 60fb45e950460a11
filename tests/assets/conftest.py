"""Instances of Dagster for the tests of assets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dagster import (
    DagsterInstance,
)


@pytest.fixture
def stored_instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterInstance]:
    """An instance in a folder, which contexts of schedules require."""
    with DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as instance:
        yield instance


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    with DagsterInstance.ephemeral() as instance:
        yield instance
