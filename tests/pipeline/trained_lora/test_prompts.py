"""Prompts carry their settings into the worker and onto the sheets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.migrations import migrated_order
from pipeline.text_embeddings.stage import needed_texts
from pipeline.trained_lora.prompts import Prompt, prompts_from_json, prompts_to_json
from tests.pipeline.reference_family import with_references
from tests.pipeline.trained_lora.slider_project import slider_project

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

OWN = {
    "prompt": "a red cat",
    "negative_prompt": "a dog",
    "height": 64,
    "width": 96,
    "steps": 3,
    "guidance_scale": 2.5,
    "seed": 11,
    "lora_scale": 0.5,
}


def own_and_plain(make_project: Callable[..., Project]) -> tuple[Prompt, ...]:
    return make_project(sample_every=2, sample_prompts=[OWN, "a cat"]).job().prompts


def test_a_prompt_takes_its_settings_from_the_recipe(make_project: Callable[..., Project]) -> None:
    own, plain = own_and_plain(make_project)
    assert own.negative is not None
    assert own.negative.caption == "a dog"
    assert [each.caption for each in own.entries()] == ["a red cat", "a dog"]
    assert (own.size_hw, own.steps, own.guidance_scale, own.seed, own.lora_scale) == (
        (64, 96),
        3,
        2.5,
        11,
        0.5,
    )
    assert (plain.size_hw, plain.steps, plain.guidance_scale, plain.seed) == ((64, 64), 20, None, None)
    assert [each.caption for each in plain.entries()] == ["a cat"]


def test_a_heading_states_the_settings_that_differ_from_the_defaults(
    make_project: Callable[..., Project],
) -> None:
    own, plain = own_and_plain(make_project)
    assert plain.heading == "a cat"
    assert own.heading == (
        "a red cat (negative prompt: a dog, height: 64, width: 96, steps: 3, guidance scale: 2.5, seed: 11, "
        "lora scale: 0.5)"
    )


def test_prompts_survive_json_and_prompts_of_0_2_0_have_default_settings(
    make_project: Callable[..., Project],
) -> None:
    prompts = own_and_plain(make_project)
    values = json.loads(json.dumps(prompts_to_json(prompts)))
    assert prompts_from_json(values) == prompts
    earlier = [{key: values[1][key] for key in ("caption", "text", "size_hw")}]
    assert prompts_from_json(migrated_order({"prompts": earlier})["prompts"]) == prompts[1:]


def test_prompts_of_a_slider_without_a_scale_are_drawn_at_its_ends_and_in_the_middle(
    make_project: Callable[..., Project],
) -> None:
    settings = {"sample_every": 2, "sample_prompts": [OWN, "a cat"]}
    own, *plain = slider_project(make_project, **settings).job().prompts
    assert own.lora_scale == 0.5
    assert [(each.caption, each.lora_scale) for each in plain] == [
        ("a cat", -1.0),
        ("a cat", 0.0),
        ("a cat", 1.0),
    ]
    assert [each.heading for each in plain] == ["a cat (lora scale: -1)", "a cat (lora scale: 0)", "a cat"]


def test_captions_of_a_slider_are_drawn_at_its_ends_and_in_the_middle(
    make_project: Callable[..., Project],
) -> None:
    prompts = slider_project(make_project, sample_every=2).job().prompts
    assert [each.lora_scale for each in prompts[:3]] == [-1.0, 0.0, 1.0]
    assert len({each.caption for each in prompts[:3]}) == 1


def test_a_heading_states_the_names_of_references_and_json_their_paths(
    make_project: Callable[..., Project],
) -> None:
    plain = make_project(sample_every=2, sample_prompts=["a cat"]).job().prompts[0]
    prompt = replace(plain, references=(Path("/data/before.png"), Path("/data/style.png")))
    assert prompt.heading == "a cat (references: before.png, style.png)"
    assert prompts_from_json(json.loads(json.dumps(prompts_to_json([prompt])))) == (prompt,)


def test_default_prompts_have_the_references_of_their_samples(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_references(monkeypatch)
    references = [{"path": "/before"}, {"path": "/style"}]
    project = make_project(datasets={"edits": {"references": references}}, sample_every=2)
    job = project.job()
    images = dict(project.latents.select("sample_id", "reference_images").iter_rows())
    for prompt, item in zip(job.prompts, job.inputs, strict=False):
        assert prompt.caption == item.variants[0].caption
        before, style = (each["path"] for each in json.loads(images[item.sample_id]))
        assert prompt.references == (Path("/before") / before, Path("/style") / style)


def test_default_prompts_have_no_references_at_addresses(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_references(monkeypatch)
    datasets = {"edits": {"references": [{"path": "s3://bucket/before"}]}}
    for prompt in make_project(datasets=datasets, sample_every=2).job().prompts:
        assert prompt.references == ()


def test_the_cache_holds_the_prompts_that_are_drawn_with_the_trigger_word(
    make_project: Callable[..., Project],
) -> None:
    captions = {"trigger": "sks", "placeholder": "[trigger]"}
    project = make_project(
        datasets={"photos": {"captions": captions}},
        sample_every=2,
        sample_prompts=[{"prompt": "[trigger] on a table", "negative_prompt": "[trigger], blurry"}, "a cat"],
    )
    drawn = [entry.caption for prompt in project.job().prompts for entry in prompt.entries()]
    assert drawn == ["sks on a table", "sks, blurry", "a cat"]
    entries = RecipeEntries(project.recipe)
    cached = needed_texts(entries, project.text.clear())["caption"]
    assert set(drawn) <= set(cached)
    assert [prompt.text for prompt in project.job().prompts] == [
        entries.text_spec(caption) for caption in ("sks on a table", "a cat")
    ]
