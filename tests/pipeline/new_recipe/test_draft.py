"""Names of datasets are transliterated and unique."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DatasetError
from pipeline.new_recipe.draft import dataset_names, draft_from_folder


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("Bl\u00fcten", "Blueten"),
        ("Blu\u0308ten", "Blueten"),
        ("\u00c4pfel & Stra\u00dfe", "Aepfel_Strasse"),
        ("caf\u00e9 \u00e0 la cr\u00e8me", "cafe_a_la_creme"),
        ("\u0141\u00f3d\u017a", "Lodz"),
        ("\uff26\uff4f\uff4f 1", "Foo_1"),
        ("\u732b", "u732b"),
        ("my-roses_2", "my-roses_2"),
        (" ?! ", "roses"),
    ],
)
def test_letters_are_transliterated(wanted: str, name: str) -> None:
    assert dataset_names([wanted], otherwise="roses") == [name]


def test_names_that_become_equal_are_numbered() -> None:
    wanted = ["Bl\u00fcten", "Blueten", "BLUETEN", "Blueten-2", "\U0001f600", "!"]
    names = dataset_names(wanted, otherwise="x")
    assert names == ["Blueten", "Blueten-2", "BLUETEN-3", "Blueten-2-2", "x", "x-2"]


@given(st.lists(st.text(max_size=5), max_size=6))
def test_names_are_valid_and_differ_in_more_than_case(wanted: list[str]) -> None:
    names = dataset_names(wanted, otherwise="x")
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9_-]+", name)] == []
    assert len({name.casefold() for name in names}) == len(wanted)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("train-0.tar", ""), ("train-0.parquet", ", image_column: image")],
    ids=["tar", "parquet"],
)
def test_a_folder_of_shards_is_an_error_with_the_keys_to_write(tmp_path: Path, name: str, keys: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DatasetError, match="contains no images") as excinfo:
        draft_from_folder(tmp_path)
    assert excinfo.value.fix is not None
    assert f"[{{path: {tmp_path}/*{Path(name).suffix}{keys}}}]" in excinfo.value.fix
