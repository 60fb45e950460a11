"""Datasets on the Hub are read at one commit, from a local server that speaks its protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.errors import DatasetError
from pipeline.storage.addresses import Url
from pipeline.storage.hub_revision import at_commit
from pipeline.storage.remote_source import RemoteSource
from tests.hub_server import HubRepository, hub_server


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRepository]:
    with hub_server(monkeypatch) as server:
        yield server


def test_a_push_after_the_commit_was_resolved_changes_nothing(repository: HubRepository) -> None:
    commit = repository.push({"data/a.png": b"first", "README.md": b"flowers"})
    url = at_commit(Url("hf://datasets/anna/flowers/data"))
    assert url == f"hf://datasets/anna/flowers@{commit}/data"

    repository.push({"data/a.png": b"second", "data/b.png": b"new"})
    source = RemoteSource(Url(url))
    assert [each.path for each in source.list_folder("")] == ["a.png"]
    assert source.read("a.png", 5) == b"first"
    assert repository.requested == {commit}

    latest = RemoteSource(Url(at_commit(Url("hf://datasets/anna/flowers/data"))))
    assert latest.read("a.png", 6) == b"second"
    assert source.stats(["a.png"]).tolist() != latest.stats(["a.png"]).tolist()


def test_a_commit_in_the_address_and_other_addresses_stay(repository: HubRepository) -> None:
    commit = repository.push({"a.png": b"first"})
    repository.push({"a.png": b"second"})
    for text in (f"hf://datasets/anna/flowers@{commit}/data", "s3://bucket/data", "tar://::data/a.tar"):
        assert at_commit(Url(text)) == text
    assert str(at_commit(Url("zip://::hf://datasets/anna/flowers/a.zip"))).endswith("/a.zip")


def test_reading_waits_for_a_hub_that_is_overloaded(repository: HubRepository) -> None:
    commit = repository.push({"data/a.png": b"pixels"})
    source = RemoteSource(Url(f"hf://datasets/anna/flowers@{commit}/data"))
    assert source.read("a.png", 6) == b"pixels"
    repository.num_failures = 3
    assert [each.path for each in source.list_folder("")] == ["a.png"]
    assert repository.num_failures == 0


def test_a_missing_repository_is_an_error_that_names_the_address(repository: HubRepository) -> None:
    repository.push({})
    with pytest.raises(DatasetError, match="does not exist"):
        RemoteSource(Url("hf://datasets/anna/weeds")).list_folder("")
