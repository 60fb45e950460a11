"""Rules of `captions.replace`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.images.formats import ImageError
from pipeline.recipe import CaptionSettings
from pipeline.storage.source import LocalSource
from pipeline.validated_dataset.captions import Caption, caption_of
from pipeline.validated_dataset.variants import variants


def caption_with(rules: tuple[dict[str, object], ...], root: Path, text: str, **values: object) -> Caption:
    (root / "a.txt").write_text(text, encoding="utf-8")
    settings = CaptionSettings.model_validate({"replace": rules, **values})
    return caption_of(settings, LocalSource(root), "a.png")


@pytest.mark.parametrize(
    ("rule", "caption", "expected"),
    [
        ({"find": "1girl", "with": "a woman"}, "1girl, hat, 1girl", "a woman, hat, a woman"),
        ({"find": "cat", "with": "dog"}, "a cat in a category, Cat", "a dog in a category, Cat"),
        ({"find": "cat", "with": "dog", "ignore_case": True}, "a Cat, CATS", "a dog, CATS"),
        ({"find": "cat", "with": "dog", "whole_words": False}, "cats", "dogs"),
        ({"find": "_", "with": " ", "whole_words": False}, "red_rose, old_vase", "red rose, old vase"),
        ({"find": "a.b", "with": "x"}, "a.b, acb", "x, acb"),
        ({"find": "a", "with": "\\1 \\g<0>"}, "a b", "\\1 \\g<0> b"),
        ({"find": "blurry"}, "rose, blurry, vase", "rose, vase"),
        ({"find": "blurry"}, "blurry, rose", "rose"),
        ({"find": "blurry"}, "rose, blurry", "rose"),
        ({"find": "blurry"}, "a blurry rose", "a rose"),
        ({"find": "blurry", "ignore_case": True}, "Rose, BLURRY, vase", "Rose, vase"),
        ({"find": "blurry"}, "rose, BLURRY", "rose, BLURRY"),
        ({"find": "cafe\u0301", "with": "tea"}, "a caf\u00e9, a cafe\u0301", "a tea, a tea"),
        ({"find": "a  red\trose", "with": "a vase"}, "a red rose", "a vase"),
        ({"find": " ", "with": "_", "whole_words": False}, "red rose", "red_rose"),
        ({"find": "\n", "with": ", "}, "a dog\nin a park", "a dog, in a park"),
        ({"find": ",", "with": " and"}, "red, wet rose", "red and wet rose"),
        ({"find": "("}, "photo (studio) of a dog", "photo studio) of a dog"),
        ({"find": "c++", "with": "a language"}, "c++, c++17, abc++", "a language, a language17, abc++"),
        (
            {"find": " man ", "with": " x ", "whole_words": False},
            "a human and a man here",
            "a human and a x here",
        ),
        ({"find": "man ", "with": "x ", "whole_words": False}, "a human and a mango", "a hux and a mango"),
        ({"find": " man", "with": "x", "whole_words": False}, "a human and a mango", "a human and axgo"),
        ({"find": " man ", "with": "x"}, "a man, human", "a x, human"),
        ({"find": "blurry"}, "blurry, blurry, rose, blurry, blurry", "rose"),
        ({"find": "not there", "with": "x"}, "a rose", "a rose"),
    ],
)
def test_texts_are_replaced_in_captions(
    tmp_path: Path, rule: dict[str, object], caption: str, expected: str
) -> None:
    assert caption_with((rule,), tmp_path, caption).texts == (expected,)


def test_rules_apply_in_their_order_to_each_caption_and_before_the_trigger(tmp_path: Path) -> None:
    rules = ({"find": "1girl", "with": "woman"}, {"find": "woman", "with": "sks"})
    texts = caption_with(rules, tmp_path, "1girl\nhat", lines="each", trigger="sks").texts
    assert texts == ("sks", "hat")
    settings = CaptionSettings.model_validate({"replace": rules, "lines": "each", "trigger": "sks"})
    assert variants(settings, texts) == ("sks", "sks, hat")


def test_a_caption_of_which_nothing_is_left_is_empty(tmp_path: Path) -> None:
    with pytest.raises(ImageError) as excinfo:
        caption_with(({"find": "blurry"},), tmp_path, "blurry")
    assert excinfo.value.reason == "caption_empty"
    assert excinfo.value.fix
    assert caption_with(({"find": "blurry"},), tmp_path, "blurry", fallback="a rose") == Caption(
        ("a rose",), "fallback"
    )
