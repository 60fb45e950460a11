"""Paths as one piece of memory give back what was put in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.raw_images import path_list
from pipeline.raw_images.path_list import Paths

names = st.text(st.characters(exclude_characters="\0", exclude_categories=()), min_size=1, max_size=12)


def filled(paths: list[str]) -> Paths:
    kept = Paths()
    for path in paths:
        kept.append(path)
    return kept


@given(st.lists(names, max_size=30), st.integers(1, 40))
def test_paths_come_back_as_they_came_however_much_is_taken_at_a_time(paths: list[str], part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_list, "_BYTES_OF_A_PART", part)
        kept = filled(paths)
        assert list(kept) == paths
        assert len(kept) == len(paths)
        assert kept.are_ascii == all(path.isascii() for path in paths)
        texts = [path for path in paths if path.isascii()]
        assert filled(texts).series().to_list() == texts


def test_a_name_that_is_no_text_is_kept_and_makes_no_column() -> None:
    kept = filled(["a", "\udcff.png"])
    assert list(kept) == ["a", "\udcff.png"]
    with pytest.raises(UnicodeEncodeError):
        kept.series()


@given(st.sampled_from(["", "a/", "\udcff/b/"]), st.lists(st.lists(names, max_size=5), max_size=4))
def test_names_of_one_folder_come_as_if_one_by_one(folder: str, batches: list[list[str]]) -> None:
    together, one_by_one = Paths(), Paths()
    for batch in batches:
        together.extend(folder, batch)
        for name in batch:
            one_by_one.append(folder + name)
    assert list(together) == list(one_by_one)
    assert len(together) == len(one_by_one)
