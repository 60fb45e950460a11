"""Settings of other trainers are taken over where their meaning is the same, and reported otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.tiny_models import make_tiny_flux2_klein, make_tiny_flux_kontext
from pipeline.recipe import DropTagsSettings, ShuffleSettings
from tests.pipeline.new_recipe.foreign_projects import as_dict, directories, images, taken_over
from tests.trainer_projects import PROJECTS


def test_datasets_with_different_resolutions_keep_their_own(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "a", 3, ".txt")
    images(tmp_path / "b", 3, ".txt")
    (tmp_path / "dataset.toml").write_text(directories("a", "b", resolutions="[500];[512, 768]"))
    recipe, output = taken_over(configs, tmp_path / "dataset.toml")
    assert [each.name for each in recipe.datasets] == ["a", "b"]
    assert [(each.resolution, each.resolutions) for each in recipe.datasets] == [
        (512, ()),
        (None, (512, 768)),
    ]
    assert (recipe.buckets.resolution, recipe.buckets.per_image) == (1024, "each")
    assert "dataset 1: resolutions [500] (datasets[].resolution)" in output
    assert "a: resolution: 512 instead of 500, because it must be a multiple of 64" in output


SUBSETS = """
[[datasets]]
[[datasets.subsets]]
image_dir = "a"
flip_aug = true
caption_dropout_rate = 0.2
caption_tag_dropout_rate = 0.1
keep_tokens = 2
[[datasets.subsets]]
image_dir = "b"
caption_dropout_rate = 0.0
shuffle_caption = true
caption_tag_dropout_rate = 0.3
"""


def test_mirroring_and_dropout_of_captions_and_tags_are_taken_over_for_each_dataset(
    configs: Path, tmp_path: Path
) -> None:
    images(tmp_path / "a", 3, ".txt")
    images(tmp_path / "b", 3, ".txt")
    (tmp_path / "dataset.toml").write_text(SUBSETS)
    recipe, output = taken_over(configs, tmp_path / "dataset.toml")
    a, b = recipe.datasets
    assert recipe.mirrored_datasets == ["a"]
    assert recipe.caption_dropouts == {"a": 0.2, "b": 0.0}
    assert a.captions.drop_tags == DropTagsSettings(rate=0.1, keep=2)
    assert b.captions.shuffle == ShuffleSettings(variants=4, keep=0)
    assert b.captions.drop_tags == DropTagsSettings(rate=0.3)
    assert "not taken over" not in output


def test_tag_dropout_that_is_off_is_not_taken_over(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "a", 2, ".txt")
    concept = {"path": str(tmp_path / "a"), "text": {"tag_dropout_probability": 0.5}}
    for is_on, mode in ((False, "FULL"), (True, "RANDOM"), (True, "FULL")):
        concept["text"] |= {"tag_dropout_enable": is_on, "tag_dropout_mode": mode}
        (tmp_path / "concepts.json").write_text(json.dumps([concept]))
        (configs / "roses.yaml").unlink(missing_ok=True)
        recipe, output = taken_over(configs, tmp_path / "concepts.json")
        assert (recipe.datasets[0].captions.drop_tags is not None) == is_on
        assert ("tag_dropout_mode FULL" in output) == (is_on and mode == "FULL")


def test_the_same_images_at_two_resolutions_become_one_dataset(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "a", 3, ".txt")
    text = directories("a", "a", resolutions="[512];[768]", num_repeats="2;2")
    (tmp_path / "dataset.toml").write_text(text)
    recipe, output = taken_over(configs, tmp_path / "dataset.toml")
    assert [(each.name, each.repeats) for each in recipe.datasets] == [("a", 2)]
    assert (recipe.buckets.resolutions, recipe.buckets.per_image) == ((512, 768), "each")
    assert "dataset 1, dataset 2: 3 images" in output


def test_a_resolution_that_is_no_multiple_of_the_step_is_rounded_and_reported(
    configs: Path, tmp_path: Path
) -> None:
    images(tmp_path / "a", 3, ".txt")
    (tmp_path / "dataset.toml").write_text(directories("a", resolutions="[500]"))
    recipe, output = taken_over(configs, tmp_path / "dataset.toml")
    assert recipe.buckets.resolution == 512
    assert "buckets.resolution: 512 instead of 500, because it must be a multiple of 64" in output


@pytest.mark.parametrize(
    ("trainer", "ignored"),
    [
        ("sd_scripts", {"Kaetzchen_grau": ("*/*",)}),
        ("onetrainer", {"Kaetzchen": ("*/*", "*-masklabel.png")}),
        ("ai_toolkit", {"Kaetzchen_grau": ("_controls",)}),
        ("simpletuner", {}),
        ("diffusion_pipe", {"Kaetzchen_grau": ("*/*",)}),
    ],
    ids=str,
)
def test_masks_controls_and_unread_sub_folders_are_excluded_and_reported(
    configs: Path, tmp_path: Path, trainer: str, ignored: dict[str, tuple[str, ...]]
) -> None:
    recipe, output = taken_over(configs, PROJECTS[trainer](tmp_path))
    excluded = {dataset.name: dataset.exclude for dataset in recipe.datasets if dataset.exclude}
    assert excluded == ignored
    for patterns in ignored.values():
        assert f"exclude: {', '.join(patterns)}" in output


CONTROLS = """\
config:
  process:
    - datasets:
        - folder_path: "after"
          control_path: ["before", "after/style"]
          caption_ext: "txt"
