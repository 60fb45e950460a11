"""Preview prompts are texts or sections with their own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.recipe import PreviewPrompt, TrainingSettings, load_recipe, project_root
from pipeline.recipe.settings import VIOLATION


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
    assert TrainingSettings.model_validate({"sample_prompts": values}).preview_captions == ["a", "b", "c"]


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
