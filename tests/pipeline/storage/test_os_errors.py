"""Errors of the operating system become messages with a path and a fix."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from pipeline.errors import StoreError
from pipeline.storage.os_errors import as_file_access_error, attach_path, require_disk_space


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG])
def test_an_error_number_becomes_its_name_the_path_and_a_fix(number: int) -> None:
    error = as_file_access_error(OSError(number, "text", "/data/x.png"))
    assert error is not None
    assert errno.errorcode[number] in error.what
    assert error.where == "/data/x.png"
    assert "check that the path" not in error.fix


def test_both_paths_of_a_rename_are_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as raised:
        (tmp_path / "a").rename(tmp_path / "b")
    error = as_file_access_error(raised.value)
    assert error is not None
    assert error.where == f"{tmp_path / 'a'}\n{tmp_path / 'b'}"


def test_an_error_number_is_found_in_the_text_of_a_rust_library_and_in_a_cause() -> None:
    outer = RuntimeError("writing failed")
    outer.__cause__ = ValueError("I/O error: No space left on device (os error 28)")
    error = as_file_access_error(outer)
    assert error is not None
    assert error.what == "the disk is full (ENOSPC)"


@pytest.mark.parametrize(
    "error",
    [
        OSError("No space left on device (os error 28)"),
        PermissionError("parquet: underlying IO error: No space left on device (os error 28)"),
        RuntimeError('Err value: Os { code: 28, kind: StorageFull, message: "No space left on device" }'),
    ],
)
def test_errors_of_rust_libraries_have_their_number_only_in_the_text(error: Exception) -> None:
    access_error = as_file_access_error(error)
    assert access_error is not None
    assert access_error.what == "the disk is full (ENOSPC)"


def test_an_error_without_a_number_is_not_an_error_of_the_operating_system() -> None:
    assert as_file_access_error(ValueError("x")) is None
    assert as_file_access_error(OSError("a truncated image")) is None


def test_encoding_needs_space_for_the_missing_entries_and_a_reserve(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    require_disk_space(tmp_path / "new" / "cache", 1)
    with pytest.raises(StoreError, match="bytes free for the missing entries"):
        require_disk_space(tmp_path / "new" / "cache", 2 * free_bytes)


def test_an_error_of_a_library_gets_the_path_that_was_being_written() -> None:
    with pytest.raises(OSError, match="No space left") as raised, attach_path(Path("/out/lora")):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "/out/lora")
    with pytest.raises(KeyError), attach_path(Path("/out/lora")):
        raise KeyError("x")


@pytest.mark.parametrize("name", ["a\n  fix:   run x", "\x1b[2J", "a\rb\u2028c"])
def test_a_file_name_stays_on_its_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError) as excinfo:  # noqa: PT011 - any of the system
        (tmp_path / "missing" / name).open()
    error = as_file_access_error(excinfo.value)
    assert error is not None
    assert error.where == f"{tmp_path}/missing/{name.encode('unicode_escape').decode()}"
