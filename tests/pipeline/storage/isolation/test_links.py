"""Links and mounts that reach a given folder are found; others are followed once, so that loops end."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.storage.isolation import links
from pipeline.storage.isolation.identity import identify
from pipeline.storage.isolation.links import links_into, shallow_links_into


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "cache" / "latents").mkdir(parents=True)
    return tmp_path / "data"


def links_found(data: Path, place: Path) -> list[str]:
    """Return the links below `data` that reach `place`, relative to the temporary folder."""
    links = links_into(identify(data), {"cache": identify(place)})
    return sorted(Path(link.path).relative_to(data.parent).as_posix() for link in links)


@pytest.mark.parametrize(
    "target",
    [
        "../../cache",
        "../../cache/",
        "../../cache/latents",
        "../../cache/not/there",
        "../..",
        "/",
        "../../data/../cache",
    ],
)
def test_I19_a_link_to_the_folder_inside_it_or_around_it_is_found(data: Path, target: str):
    (data / "sub" / "x").symlink_to(target)
    assert links_found(data, data.parent / "cache") == ["data/sub/x"]


def test_I19_a_link_to_a_file_in_the_folder_is_found(data: Path):
    (data.parent / "cache" / "latents" / "a.png").touch()
    (data / "a.png").symlink_to("../cache/latents/a.png")
    assert links_found(data, data.parent / "cache") == ["data/a.png"]


def test_I19_a_link_to_a_link_is_found(data: Path):
    outside = data.parent / "outside"
    outside.mkdir()
    (data / "x").symlink_to("../outside/y")
    (outside / "y").symlink_to("../cache")
    (link,) = links_into(identify(data), {"cache": identify(data.parent / "cache")})
    assert (link.path, link.target) == (str(data / "x"), str(data.parent / "cache"))


def test_I19_a_link_inside_a_linked_folder_is_found(data: Path):
    outside = data.parent / "outside" / "more"
    outside.mkdir(parents=True)
    (data / "x").symlink_to("../outside")
    (outside / "y").symlink_to("../../cache")
    assert links_found(data, data.parent / "cache") == ["outside/more/y"]


def test_I19_other_links_are_allowed_and_loops_end(data: Path):
    outside = data.parent / "outside"
    outside.mkdir()
    (outside / "a.png").touch()
    (outside / "back").symlink_to("../data")
    (data / "out").symlink_to("../outside")
    (data / "a.png").symlink_to("../outside/a.png")
    (data / "up").symlink_to("..//data/sub/..")
    (data / "sub" / "up").symlink_to("..")
    (data / "loop").symlink_to("loop")
    (data / "dead").symlink_to("nowhere/at/all")
    assert links_found(data, data.parent / "cache") == []


@pytest.mark.timeout(20)
def test_I19_folders_that_link_to_each_other_are_searched_once(data: Path):
    for name, other in (("outside", "further"), ("further", "outside")):
        (data.parent / name).mkdir()
        (data.parent / name / "other").symlink_to(f"../{other}")
        (data / name).symlink_to(f"../{name}")
    assert links_found(data, data.parent / "cache") == []
    (data.parent / "further" / "x").symlink_to("../cache")
    assert links_found(data, data.parent / "cache") == ["further/x"]


def test_I25_a_fifo_named_as_an_image_and_a_link_to_it_do_not_block(data: Path):
    os.mkfifo(data / "x.jpg")
    (data / "y.jpg").symlink_to("x.jpg")
    assert links_found(data, data.parent / "cache") == []


def test_I18_a_name_that_is_not_valid_text_is_found(data: Path):
    name = os.fsdecode(b"caf\xe9\n")
    (data / name).symlink_to("../cache")
    (link,) = links_into(identify(data), {"cache": identify(data.parent / "cache")})
    assert link.path == str(data / name)


def test_a_missing_dataset_has_no_links(tmp_path: Path):
    assert links_found(tmp_path / "data", tmp_path / "cache") == []


def test_only_links_are_resolved_one_by_one(data: Path, monkeypatch: pytest.MonkeyPatch):
    """The walk must stay one scandir per folder: 100,000 files must not cost 100,000 look-ups."""
    for index in range(50):
        (data / f"{index}.jpg").touch()
    (data / "one.jpg").symlink_to("1.jpg")
    resolved: list[str] = []
    resolve = links.Targets.resolve

    def counting(self: links.Targets, link: str) -> tuple[str, bool]:
        resolved.append(Path(link).name)
        return resolve(self, link)

    monkeypatch.setattr(links.Targets, "resolve", counting)
    assert links_found(data, data.parent / "cache") == []
    assert resolved == ["one.jpg"]


def test_L01_a_bind_mount_of_the_folder_inside_the_dataset_is_found(
    data: Path, bind: Callable[[Path, Path], None]
):
    bind(data.parent / "cache", data / "sub")
    assert links_found(data, data.parent / "cache") == ["data/sub"]


def test_links_in_an_output_folder_into_a_dataset_are_found_to_the_given_depth(data: Path):
    cache = data.parent / "cache"
    (cache / "latents" / "ab").symlink_to("../../data/sub")
    (cache / "text").symlink_to("../data")
    (cache / "around").symlink_to("..")
    (cache / "latents" / "cd").mkdir()
    (cache / "latents" / "cd" / "too-deep").symlink_to("../../../data")
    place = {"photos": identify(data)}
    names = {Path(link.path).name for link in shallow_links_into(identify(cache), place, depth=2)}
    assert names == {"ab", "text"}
    deeper = {Path(link.path).name for link in shallow_links_into(identify(cache), place, depth=3)}
    assert deeper == {"ab", "text", "too-deep"}
