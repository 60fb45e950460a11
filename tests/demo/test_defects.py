"""Planted defects are found before training; the complete study is `python -m demo.defects`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from demo.cached_dataset import dataset
from demo.concept_pictures import write_pictures
from demo.defects import plant, report, top, trial
from demo.diagnosing import diagnosed
from demo.world import invented_name


def test_four_images_have_a_defect_and_all_others_stay(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    planted = plant(tmp_path, seed=3)
    changed = {file for file, content in before.items() if file.read_bytes() != content}
    assert Counter(planted.values()) == {"caption": 2, "shape": 1, "blurred": 1}
    assert {file.stem for file in changed} == set(planted)
    is_caption = {file.stem: file.suffix == ".txt" for file in changed}
    assert is_caption == {name: kind == "caption" for name, kind in planted.items()}


def test_the_report_counts_the_first_six_and_names_what_is_missed() -> None:
    planted = {"a": "caption", "b": "caption", "c": "shape", "d": "blurred"}
    found = {
        "seed": 0,
        "planted": planted,
        "captions": ["b", "x", "a"],
        "pictures": ["d", "y"],
        "clean_captions": [],
        "clean_pictures": ["y"],
    }
    assert top(found) == ["b", "x", "a", "d", "y"]
    assert list(report([found]))[-1] == "| 0 | 3 of 4, not shape | 1 | 2 | 1 |"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_base_model_cannot_tell_captions_of_words_that_it_does_not_know(tmp_path: Path) -> None:
    def invent(pictures: Path) -> dict[str, str]:
        random = np.random.default_rng(0)
        for number, image in enumerate(sorted(pictures.rglob("*.png"))):
            if number % 4:
                image.unlink()
                image.with_suffix(".txt").unlink()
            else:
                image.with_suffix(".txt").write_text(f"a {invented_name(random)}", encoding="utf-8")
        return {}

    recipe, _ = dataset(tmp_path, tmp_path / "cache", 0, invent)
    report = diagnosed(recipe, frozenset()).report
    assert report["captions"] == 12
    assert not report["decided"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_planted_defects_are_among_the_first_six_and_few_clean_images(tmp_path: Path) -> None:
    result = trial(tmp_path, tmp_path / "cache", 0)
    assert set(result["planted"]) <= set(top(result))
    assert len({*result["clean_captions"], *result["clean_pictures"]}) <= 1
