"""Preview prompts are texts or sections with their own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.errors import RecipeError
from pipeline.models.recipe_support import require_preview_prompts
from pipeline.recipe import (
    PreviewPrompt,
    Recipe,
    TrainingSettings,
    load_recipe,
    project_root,
    recipe_from_mapping,
)
from pipeline.recipe.settings import VIOLATION
from pipeline.validated_dataset.variants import variants


def prompts(*values: Any) -> tuple[PreviewPrompt, ...]:
    return TrainingSettings.model_validate({"sample_prompts": values}).sample_prompts


def test_a_text_is_a_section_with_only_a_prompt() -> None:
    text, section = prompts("a rose", {"prompt": "a rose"})
    assert text == section == PreviewPrompt(prompt="a rose")
    assert (text.steps, text.lora_scale, text.seed, text.guidance_scale) == (20, None, None, None)


def test_a_recipe_of_an_earlier_run_whose_prompts_are_texts_can_be_read() -> None:
    training = TrainingSettings.model_validate_json('{"sample_prompts": ["a rose"]}')
    assert training.sample_prompts == prompts("a rose")
    assert TrainingSettings.model_validate_json(training.model_dump_json()) == training


def test_captions_of_previews_include_negative_prompts_once() -> None:
    values = ("a", {"prompt": "b", "negative_prompt": "c"}, {"prompt": "c", "negative_prompt": "a"})
    assert recipe_of({}, *values).preview_captions == ["a", "b", "c"]


def recipe_of(captions: dict[str, Any], *prompts: Any, others: list[dict[str, Any]] | None = None) -> Recipe:
    """Return a recipe with these captions settings and preview prompts, and with more datasets."""
    datasets = [{"name": "d0", "path": "/data/0", "captions": captions}, *(others or [])]
    values = {"datasets": datasets, "output_dir": "/out", "model": {"base": "owner/base"}}
    return recipe_from_mapping("x", {**values, "training": {"sample_prompts": list(prompts)}})


@pytest.mark.parametrize(
    ("trigger", "placeholder", "text"),
    [
        ("sks", "[trigger]", "[trigger] on a table"),
        ("sks dog", "<s0>", "a photo of <s0>, and <s0> again"),
        ("a\\1b", "[trigger]", "[trigger]"),
        ("näme", "TOK", "TOKEN and tok"),
        ("sks dog", "sks", "sks, running"),
        ("sks", "[trigger]", "[Trigger] on a table"),
    ],
)
def test_prompts_get_the_trigger_word_as_captions_do(trigger: str, placeholder: str, text: str) -> None:
    captions = {"trigger": trigger, "placeholder": placeholder}
    recipe = recipe_of(captions, text, {"prompt": "a", "negative_prompt": text})
    (caption,) = variants(recipe.datasets[0].captions, [text])
    prompt, with_negative = recipe.preview_prompts

    # Captions without the trigger word also get it in front; a prompt may leave it out.
    assert caption in (prompt.prompt, f"{trigger}, {prompt.prompt}")
    assert prompt.prompt == text.replace(placeholder, trigger)
    assert with_negative.negative_prompt == prompt.prompt
    assert recipe.training.sample_prompts[0].prompt == text
    assert set(recipe.preview_captions) == {prompt.prompt, "a"}
    assert recipe.with_triggers(text) == prompt.prompt


def test_prompts_without_a_placeholder_are_those_of_the_recipe() -> None:
    for captions in ({}, {"trigger": "sks"}, {"trigger": "sks", "placeholder": "[trigger]"}):
        recipe = recipe_of(captions, "a [name] in brackets", {"prompt": "b", "seed": 3, "steps": 4})
        assert recipe.preview_prompts == recipe.training.sample_prompts


def test_placeholders_of_several_datasets_are_replaced_unless_one_has_two_meanings() -> None:
    def dataset(number: int, **more: Any) -> dict[str, Any]:
        return {"name": f"d{number}", "path": f"/data/{number}", **more}

    dog = {"trigger": "sks dog", "placeholder": "[trigger]"}
    cat = {"trigger": "zwx cat", "placeholder": "[cat]"}
    both = recipe_of(dog, "[trigger] and [cat]", others=[dataset(1, captions=cat), dataset(2, captions=dog)])
    assert both.preview_prompts[0].prompt == "sks dog and zwx cat"

    # The class words of prior images are not what previews show.
    prior = dataset(1, role="prior", captions={**dog, "class_words": "dog"})
    assert recipe_of(dog, "[trigger]", others=[prior]).preview_prompts[0].prompt == "sks dog"

    other = dataset(1, captions={**cat, "placeholder": "[trigger]"})
    require_preview_prompts(recipe_of(dog, "a sks dog", others=[other]))
    with pytest.raises(
        RecipeError, match=r"\[trigger\] in a prompt stands for sks dog and zwx cat"
    ) as raised:
        require_preview_prompts(
            recipe_of(dog, "a", {"prompt": "b", "negative_prompt": "[trigger]"}, others=[other])
        )
    assert "training.sample_prompts[1].negative_prompt" in raised.value.where


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ({"prompt": "a", "height": 64}, "height", "height requires width, got height: 64"),
        ({"prompt": "a", "width": 64}, "width", "width requires height, got width: 64"),
        (3, "", "a prompt must be text or a section of keys, got 3"),
    ],
)
def test_half_a_size_and_other_values_are_errors(value: Any, key: str, message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        prompts(value)
    [error] = raised.value.errors()
    assert error["type"] == VIOLATION
    [violation] = error["ctx"]["violations"]
    assert (violation.key, violation.what) == (key, message)


@pytest.mark.parametrize(
    "settings",
    [{"steps": 0}, {"steps": "20"}, {"seed": -1}, {"guidance_scale": -1.0}, {"negative_prompt": ""}],
    ids=str,
)
def test_settings_are_validated_strictly(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        prompts({"prompt": "a", **settings})


def test_references_are_paths_in_order_and_survive_json() -> None:
    values = ({"prompt": "a", "references": ["b/1.png", "a/2.png"]},)
    training = TrainingSettings.model_validate({"sample_prompts": values})
    assert training.sample_prompts[0].references == (Path("b/1.png"), Path("a/2.png"))
    assert TrainingSettings.model_validate_json(training.model_dump_json()) == training


def test_relative_references_start_at_the_project_root(tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(
        "datasets: [{name: d, path: photos}]\noutput_dir: outputs/one\nmodel: {base: owner/name}\n"
        "training: {sample_prompts: [a, {prompt: b, references: [data/c.png]}]}\n",
        encoding="utf-8",
    )
    assert load_recipe(file).training.sample_prompts[1].references == (project_root() / "data/c.png",)
