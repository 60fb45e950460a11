"""The dataset configurations of other trainers become recipes that `latentline validate` accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.new import command as new
from pipeline.errors import DatasetError
from pipeline.new_recipe.foreign_configs import FORMS
from pipeline.new_recipe.foreign_datasets import rules
from pipeline.new_recipe.foreign_values import CONVERSIONS
from pipeline.recipe.other_trainers import terms_by_trainer
from pipeline.recipe.schema import all_keys
from tests.pipeline.new_recipe.foreign_projects import as_dict, images, taken_over


def test_sd_scripts_dataset_toml(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "Blüten rot", 4, ".caption", ".txt")
    images(tmp_path / "more", 2)
    config = tmp_path / "dataset.toml"
    config.write_text(
        f"""
[general]
shuffle_caption = true
keep_tokens = 2
flip_aug = true
caption_dropout_rate = 0.05

[[datasets]]
resolution = [768, 768]
batch_size = 4

  [[datasets.subsets]]
  image_dir = '{tmp_path / "Blüten rot"}'
  num_repeats = 10
  class_tokens = "sks rose"
  caption_extension = ".txt"

  [[datasets.subsets]]
  image_dir = 'more'
  class_tokens = "rose"
  is_reg = true
  color_aug = true

  [[datasets.subsets]]
  image_dir = 'nowhere'
""",
        encoding="utf-8",
    )
    recipe, output = taken_over(configs, config)
    assert as_dict(recipe) == {
        "name": "Blueten_rot",
        "path": str(tmp_path / "Blüten rot"),
        "repeats": 10,
        "captions": {
            "from": "sidecar",
            "suffix": [".txt", ".caption"],
            "fallback": "sks rose",
            "shuffle": {"variants": 4, "keep": 2},
        },
    }
    assert as_dict(recipe, 1)["captions"]["text"] == "rose"
    assert (recipe.buckets.resolution, recipe.latents.flip, recipe.text.caption_dropout) == (768, True, 0.05)
    assert "read sd-scripts configuration" in output
    assert "num_repeats 10" in output
    assert "  all datasets: flip_aug true (latents.flip: true)" in output
    assert "batch_size 4: set training.batch_size" in output
    assert "is_reg true: it is an ordinary dataset now" in output
    assert "color_aug true: colours are not changed, because latents are cached" in output
    assert "dataset 3: the folder nowhere does not exist on this machine" in output


def concept(path: Path, **settings: Any) -> dict[str, Any]:
    text = {"prompt_source": "sample", "prompt_path": "", "enable_tag_shuffling": False, "keep_tags_count": 1}
    return {
        "name": "",
        "path": str(path),
        "enabled": True,
        "type": "STANDARD",
        "balancing": 1.0,
        "loss_weight": 1.0,
        "image": {"enable_random_flip": True, "random_rotate_max_angle": 5.0},
        **settings,
        "text": {**text, **settings.get("text", {})},
    }


@pytest.mark.parametrize("form", ["concepts", "configuration", "named file"])
def test_onetrainer_concepts(configs: Path, tmp_path: Path, form: str) -> None:
    folders = [images(tmp_path / name, 3, ".txt") for name in ("a", "b", "c", "d")]
    (tmp_path / "prompts.txt").write_text("a rose\na red rose\n", encoding="utf-8")
    concepts = [
        concept(folders[0], name="Große Rosen", balancing=3.0),
        concept(folders[1], balancing=0.5, loss_weight=0.5, text={"prompt_source": "filename"}),
        concept(folders[2], text={"prompt_source": "concept", "prompt_path": str(tmp_path / "prompts.txt")}),
        concept(folders[3], name="off", enabled=False),
        concept(folders[3], name="held out", type="VALIDATION"),
    ]
    content: Any = {"concepts": concepts, "learning_rate_scheduler": "COSINE"}
    if form == "concepts":
        content = concepts
    elif form == "named file":
        (tmp_path / "concepts.json").write_text(json.dumps(concepts), encoding="utf-8")
        content = {"concept_file_name": "concepts.json", "learning_rate_scheduler": "COSINE"}
    config = tmp_path / "onetrainer.json"
    config.write_text(json.dumps(content), encoding="utf-8")

    recipe, output = taken_over(configs, config)
    assert [each.loss_weight for each in recipe.datasets] == [1.0, 0.5, 1.0]
    assert [(each.name, each.repeats) for each in recipe.datasets] == [
        ("Grosse_Rosen", 3),
        ("b", 1),
        ("c", 1),
    ]
    captions = [as_dict(recipe, index)["captions"] for index in range(3)]
    assert captions[0] == {"from": "sidecar", "suffix": ".txt"}
    assert captions[1] == {"from": "filename"}
    assert captions[2] == {"from": "fixed", "text": "a rose"}
    assert recipe.latents.flip
    assert "dataset 2, balancing 0.5: repeats must be an integer" in output
    assert "it has 2 prompts, and a recipe has one text for all images" in output
    assert "off: it is disabled" in output
    assert "held out: it is for validation" in output
    assert ("learning_rate_scheduler COSINE: set training.lr_scheduler" in output) == (form != "concepts")


def test_ai_toolkit_yaml(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "my roses", 4, "", ".caption")
    (tmp_path / "my roses" / "0").unlink()
    config = tmp_path / "config" / "roses.yaml"
    config.parent.mkdir()
    config.write_text(
        """