"""


def test_control_images_become_references_if_the_base_model_accepts_as_many(
    configs: Path, tmp_path: Path
) -> None:
    images(tmp_path / "after", 3, ".txt")
    folders = [images(tmp_path / name, 3) for name in ("before", "after/style")]
    (tmp_path / "edits.yaml").write_text(CONTROLS)
    make_tiny_flux2_klein(tmp_path / "klein")
    make_tiny_flux_kontext(tmp_path / "kontext")

    recipe, output = taken_over(configs, tmp_path / "edits.yaml", "--base", str(tmp_path / "klein"))
    assert [each.path for each in recipe.datasets[0].references] == folders
    assert "2 folders of control images as references" in output
    assert "control_path" not in output

    (configs / "roses.yaml").unlink()
    recipe, output = taken_over(configs, tmp_path / "edits.yaml", "--base", str(tmp_path / "kontext"))
    assert recipe.datasets[0].references == ()
    assert "set datasets[].references: [{path: the folder}] if the base model edits images" in output

    # A base model on the Hub is unknown, and a folder that does not exist is reported.
    (configs / "roses.yaml").unlink()
    recipe, _ = taken_over(configs, tmp_path / "edits.yaml")
    assert len(recipe.datasets[0].references) == 2
    (configs / "roses.yaml").unlink()
    (tmp_path / "before").rename(tmp_path / "elsewhere")
    recipe, output = taken_over(configs, tmp_path / "edits.yaml")
    assert recipe.datasets[0].references == ()
    assert "control_path" in output


@pytest.mark.parametrize("trainer", ["onetrainer", "simpletuner"])
def test_each_line_of_a_caption_file_is_a_caption_where_the_trainer_reads_it_so(
    configs: Path, tmp_path: Path, trainer: str
) -> None:
    recipe, output = taken_over(configs, PROJECTS[trainer](tmp_path))
    assert [dataset.captions.lines for dataset in recipe.datasets] == ["each", "one", "one"]
    assert "lines: each, because" in output


def test_a_job_of_ai_toolkit_gives_no_trigger_word_to_regularisation_images(
    configs: Path, tmp_path: Path
) -> None:
    recipe, output = taken_over(configs, PROJECTS["ai_toolkit"](tmp_path))
    triggers = [(each.captions.trigger, each.captions.placeholder) for each in recipe.datasets]
    assert triggers == [("k4tz", "[trigger]"), ("k4tz", "[trigger]"), (None, None)]
    assert recipe.preview_captions == ["k4tz, green eyes"]
    assert "other settings of the model and the training" in output


def test_settings_of_captions_that_work_together_in_simpletuner(configs: Path, tmp_path: Path) -> None:
    recipe, output = taken_over(configs, PROJECTS["simpletuner"](tmp_path))
    assert [each.captions.prefix for each in recipe.datasets] == ["", "Küche ", ""]
    assert recipe.datasets[2].captions.text == "ein Foto"
    assert recipe.datasets[2].limit == 100
    assert "kätzchen-64, kätzchen-96: 4 images" in output

    images(tmp_path / "tags", 2, ".txt")
    backend = {
        "id": "tags",
        "type": "local",
        "instance_data_dir": str(tmp_path / "tags"),
        "caption_strategy": "textfile",
        "caption_shuffle": {"enable": True, "count": 3, "split_on": "period", "position_start": 2},
    }
    (tmp_path / "tags.json").write_text(json.dumps([backend]))
    (configs / "roses.yaml").unlink()
    recipe, output = taken_over(configs, tmp_path / "tags.json")
    assert as_dict(recipe)["captions"]["shuffle"] == {"variants": 4, "separator": ".", "keep": 2}
    assert "not recognised" not in output


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ("shuffle_caption = true", {"variants": 4, "keep": 0}),
        ("shuffle_caption = true\nkeep_tokens = 3", {"variants": 4, "keep": 3}),
        ("shuffle_caption = false\nkeep_tokens = 3", None),
    ],
)
def test_tags_are_kept_at_the_start_as_by_sd_scripts(
    configs: Path, tmp_path: Path, settings: str, wanted: dict[str, int] | None
) -> None:
    images(tmp_path / "a", 2, ".txt")
    (tmp_path / "x.toml").write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'\n{settings}\n")
    recipe, output = taken_over(configs, tmp_path / "x.toml")
    assert as_dict(recipe)["captions"].get("shuffle") == wanted
    assert ("keep_tokens 3" in output) == (wanted is not None and "keep_tokens" in settings)


def test_a_setting_that_no_rule_knows_is_reported(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "a", 2, ".txt")
    (tmp_path / "dataset.toml").write_text(directories("a", resolutions="[512]", sparkle="3"))
    _, output = taken_over(configs, tmp_path / "dataset.toml")
    assert "sparkle 3: this setting is not recognised" in output


def test_settings_that_are_off_in_the_file_and_always_on_here_are_reported(
    configs: Path, tmp_path: Path
) -> None:
    images(tmp_path / "a", 2, ".txt")
    (tmp_path / "dataset.toml").write_text(directories("a", resolutions="[512]"))
    _, output = taken_over(configs, tmp_path / "dataset.toml")
    assert "enable_ar_bucket false: images are always sorted into buckets" in output
