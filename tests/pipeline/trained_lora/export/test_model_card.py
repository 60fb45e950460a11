from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.trained_lora.export.model_card import model_card
from pipeline.trained_lora.provenance import shareable
from tests.pipeline.trained_lora.slider_project import slider_project

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def card_of(project: Project) -> str:
    record = {
        "recipe": shareable(project.recipe),
        "model": {"base": project.recipe.model.base},
        "samples": {"number": 8},
    }
    headings = [prompt.heading for prompt in project.job().prompts]
    return model_card(record, steps=6, headings=headings, has_sheet=True)


def test_the_card_of_a_slider_states_what_each_scale_draws(make_project: Callable[..., Project]) -> None:
    card = card_of(slider_project(make_project, sample_every=2, sample_prompts=["a cat"]))
    assert "| at scale 1 | bright |\n| at scale -1 | dark |\n" in card
    assert "1. `a cat (lora scale: -1)`\n2. `a cat (lora scale: 0)`\n3. `a cat`\n" in card


def test_the_card_of_other_recipes_states_no_scale(make_project: Callable[..., Project]) -> None:
    card = card_of(make_project(sample_every=2, sample_prompts=["a cat"]))
    assert "at scale" not in card
    assert "1. `a cat`\n" in card
