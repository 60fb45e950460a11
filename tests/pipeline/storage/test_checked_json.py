"""No flipped bit of a JSON file is read as another value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.storage.checked_json import read_checked, write_checked

VALUES: dict[str, Any] = {"step": 500, "loss": 0.125, "names": ["a", "ö"], "none": None, "in": {"deep": True}}


def test_values_are_read_back_and_values_that_were_read_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_checked(path, VALUES)
    written = path.read_bytes()
    assert read_checked(path) == VALUES
    write_checked(path, json.loads(written))
    assert path.read_bytes() == written


def test_each_flipped_bit_is_an_error_or_changes_no_value(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_checked(path, VALUES)
    sound, num_errors = path.read_bytes(), 0
    for place in range(len(sound)):
        for bit in range(8):
            damaged = bytearray(sound)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                values = read_checked(path)
            except ValueError:
                num_errors += 1
                continue
            # A damaged name of the hash is an additional key, which no reader uses.
            assert {name: values.get(name) for name in VALUES} == VALUES, (place, bit)
    assert num_errors > 8 * len(sound) * 0.8


@pytest.mark.parametrize("text", ["", "[1]", "5", "null", '{"step": ', "\x00", "[" * 100_000])
def test_a_file_of_another_program_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match=r"Expecting value|must hold an object|nested too deeply"):
        read_checked(tmp_path / "record.json")


def test_a_file_nested_as_deeply_as_can_be_read_is_read_or_an_error(tmp_path: Path) -> None:
    """The hash is computed from the values as they are written, with more frames on the stack."""
    errors: set[str] = set()
    for depth in range(700, 1_000):
        (tmp_path / "record.json").write_text('{"in": ' + "[" * depth + "]" * depth + "}")
        try:
            read_checked(tmp_path / "record.json")
        except ValueError as err:
            errors.add(str(err))
    assert errors == {"record.json is nested too deeply"}


def test_a_file_of_an_earlier_release_has_no_hash_and_is_read(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"step": 400}')
    assert read_checked(tmp_path / "record.json") == {"step": 400}