job: extension
config:
  name: roses
  process:
    - type: sd_trainer
      trigger_word: p3rs0n
      network: {type: lora, linear: 16, linear_alpha: 16}
      datasets:
        - folder_path: "my roses"
          caption_ext: caption
          default_caption: a photo of a rose
          caption_dropout_rate: 0.05
          shuffle_tokens: false
          cache_latents_to_disk: true
          num_repeats: 2
          resolution: [512, 768, 1024]
          flip_y: true
      train: {lr: 1e-4, steps: 2000}
      model: {name_or_path: black-forest-labs/FLUX.1-dev}
""",
        encoding="utf-8",
    )
    recipe, output = taken_over(configs, config)
    assert as_dict(recipe) == {
        "name": "my_roses",
        "path": str(tmp_path / "my roses"),
        "repeats": 2,
        "captions": {
            "from": "sidecar",
            "suffix": ".caption",
            "fallback": "a photo of a rose",
            "trigger": "p3rs0n",
            "placeholder": "[trigger]",
        },
    }
    assert (recipe.buckets.resolutions, recipe.buckets.per_image) == ((512, 768, 1024), "each")
    assert recipe.text.caption_dropout == 0.05
    assert "network.linear 16: set training.lora.rank" in output
    assert "model.name_or_path black-forest-labs/FLUX.1-dev: set model.base" in output
    assert "flip_y true: images are mirrored left to right only" in output
    assert "shuffle_tokens" not in output
    assert "cache_latents_to_disk" not in output


@pytest.mark.parametrize("linked", [False, True], ids=["multidatabackend", "config that names it"])
def test_simpletuner_multidatabackend(configs: Path, tmp_path: Path, linked: bool) -> None:
    images(tmp_path / "a", 3, ".txt")
    images(tmp_path / "b", 3)
    backends = [
        {
            "id": "roses 1024",
            "type": "local",
            "instance_data_dir": str(tmp_path / "a"),
            "caption_strategy": "textfile",
            "repeats": 9,
            "resolution": 0.25,
            "resolution_type": "area",
            "crop": False,
            "cache_dir_vae": "cache/vae",
            "minimum_image_size": 0.2,
            "probability": 0.5,
        },
        {
            "id": "Roses-1024",
            "type": "local",
            "instance_data_dir": "b",
            "caption_strategy": "instanceprompt",
            "instance_prompt": "a rose",
            "resolution": 512,
            "resolution_type": "pixel",
        },
        {"id": "text", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/text"},
        {"id": "cloud", "type": "aws", "instance_data_dir": "x"},
    ]
    config = tmp_path / "multidatabackend.json"
    config.write_text(json.dumps(backends), encoding="utf-8")
    if linked:
        (tmp_path / "config.json").write_text('{"--data_backend_config": "multidatabackend.json"}')
        config = tmp_path / "config.json"
    recipe, output = taken_over(configs, config)
    assert [(each.name, each.repeats) for each in recipe.datasets] == [("roses_1024", 10), ("Roses-1024", 1)]
    assert as_dict(recipe)["captions"] == {"from": "sidecar", "suffix": ".txt"}
    assert as_dict(recipe, 1)["captions"] == {"from": "fixed", "text": "a rose"}
    assert recipe.buckets.resolution == 512
    assert "roses 1024, probability 0.5: set datasets[].weight" in output
    assert "text: not needed: cache_dir holds the cache" in output
    assert "cloud: its type aws is not read" in output
    assert "cache_dir_vae" not in output


def test_diffusion_pipe_dataset_toml(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "a", 3, ".txt")
    config = tmp_path / "dataset.toml"
    config.write_text(
        "resolutions = [512]\nenable_ar_bucket = true\n[[directory]]\npath = 'a'\nnum_repeats = 5\n"
    )
    recipe, _ = taken_over(configs, config)
    assert (recipe.datasets[0].repeats, recipe.buckets.resolution) == (5, 512)


@pytest.mark.parametrize(
    ("name", "content", "what", "fix"),
    [
        ("x.json", "{", "cannot be read: Expecting property name", "correct the file"),
        ("x.toml", "a = ", "cannot be read", "correct the file"),
        ("x.yaml", "a: [", "not valid YAML", ""),
        ("x.json", '{"a": 1}', "unknown form", FORMS),
        ("x.json", "[1, 2]", "unknown form", FORMS),
        (
            "x.toml",
            "[[directory]]\npath = 'C:\\data'",
            "C:\\data does not exist on this machine",
            "the paths",
        ),
        ("x.toml", "[[directory]]\npath = '.'", "contains no images", "the paths"),
        ("x.json", '{"concept_file_name": "nowhere.json"}', "nowhere.json does not exist", "pass that file"),
    ],
)
def test_a_file_that_cannot_be_used_is_reported_and_nothing_is_written(
    configs: Path, tmp_path: Path, name: str, content: str, what: str, fix: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(content, encoding="utf-8")
    with pytest.raises(DatasetError) as excinfo:
        CliRunner().invoke(new, ["roses", "--images", str(tmp_path / "in" / name)], catch_exceptions=False)
    assert what in excinfo.value.what
    assert fix in excinfo.value.fix
    assert not configs.exists()


def test_every_rule_names_an_existing_recipe_key_and_conversion() -> None:
    keys = set(all_keys())
    assert set(rules()) <= set(terms_by_trainer())
    for trainer, settings in rules().items():
        for theirs, rule in settings.items():
            if isinstance(rule, list):
                assert rule[0] in keys, f"{trainer}: {theirs}"
                assert rule[1] in CONVERSIONS, f"{trainer}: {theirs}"
