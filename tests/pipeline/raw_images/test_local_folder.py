"""Walking a dataset: what is an image, what is passed over, and that every walk ends."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DatasetError
from pipeline.raw_images import local_folder as folder
from pipeline.raw_images.local_folder import Found, FoundFiles, to_int64, walk


def names(root: Path, suffix: str | None = None) -> list[str]:
    return sorted(image.path for image in walk(root, suffix).images)


def test_I07_suffixes_count_in_any_case_and_in_subfolders(tmp_path: Path) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    wanted = ["a.jpg", "b.JPEG", "c.Png", "sub/d.webp", "sub/deep/e.TIFF"]
    for name in [*wanted, "f.txt", "g.mp4"]:
        (tmp_path / name).write_bytes(b"x")
    assert names(tmp_path) == wanted


def test_I06_what_systems_leave_in_folders_is_passed_over_and_counted(tmp_path: Path) -> None:
    for name in ("__MACOSX/x.jpg", ".ipynb_checkpoints/x.jpg", ".git/x.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    for name in ("._x.jpg", ".DS_Store", "Thumbs.db", "x.jpg~", ".x.jpg"):
        (tmp_path / name).write_bytes(b"x")
    found = walk(tmp_path)
    assert not len(found.images)
    assert found.passed_over == {"hidden": 8}


def test_I25_fifos_sockets_and_folders_named_as_images_never_block(folder: Any) -> None:
    folder.add("real.png")
    os.mkfifo(folder.root / "fifo.jpg")
    (folder.root / "folder.jpg").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder.root / "socket.jpg"))
        (folder.root / "link.jpg").symlink_to("/dev/zero")
        (folder.root / "nosuffix").mkdir()
        os.mkfifo(folder.root / "nosuffix2")
        found = walk(folder.root, ".txt")
    assert [image.path for image in found.images] == ["real.png"]
    assert found.passed_over == {"special": 4, "captions": 1}


def test_I27_caches_of_other_trainers_are_named(tmp_path: Path) -> None:
    for name in ("a.npz", "b.safetensors", "c.pt", "notes.md"):
        (tmp_path / name).write_bytes(b"x")
    found = walk(tmp_path)
    assert sorted(found.foreign_caches) == ["a.npz", "b.safetensors", "c.pt"]
    assert found.passed_over == {"foreign_caches": 3, "not_images": 1}
    assert found.suffixes == {"npz": 1, "safetensors": 1, "pt": 1, "md": 1}


def test_a_file_without_suffix_is_an_image_by_its_first_bytes(folder: Any) -> None:
    (folder.root / "photo").write_bytes(folder.picture())
    (folder.root / "README").write_text("words")
    assert names(folder.root) == ["photo"]


def test_I19_links_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    root, outside = tmp_path / "data", tmp_path / "outside"
    (root / "z").mkdir(parents=True)
    (outside / "more").mkdir(parents=True)
    for path in (root / "z" / "own.png", outside / "o.png", outside / "more" / "m.png"):
        path.write_bytes(b"x")
    (root / "a_link_to_z").symlink_to(root / "z")
    (root / "own_again.png").symlink_to("z/own.png")
    (root / "z" / "loop").symlink_to(root)
    (root / "z" / "all").symlink_to(tmp_path)
    (root / "out").symlink_to(outside)
    (root / "out_again").symlink_to(outside)
    (outside / "back").symlink_to(root)
    (root / "one.png").symlink_to(outside / "o.png")
    found = walk(root)
    assert sorted(image.path for image in found.images) == ["one.png", "out/more/m.png", "z/own.png"]
    assert sorted(found.links_out) == ["one.png", "out"]
    assert found.passed_over == {"linked_twice": 7}


def test_I19_a_folder_met_through_one_link_is_not_met_again_through_another(tmp_path: Path) -> None:
    root, outside = tmp_path / "data", tmp_path / "outside"
    root.mkdir()
    (outside / "more").mkdir(parents=True)
    (outside / "more" / "m.png").write_bytes(b"x")
    (root / "a").symlink_to(outside / "more")
    (root / "b").symlink_to(outside)
    found = walk(root)
    assert [image.path for image in found.images] == ["a/m.png"]
    assert found.passed_over == {"linked_twice": 1}


def test_I19_a_link_that_leads_nowhere_is_a_problem_if_it_is_named_as_an_image(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").symlink_to("gone.jpg")
    (tmp_path / "me.png").symlink_to("me.png")
    (tmp_path / "x.txt").symlink_to("gone.txt")
    found = walk(tmp_path)
    assert [(problem.path, problem.reason) for problem in found.problems] == [
        ("me.png", "broken_link"),
        ("x.jpg", "broken_link"),
    ]
    assert found.passed_over == {"broken_links": 1}


def test_I19_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.png").write_bytes(b"x")
    (tmp_path / "link").symlink_to("data")
    assert names(tmp_path / "link") == ["x.png"]
    assert walk(tmp_path / "link").links_out == []


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("gone", "correct datasets[].path in the recipe"),
        ("photos.zip", "zip://::photos.zip"),
        ("$HOME/photos", "variables such as $HOME are not replaced"),
        ("C:/Users/me/photos", "a path of Windows"),
        ("C:\\Users\\me\\photos", "a path of Windows"),
    ],
)
def test_I21_a_root_that_cannot_be_listed_is_a_clear_error(tmp_path: Path, name: str, fix: str) -> None:
    (tmp_path / "photos.zip").write_text("x")
    with pytest.raises(DatasetError, match="cannot be read") as caught:
        walk(tmp_path / name)
    assert fix in caught.value.fix


def test_I21_a_folder_without_permission_is_a_problem_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "x.png").write_bytes(b"x")
    (tmp_path / "secret").chmod(0)
    try:
        os.scandir(tmp_path / "secret").close()
        pytest.skip("this user may read everything")
    except PermissionError:
        found = walk(tmp_path)
        assert [problem.reason for problem in found.problems] == ["unreadable_folder"]
        assert len(found.images) == 1
    finally:
        (tmp_path / "secret").chmod(0o700)


def test_captions_are_told_from_other_files(tmp_path: Path) -> None:
    for name in ("a.txt", "b.caption", "c.TXT"):
        (tmp_path / name).write_bytes(b"x")
    assert list(walk(tmp_path, ".txt").captions) == ["a.txt"]
    assert list(walk(tmp_path, ".caption").captions) == ["b.caption"]
    assert not len(walk(tmp_path).captions)


def test_inode_numbers_of_64_bits_fit_the_tables() -> None:
    assert [to_int64(inode) for inode in (5, 2**63 - 1, 2**63, 2**64 - 1)] == [5, 2**63 - 1, -(2**63), -1]
    assert [to_int64(time_ns) for time_ns in (-(2**63), -(2**63) - 1, 2**64 + 7)] == [-(2**63), 2**63 - 1, 7]


def test_files_of_one_folder_come_as_if_one_by_one_also_with_inode_numbers_of_64_bits() -> None:
    together, one_by_one = FoundFiles(), FoundFiles()
    for inodes in ([1, 2**63 - 1], [3, 2**64 - 1], [5]):
        numbers = [number for inode in inodes for number in (7, -1, 9, inode, 2**64 - 2)]
        together.extend("a/", [f"{inode}.png" for inode in inodes], numbers)
        for inode in inodes:
            one_by_one.append(Found(f"a/{inode}.png", 7, -1, 9, to_int64(inode), -2))
    assert list(together) == list(one_by_one)
    assert together.stats().tolist() == one_by_one.stats().tolist()


def test_as_many_files_as_there_are_are_met_when_a_folder_has_more_than_are_met_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_FILES_AT_ONCE", 3)
    for number in range(7):
        (tmp_path / f"{number}.png").write_bytes(b"x")
        (tmp_path / f"{number}.txt").write_bytes(b"x")
    found = walk(tmp_path, ".txt")
    assert sorted(found.images) == sorted(walk(tmp_path).images)
    assert len(found.images) == found.passed_over["captions"] == found.suffixes["txt"] == 7
    assert not len(found.captions), "each has its image beside it"
