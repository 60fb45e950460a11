from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from diffusers import AnimaModularPipeline
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from pipeline.models.families import detect
from pipeline.models.families.family import FORCES_ZEROS, MODULAR
from pipeline.storage.atomic import write_text
from pipeline.trained_lora.export.model_card import model_card
from pipeline.trained_lora.provenance import shareable
from tests.pipeline.trained_lora.slider_project import slider_project
from tests.tensor_differences import differing_tensors
from tests.tiny_models import TinyModel

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def card_of(project: Project, **model: bool) -> str:
    record = {
        "recipe": shareable(project.recipe),
        "model": {"base": project.recipe.model.base, **model},
        "samples": {"number": 8},
    }
    headings = [prompt.heading for prompt in project.job().prompts]
    return model_card(record, steps=6, headings=headings, has_sheet=True)


def test_the_card_of_a_slider_states_what_each_scale_draws(make_project: Callable[..., Project]) -> None:
    card = card_of(slider_project(make_project, sample_every=2, sample_prompts=["a cat"]))
    assert "| at scale 1 | bright |\n| at scale -1 | dark |\n" in card
    assert "1. a cat (lora scale: -1)\n2. a cat (lora scale: 0)\n3. a cat\n" in card


def test_the_card_of_other_recipes_states_no_scale(make_project: Callable[..., Project]) -> None:
    card = card_of(make_project(sample_every=2, sample_prompts=["a cat"]))
    assert "at scale" not in card
    assert "1. a cat\n" in card


def test_the_card_states_the_empty_prompt_if_the_base_model_s_pipeline_would_use_zeros(
    make_project: Callable[..., Project], tiny_bases: dict[str, Path], tmp_path: Path
) -> None:
    project = make_project()
    assert 'negative_prompt=""' in card_of(project, **{FORCES_ZEROS: True})
    assert "negative_prompt" not in card_of(project)
    assert "DDIMScheduler" not in card_of(project)

    # The pipeline of SDXL has a default, which applies if the index does not have the key.
    for number, value in enumerate((True, False, None)):
        folder = tmp_path / str(number)
        folder.mkdir()
        index = json.loads((tiny_bases["sdxl"] / "model_index.json").read_text("utf-8"))
        del index[FORCES_ZEROS]
        write_text(
            folder / "model_index.json",
            json.dumps(index if value is None else {**index, FORCES_ZEROS: value}),
        )
        assert detect(folder).forces_zeros is (value is not False)
    assert not detect(tiny_bases["epsilon"]).forces_zeros


def test_the_card_loads_a_model_that_diffusers_has_as_a_modular_pipeline(
    make_project: Callable[..., Project], tiny_model: TinyModel
) -> None:
    project, anima = make_project(), tiny_model("Anima")
    assert detect(anima).is_modular
    assert not detect(tiny_model("Stable Diffusion 1.x and 2.x")).is_modular
    assert "ModularPipeline" not in card_of(project)

    card = card_of(project, **{MODULAR: True}).replace(project.recipe.model.base, str(anima))
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    load, _, use = code.partition("pipe.load_lora_weights(")
    assert use
    names: dict[str, Any] = {}
    exec(load, names)
    assert isinstance(names["pipe"], AnimaModularPipeline)
    assert names["pipe"].transformer is not None


def test_the_hub_finds_the_trigger_and_the_prompts(make_project: Callable[..., Project]) -> None:
    card = card_of(make_project(sample_every=2, sample_prompts=['a "red": cat', "a dog"]))

    front_matter = yaml.safe_load(card.split("---")[1])
    assert front_matter["widget"] == [{"text": 'a "red": cat'}, {"text": "a dog"}]
    assert "instance_prompt" not in front_matter


def test_the_card_of_an_oft_shows_how_peft_loads_it(trained_oft: Project) -> None:
    lora = trained_oft.recipe.output_dir / "lora"
    card = (lora / "README.md").read_text("utf-8")
    assert yaml.safe_load(card.split("---")[1])["tags"] == ["oft", "diffusers", "text-to-image"]
    assert "| OFT | blocks of 16 inputs |" in card
    assert "_kohya" not in card
    assert "load_lora_weights" not in card

    # The card of a base model in a folder has the folder's name only.
    code = card.split("```python")[1].split("```")[0].replace("<this folder>", str(lora))
    code = re.sub(r"(?<=from_pretrained\()'[^']*'", repr(trained_oft.recipe.model.base), code)
    names: dict[str, Any] = {}
    exec(code, names)
    stored = load_file(lora / "pytorch_lora_weights.safetensors")
    loaded = get_peft_model_state_dict(names["pipe"].unet, adapter_name="default")
    assert differing_tensors({f"unet.{name}": each for name, each in loaded.items()}, stored) == []


@pytest.fixture(scope="module")
def trained_oft(finished_once: Callable[..., Project]) -> Project:
    """A finished run with rotations, which tests only read."""
    return finished_once(steps=1, lora={"kind": "oft", "oft_block_size": 16})
