"""Files of strangers are opened only if they are regular, of bounded size and inside their folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.storage.regular_files import InsideFolder, RefusedFileError, open_regular, read_all


def refusal(path: Path, **options: int) -> str:
    with pytest.raises(RefusedFileError) as caught:
        open_regular(path, **options)
    return caught.value.reason


@pytest.mark.timeout(10)
def test_a_fifo_a_device_and_a_link_to_one_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    assert {refusal(path) for path in (tmp_path / "fifo", tmp_path / "link", Path("/dev/null"))} == {
        "special_file"
    }


def test_a_file_above_the_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(10**12)
    assert refusal(path, max_bytes=10**12 - 1) == "file_too_large"
    open_regular(path, max_bytes=10**12).close()


def test_a_regular_file_is_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1234")
    with open_regular(path) as file:
        assert read_all(file) == b"1234"


def test_a_link_is_followed_inside_the_folder_and_refused_outside(tmp_path: Path) -> None:
    root, secret = tmp_path / "data", tmp_path / "secret.txt"
    (root / "sub").mkdir(parents=True)
    secret.write_bytes(b"secret")
    (root / "a.txt").write_bytes(b"a")
    (root / "sub" / "up.txt").symlink_to("../a.txt")
    (root / "out.txt").symlink_to(secret)
    (root / "chain.txt").symlink_to("out.txt")
    (root / "folder").symlink_to(tmp_path)
    (root / "gone.txt").symlink_to("nothing")
    inside = InsideFolder(root)

    for name in ("a.txt", "sub/up.txt"):
        with inside.open(name) as file:
            assert file.read() == b"a"
    for name in ("out.txt", "chain.txt", "folder/secret.txt"):
        with pytest.raises(RefusedFileError, match="outside the dataset's folder") as caught:
            inside.open(name)
        assert str(secret) in caught.value.detail
        assert "follow_links: true" in caught.value.fix
    with pytest.raises(FileNotFoundError):
        inside.open("gone.txt")


def test_the_folder_itself_may_be_a_link_and_a_neighbour_with_the_same_start_is_outside(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data2").mkdir()
    (tmp_path / "data2" / "a.txt").write_bytes(b"a")
    (tmp_path / "data" / "b.txt").write_bytes(b"b")
    (tmp_path / "data" / "a.txt").symlink_to(tmp_path / "data2" / "a.txt")
    (tmp_path / "link").symlink_to("data")
    inside = InsideFolder(tmp_path / "link")
    inside.open("b.txt").close()
    with pytest.raises(RefusedFileError):
        inside.open("a.txt")


@pytest.mark.parametrize(
    "path", ["../secret.txt", "sub/../../secret.txt", "/etc/passwd", "sub/deep/../../../secret.txt"]
)
def test_a_path_never_leads_upwards(tmp_path: Path, path: str) -> None:
    (tmp_path / "data" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "secret.txt").write_bytes(b"secret")
    with pytest.raises(OSError, match=r"outside the dataset|No such file"):
        InsideFolder(tmp_path / "data").open(path)


def test_a_folder_that_may_be_entered_but_not_listed_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "sub"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"a")
    folder.chmod(0o311)
    with InsideFolder(tmp_path / "data").open("sub/a.txt") as file:
        assert file.read() == b"a"


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_deep_path_and_many_folders_leave_few_descriptors_open(tmp_path: Path) -> None:
    deep = "d/" * 900
    inside = InsideFolder(tmp_path)
    (tmp_path / deep).mkdir(parents=True)
    for number in range(100):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a").write_bytes(b"a")
    (tmp_path / deep / "a").write_bytes(b"a")
    num_before = num_open()
    for folder in (*map(str, range(100)), deep.rstrip("/")):
        inside.open(f"{folder}/a").close()
    assert num_open() <= num_before + 5
    del inside
    assert num_open() <= num_before
