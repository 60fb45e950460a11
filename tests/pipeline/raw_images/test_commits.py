"""All stages of a job read one commit of a dataset on the Hub, from a local server with its protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.errors import DatasetError
from pipeline.raw_images.commits import at_scanned_commits, current_commits, with_commits
from pipeline.raw_images.sources import sources_of
from tests.hub_server import HubRepository, hub_server
from tests.pipeline.dataset_folder import Folder, picture

ADDRESS = "hf://datasets/anna/flowers/photos"


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRepository]:
    with hub_server(monkeypatch) as server:
        yield server


@pytest.fixture
def on_hub(folder: Folder) -> Folder:
    folder.dataset = {"path": ADDRESS}
    return folder


def files(**captions: str) -> dict[str, bytes]:
    named: dict[str, bytes] = {"README.md": b"Flowers"}
    for name, caption in captions.items():
        named[f"photos/{name}.png"] = picture(sum(name.encode()))
        named[f"photos/{name}.txt"] = caption.encode()
    return named


def test_a_push_between_two_stages_changes_nothing_in_the_job(
    on_hub: Folder, repository: HubRepository
) -> None:
    first = repository.push(files(a="first", b="first"))
    on_hub.scan()
    repository.push({**files(a="second", b="second"), "photos/a.png": picture(1)})
    kept = on_hub.validate()
    assert dict(kept.table.select("sample_id", "caption").rows()) == {"d/a.png": "first", "d/b.png": "first"}
    assert repository.requested == {first}

    assert dict(on_hub.ingest().table.select("sample_id", "caption").rows()) == {
        "d/a.png": "second",
        "d/b.png": "second",
    }


def test_a_new_commit_reads_only_the_files_that_it_changes(on_hub: Folder, repository: HubRepository) -> None:
    repository.push(files(a="first", b="first"))
    on_hub.ingest()
    second = repository.push({**files(a="first", b="first"), "photos/a.png": picture(1), "README.md": b"new"})
    repository.read.clear()
    result = on_hub.scan()
    assert result.report["commits"] == {ADDRESS: f"hf://datasets/anna/flowers@{second}/photos"}
    assert (result.report["read"], result.report["unchanged"]) == (1, 1)
    on_hub.validate()
    assert set(repository.read) == {"photos/a.png"}, "no caption is read again"


def test_masks_in_the_same_repository_are_of_the_same_commit(
    on_hub: Folder, repository: HubRepository
) -> None:
    commit = repository.push(files(a="first"))
    on_hub.dataset["mask"] = {"path": "hf://datasets/anna/flowers/masks"}
    recipe = on_hub.recipe
    pinned = with_commits(recipe, current_commits(recipe)).datasets[0]
    assert str(pinned.path) == f"hf://datasets/anna/flowers@{commit}/photos"
    assert pinned.mask is not None
    assert str(pinned.mask.path) == f"hf://datasets/anna/flowers@{commit}/masks"


def test_a_commit_in_the_recipe_is_read_although_the_branch_has_moved(
    on_hub: Folder, repository: HubRepository
) -> None:
    commit = repository.push(files(a="first"))
    repository.push(files(a="second", b="second"))
    on_hub.dataset = {"path": f"hf://datasets/anna/flowers@{commit}/photos"}
    result = on_hub.ingest()
    assert result.table["caption"].to_list() == ["first"]
    assert on_hub.scan().report["commits"] == {}


def test_recipes_without_the_hub_read_no_report(folder: Folder) -> None:
    recipe = folder.recipe
    assert at_scanned_commits(recipe) is recipe


def test_a_repository_that_does_not_exist_is_an_error_with_its_address(
    on_hub: Folder, repository: HubRepository
) -> None:
    repository.push({})
    on_hub.dataset = {"path": "hf://datasets/anna/weeds/photos"}
    with pytest.raises(DatasetError, match="does not exist") as excinfo:
        on_hub.scan()
    assert excinfo.value.where == "hf://datasets/anna/weeds/photos"


def test_sources_before_the_first_scan_are_of_the_branch(on_hub: Folder, repository: HubRepository) -> None:
    repository.push(files(a="first"))
    assert str(sources_of(on_hub.recipe)["d"].address) == ADDRESS
