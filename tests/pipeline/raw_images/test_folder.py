"""A walk finds every image once, skips other files, and ends even if links form a loop."""

from __future__ import annotations

import os
import socket
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DatasetError
from pipeline.raw_images.folder import walk_local, walk_remote
from pipeline.storage.addresses import Url
from pipeline.storage.remote_source import RemoteSource
from pipeline.storage.source import to_int64


def names(root: Path) -> list[str]:
    return sorted(image.path for image in walk_local(root).images)


def test_I07_suffixes_count_in_any_case_and_in_subfolders(tmp_path: Path) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    expected = ["a.jpg", "b.JPEG", "c.Png", "sub/d.webp", "sub/deep/e.TIFF"]
    for name in [*expected, "f.txt", "g.mp4"]:
        (tmp_path / name).write_bytes(b"x")
    assert names(tmp_path) == expected


def test_I06_system_files_and_hidden_files_are_skipped_and_counted(tmp_path: Path) -> None:
    for name in ("__MACOSX/x.jpg", ".ipynb_checkpoints/x.jpg", ".git/x.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    for name in ("._x.jpg", ".DS_Store", "Thumbs.db", "x.jpg~", ".x.jpg"):
        (tmp_path / name).write_bytes(b"x")
    result = walk_local(tmp_path)
    assert not result.images
    assert result.passed_over == {"hidden": 8}


COPIES = (
    *("$RECYCLE.BIN", "Recycler", "system volume information"),
    *("#recycle", "#Snapshot", "@eaDir", "@EADIR", "@tmp"),
    *("@Recycle", "@Recently-Snapshot", "@__thumb", "@Transcode"),
    *("~snapshot", "trashbox", "lost+found", "Network Trash Folder", "@GMT-2024.05.01-06.00.00"),
    *("files_trashbin", "files_versions", "[Originals]", "Lightroom Catalog Previews.lrdata"),
    *("Holiday.photoslibrary/resources", "Old.aplibrary/Thumbnails", "old.photolibrary/Data.noindex"),
)


@pytest.mark.parametrize("name", COPIES)
def test_I32_folders_of_deleted_and_cached_copies_are_ignored_and_listed(tmp_path: Path, name: str) -> None:
    for folder in (name, f"sub/{name}", "kept"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        (tmp_path / folder / "x.jpg").write_bytes(b"x")
        (tmp_path / folder / "deep" / "y.jpg").write_bytes(b"x")
    result = walk_local(tmp_path)
    assert sorted(image.path for image in result.images) == ["kept/deep/y.jpg", "kept/x.jpg"]
    assert sorted(result.deleted_or_cached) == sorted([name, f"sub/{name}"])
    assert result.passed_over == {"deleted_or_cached": 2}


def test_I32_an_archive_is_walked_by_the_same_rule(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for name in ("#Recycle/x.jpg", "sub/@EADIR/y.jpg", "__macosx/z.jpg", "sub/kept.jpg"):
            archive.writestr(name, b"x")
    result = walk_remote(RemoteSource(Url(f"zip://::{tmp_path}/photos.zip")))
    assert [image.path for image in result.images] == ["sub/kept.jpg"]
    assert sorted(result.deleted_or_cached) == ["#Recycle", "sub/@EADIR"]
    assert result.passed_over == {"deleted_or_cached": 2, "hidden": 1}


def test_I32_an_apple_library_is_walked_without_its_derived_pictures(tmp_path: Path) -> None:
    root = tmp_path / "Photos Library.photoslibrary"
    for name in ("originals/0/a.jpg", "resources/derivatives/0/a.jpg"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"x")
    assert names(root) == ["originals/0/a.jpg"]


def test_I32_folders_of_a_class_of_pictures_are_read(tmp_path: Path) -> None:
    folders = ["Trash", "recycle bin", "resources", "thumbnails", "snapshot", "Originals", "cache", "tmp"]
    for folder in folders:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jpg").write_bytes(b"x")
    assert names(tmp_path) == sorted(f"{folder}/x.jpg" for folder in folders)


@pytest.mark.parametrize("name", ["__macosx/x.jpg", "THUMBS.DB", "Desktop.ini"])
def test_I06_names_of_system_files_are_compared_without_case(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    assert walk_local(tmp_path).passed_over == {"hidden": 1}


def test_I32_the_report_lists_the_ignored_folders(folder: Any) -> None:
    folder.add("a.png")
    folder.add("sub/#recycle/b.png")
    report = folder.scan().report
    assert report["kept"] == 1
    assert report["deleted_or_cached"] == report["passed_over"]["deleted_or_cached"] == 1
    assert report["named"]["deleted_or_cached"] == ["d/sub/#recycle"]


def test_I25_fifos_sockets_and_folders_named_like_images_never_block(folder: Any) -> None:
    folder.add("real.png")
    os.mkfifo(folder.root / "fifo.jpg")
    (folder.root / "folder.jpg").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder.root / "socket.jpg"))
        (folder.root / "link.jpg").symlink_to("/dev/zero")
        (folder.root / "nosuffix").mkdir()
        os.mkfifo(folder.root / "nosuffix2")
        result = walk_local(folder.root, (".txt",))
    assert [image.path for image in result.images] == ["real.png"]
    assert result.passed_over == {"special": 4, "captions": 1}


def test_I27_caches_of_other_trainers_are_listed(tmp_path: Path) -> None:
    for name in ("a.npz", "b.safetensors", "c.pt", "notes.md"):
        (tmp_path / name).write_bytes(b"x")
    result = walk_local(tmp_path)
    assert sorted(result.foreign_caches) == ["a.npz", "b.safetensors", "c.pt"]
    assert result.passed_over == {"foreign_caches": 3, "not_images": 1}
    assert result.suffixes == {"npz": 1, "safetensors": 1, "pt": 1, "md": 1}


def test_a_file_without_suffix_is_recognised_by_its_first_bytes(folder: Any) -> None:
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
    result = walk_local(root)
    assert sorted(image.path for image in result.images) == ["one.png", "out/more/m.png", "z/own.png"]
    assert sorted(result.links_out) == ["one.png", "out"]
    assert result.passed_over == {"linked_twice": 7}


def test_I19_a_folder_is_visited_through_one_link_only(tmp_path: Path) -> None:
    root, outside = tmp_path / "data", tmp_path / "outside"
    root.mkdir()
    (outside / "more").mkdir(parents=True)
    (outside / "more" / "m.png").write_bytes(b"x")
    (root / "a").symlink_to(outside / "more")
    (root / "b").symlink_to(outside)
    result = walk_local(root)
    assert [image.path for image in result.images] == ["a/m.png"]
    assert result.passed_over == {"linked_twice": 1}


def test_I19_a_broken_link_is_a_problem_only_if_it_is_named_like_an_image(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").symlink_to("gone.jpg")
    (tmp_path / "me.png").symlink_to("me.png")
    (tmp_path / "x.txt").symlink_to("gone.txt")
    result = walk_local(tmp_path)
    assert [(problem.path, problem.reason) for problem in result.problems] == [
        ("me.png", "broken_link"),
        ("x.jpg", "broken_link"),
    ]
    assert result.passed_over == {"broken_links": 1}


def test_I19_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.png").write_bytes(b"x")
    (tmp_path / "link").symlink_to("data")
    assert names(tmp_path / "link") == ["x.png"]
    assert walk_local(tmp_path / "link").links_out == []


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("gone", "correct datasets[].path in the recipe"),
        ("photos.zip", "zip://::photos.zip"),
        ("$HOME/photos", "variables such as $HOME are not expanded"),
        ("C:/Users/me/photos", "it is a Windows path"),
        ("C:\\Users\\me\\photos", "it is a Windows path"),
    ],
)
def test_I21_an_unreadable_root_is_an_error_with_a_fix(tmp_path: Path, name: str, fix: str) -> None:
    (tmp_path / "photos.zip").write_text("x")
    with pytest.raises(DatasetError, match="cannot be read") as excinfo:
        walk_local(tmp_path / name)
    assert fix in excinfo.value.fix


@pytest.mark.parametrize(
    "key", ["datasets[].mask.path", "datasets[].references[1].path", "datasets[].images"]
)
def test_the_error_of_an_unreadable_folder_names_its_own_key(tmp_path: Path, key: str) -> None:
    (tmp_path / "masks").mkdir()
    (tmp_path / "list.csv").write_text("path")
    for name, fix in {
        "maskz": f"did you mean {tmp_path}/masks? Otherwise correct {key} in the recipe",
        "list.csv": f"set {key} to a folder, or to the inside of an archive",
        "$HOME/masks": f"write the full path in {key}",
        "C:/masks": f"correct {key}: it is a Windows path",
    }.items():
        with pytest.raises(DatasetError) as excinfo:
            walk_local(tmp_path / name, key=key)
        assert excinfo.value.what.startswith(f"the folder in {key} cannot be read: ")
        assert excinfo.value.fix.startswith(fix)


def test_I21_a_subfolder_without_permission_is_a_problem_and_the_rest_is_scanned(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "x.png").write_bytes(b"x")
    (tmp_path / "secret").chmod(0)
    try:
        os.scandir(tmp_path / "secret").close()
        pytest.skip("this user may read everything")
    except PermissionError:
        result = walk_local(tmp_path)
        assert [problem.reason for problem in result.problems] == ["unreadable_folder"]
        assert len(result.images) == 1
    finally:
        (tmp_path / "secret").chmod(0o700)


def test_files_with_the_caption_suffix_are_captions(tmp_path: Path) -> None:
    for name in ("a.txt", "b.caption", "c.TXT"):
        (tmp_path / name).write_bytes(b"x")
    assert walk_local(tmp_path, (".txt",)).captions == ["a.txt"]
    assert walk_local(tmp_path, (".caption",)).captions == ["b.caption"]
    assert sorted(walk_local(tmp_path, (".caption", ".txt")).captions) == ["a.txt", "b.caption"]
    assert not walk_local(tmp_path).captions


def test_64_bit_inode_numbers_and_far_dates_fit_the_tables() -> None:
    assert [to_int64(inode) for inode in (5, 2**63 - 1, 2**63, 2**64 - 1)] == [5, 2**63 - 1, -(2**63), -1]
    assert [to_int64(time_ns) for time_ns in (-(2**63), -(2**63) - 1, 2**64 + 7)] == [-(2**63), 2**63 - 1, 7]
