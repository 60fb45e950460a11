"""The study's datasets have the faults that their names state."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.choosing.datasets import NAME, SHAPE, study_datasets


@pytest.mark.parametrize("name", study_datasets())
def test_a_dataset_trains_on_the_concept_and_holds_at_least_four_pictures_out(name: str) -> None:
    dataset = study_datasets()[name]
    concept = [*dataset.concept, *dataset.held_out]
    assert {each.scene.shape for each in concept} == {SHAPE}
    assert all(f" {NAME} " in each.caption for each in concept)
    assert len(dataset.held_out) >= 4


@pytest.mark.parametrize("name", study_datasets())
def test_a_dataset_has_known_shapes_with_their_own_names(name: str) -> None:
    known = study_datasets()[name].known
    assert len(known) >= 4
    assert not any(NAME in each.caption for each in known)


def test_only_wrong_captions_describe_another_picture() -> None:
    for name, dataset in study_datasets().items():
        pictures = [*dataset.concept, *dataset.held_out, *dataset.known]
        wrong = [each for each in pictures if each.caption.replace(NAME, SHAPE) != each.scene.caption]
        assert len(wrong) == (6 if name == "wrong captions" else 0), name


def test_pictures_of_one_background_are_on_white() -> None:
    dataset = study_datasets()["white backgrounds"]
    assert {each.scene.background for each in (*dataset.concept, *dataset.held_out)} == {"white"}


def test_held_out_pictures_are_no_copies_of_training_pictures(tmp_path: Path) -> None:
    for name, dataset in study_datasets().items():
        dataset.write(tmp_path / name)
        files = list((tmp_path / name).rglob("*.png"))
        assert len(files) == len(dataset.concept) + len(dataset.held_out) + len(dataset.known)
        assert len({file.read_bytes() for file in files}) == len(files)
