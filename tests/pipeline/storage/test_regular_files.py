"""Files of strangers are opened only if they are regular, of bounded size and inside their folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.storage.regular_files import InsideCheck, RefusedFileError, open_regular, read_all


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
    check = InsideCheck(root)

    for name in ("a.txt", "sub/up.txt"):
        with check.open(f"{root}/{name}") as file:
            assert file.read() == b"a"
    for name in ("out.txt", "chain.txt", "folder/secret.txt"):
        with pytest.raises(RefusedFileError, match="outside the dataset's folder") as caught:
            check.open(f"{root}/{name}")
        assert str(secret) in caught.value.detail
        assert "follow_links: true" in caught.value.fix
    with pytest.raises(FileNotFoundError):
        check.open(f"{root}/gone.txt")


def test_the_folder_itself_may_be_a_link_and_a_neighbour_with_the_same_start_is_outside(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data2").mkdir()
    (tmp_path / "data2" / "a.txt").write_bytes(b"a")
    (tmp_path / "data" / "b.txt").write_bytes(b"b")
    (tmp_path / "data" / "a.txt").symlink_to(tmp_path / "data2" / "a.txt")
    (tmp_path / "link").symlink_to("data")
    check = InsideCheck(tmp_path / "link")
    check.open(f"{tmp_path}/link/b.txt").close()
    with pytest.raises(RefusedFileError):
        check.open(f"{tmp_path}/link/a.txt")
