"""Error numbers of the system, in words."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from pipeline.storage.os_errors import as_file_access_error, attach_path


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EMFILE])
def test_each_number_has_its_name_the_path_and_a_fix(number: int) -> None:
    stated = as_file_access_error(OSError(number, "text", "/data/x.png"))
    assert stated is not None
    assert errno.errorcode[number] in stated.what
    assert stated.where == "/data/x.png"
    assert "see that the path" not in stated.fix


def test_both_paths_of_a_rename_are_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as raised:
        (tmp_path / "a").rename(tmp_path / "b")
    stated = as_file_access_error(raised.value)
    assert stated is not None
    assert stated.where == f"{tmp_path / 'a'}\n{tmp_path / 'b'}"


def test_the_number_is_found_in_a_rust_librarys_text_and_below_another_error() -> None:
    outer = RuntimeError("writing failed")
    outer.__cause__ = ValueError("I/O error: No space left on device (os error 28)")
    stated = as_file_access_error(outer)
    assert stated is not None
    assert stated.what == "the disk is full (ENOSPC)"


def test_an_error_without_a_number_is_none_of_the_systems() -> None:
    assert as_file_access_error(ValueError("x")) is None
    assert as_file_access_error(OSError("a picture that ends too early")) is None


def test_a_refusal_of_a_library_gets_the_path_that_was_being_written() -> None:
    with pytest.raises(OSError, match="No space left") as raised, attach_path(Path("/out/lora")):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "/out/lora")
    with pytest.raises(KeyError), attach_path(Path("/out/lora")):
        raise KeyError("x")
