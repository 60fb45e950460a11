from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.captions.tags import Tag, as_words, read_tags, require_known, tags_of
from pipeline.errors import ModelError
from pipeline.recipe.captions import TaggerSettings

TAGS = [Tag("general", 9), Tag("explicit", 9), Tag("long_hair", 0), Tag("Rose", 0), Tag("some_hero", 4)]


def chosen(*probabilities: float, **settings: Any) -> list[str]:
    return tags_of(TAGS, np.array(probabilities), TaggerSettings(**settings))


def test_tags_above_their_threshold_come_by_probability() -> None:
    assert chosen(0.9, 0.1, 0.35, 0.8, 0.85) == ["some hero", "Rose", "long hair"]
    assert chosen(0.9, 0.1, 0.3499, 0.8, 0.8499) == ["Rose"]
    assert chosen(0, 0, 0.5, 0.5, 0, threshold=0.5) == ["long hair", "Rose"], "ties are in the model's order"
    assert chosen(0, 0, 0.4, 0.4, 0.4, threshold=0.5, character_threshold=0.4) == ["some hero"]
    assert chosen(0, 0, 0, 0, 0) == []


def test_one_rating_at_most() -> None:
    assert chosen(0.2, 0.1, 0.9, 0, 0, ratings=True) == ["long hair", "general"]
    assert chosen(0.2, 0.9, 0.5, 0, 0, ratings=True, exclude=("explicit",)) == ["long hair"]


def test_a_vocabulary_and_excluded_tags() -> None:
    everything = (0.9, 0.9, 0.9, 0.8, 0.9)
    assert chosen(*everything, vocabulary=("Long  hair", "rose")) == ["long hair", "Rose"]
    assert chosen(*everything, exclude=("LONG_HAIR", "some hero")) == ["Rose"]
    assert chosen(*everything, vocabulary=("rose",), exclude=("rose",)) == []


def test_underscores_are_spaces_except_in_faces() -> None:
    faces = ["^_^", "o_o", "(o)_(o)", "|_|", ">_o", "0_0", "+_-", "<|>_<|>", ":3"]
    assert [as_words(face) for face in faces] == faces
    assert as_words("rose_(garden)") == "rose (garden)"
    assert as_words("no_bra") == "no bra"


def test_a_tag_that_the_model_does_not_have_is_an_error() -> None:
    require_known(TaggerSettings(vocabulary=("long hair",), exclude=("ROSE",)), TAGS, where="here")
    with pytest.raises(ModelError, match="exclude must have tags of the model, got long har") as caught:
        require_known(TaggerSettings(exclude=("long har",)), TAGS, where="here")
    assert caught.value.fix == "did you mean long hair?"


@pytest.mark.parametrize("text", ["id,name\n1,rose\n", "name,category\nrose,many\n", "name,category\nrose\n"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "selected_tags.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match="the tags of the tagger cannot be read"):
        read_tags(tmp_path)
