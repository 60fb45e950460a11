"""The keys of captions from a model: their rules, and that no other recipe contains them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.captions import CaptionSettings


def recipe(**captions: Any) -> Recipe:
    values = {
        "datasets": [{"name": "photos", "path": "data/photos", "captions": captions}],
        "output_dir": "outputs/x",
        "model": {"base": "owner/name"},
    }
    return recipe_from_mapping("x", values)


def test_the_dump_of_other_captions_is_as_before_these_keys_existed() -> None:
    """Code versions of assets, the index of read captions and the recipes of workers are made from it."""
    assert list(json.loads(CaptionSettings().model_dump_json())) == [
        *("from", "suffix", "fallback", "json_key", "text", "columns", "lines", "encoding"),
        *("fallback_encoding", "replace", "trigger", "placeholder", "class_words", "prefix", "postfix"),
        *("shuffle", "drop_tags"),
    ]
    assert not recipe(trigger="sks").has_model_captions


def test_a_recipe_with_a_model_survives_json() -> None:
    values = {
        "from": "model",
        "model": "owner/captioner",
        "max_tokens": 50,
        "suffix": ".caption",
        "as": "column",
    }
    written = recipe(**values)
    assert written.has_model_captions
    assert Recipe.model_validate_json(written.model_dump_json()) == written


@pytest.mark.parametrize(
    ("captions", "what"),
    [
        ({"from": "model"}, "captions.model is required with from: model"),
        ({"model": "owner/captioner"}, "model requires from: model, got from: sidecar"),
        ({"from": "filename", "prompt": "What is this?"}, "prompt requires from: model, got from: filename"),
        (
            {"from": "model", "model": "owner/captioner", "when": "always", "suffix": ".caption"},
            "suffix requires when: missing, got when: always",
        ),
        (
            {"from": "model", "model": "owner/captioner", "max_tokens": 0},
            "max_tokens must be between 1 and 4096",
        ),
        (
            {"from": "model", "model": "owner/tagger", "tagger": {}, "prompt": "What is this?"},
            "prompt requires a vision-language model, and captions.tagger states a tagger",
        ),
        (
            {"from": "model", "model": "owner/tagger", "tagger": {}, "examples": [{"caption": "a rose"}]},
            "examples requires a vision-language model",
        ),
        ({"from": "model", "model": "owner/captioner", "examples": [{"image": "a.png"}]}, "caption"),
        (
            {"from": "model", "model": "owner/tagger", "tagger": {}, "quantize": "int8"},
            "quantize requires a vision-language model",
        ),
        (
            {"from": "model", "model": "owner/captioner", "quantize": "nf4"},
            "captions.quantize must be int8",
        ),
        ({"as": "column"}, "as requires from: model, got from: sidecar"),
        (
            {"from": "model", "model": "owner/captioner", "as": "column", "when": "always"},
            "when must not be set next to as: column, which captions all images, got always",
        ),
        (
            {"from": "model", "model": "owner/captioner", "as": "column", "columns": ["text"]},
            "columns requires from: column, got from: model",
        ),
        ({"quantize": "int8"}, "quantize requires from: model, got from: sidecar"),
        ({"tagger": {}}, "tagger requires from: model, got from: sidecar"),
        (
            {"from": "model", "model": "owner/tagger", "tagger": {"threshold": 0}},
            "threshold must be greater than 0 and at most 1",
        ),
        ({"from": "model", "model": "owner/captioner", "vocabulary": "tags.txt"}, "unknown key vocabulary"),
    ],
)
def test_a_mistake_names_the_rule(captions: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        recipe(**captions)
