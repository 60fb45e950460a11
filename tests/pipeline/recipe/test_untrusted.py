"""With LATENTLINE_UNTRUSTED=1, a stranger's recipe runs no code and stays inside the project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ModelError, RecipeError
from pipeline.models.diffusers_folder import weight_files
from pipeline.recipe import load_recipe, load_recipe_folder, project_root
from pipeline.recipe.keys import field_below
from pipeline.recipe.schema import RecipeFile, all_keys
from pipeline.recipe.untrusted import KEYS, untrusted_mistakes
from pipeline.recipe.yaml_document import dotted

RECIPE = """datasets:
  - {name: photos, path: data/photos}
output_dir: outputs/small
model: {base: owner/name}
training: {optimizer: adamw}
"""


@pytest.fixture(autouse=True)
def untrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATENTLINE_UNTRUSTED", "1")


def write(folder: Path, text: str, name: str = "small") -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("optimizer: adamw", "optimizer: os.abort", "training.optimizer"),
        ("data/photos", "/etc", "datasets[0].path"),
        ("data/photos", "~/photos", "datasets[0].path"),
        ("data/photos", "data/../../..", "datasets[0].path"),
        ("data/photos", "https://host/photos", "datasets[0].path"),
        ("data/photos", "zip://p::data/a.zip", "datasets[0].path"),
        ("path: data/photos", "path: data/list.csv, images: /etc", "datasets[0].images"),
        ("path: data/photos", "path: data/photos, mask: {path: /etc}", "datasets[0].mask.path"),
        (
            "path: data/photos",
            "path: data/photos, references: [{path: data/b}, {path: /etc}]",
            "datasets[0].references[1].path",
        ),
        ("outputs/small", "/tmp/small", "output_dir"),
        ("output_dir", "cache_dir: s3://bucket/cache\noutput_dir", "cache_dir"),
        ("owner/name", "/models/strange", "model.base"),
        ("owner/name", "owner/name, components: {vae: /models/vae}", "model.components.vae"),
        ("owner/name", "owner/name, training_adapter: /tmp/a.safetensors", "model.training_adapter"),
        (
            "adamw}",
            "adamw, sample_prompts: [a, {prompt: b, references: [data/c.png, /tmp/d.png]}]}",
            "training.sample_prompts[1].references[1]",
        ),
        ("adamw}", "adamw, lora: {start_from: /tmp/a.safetensors}}", "training.lora.start_from"),
        ("data/photos", ".git", "datasets[0].path"),
        ("data/photos", "data/../.venv/lib", "datasets[0].path"),
        ("data/photos", ".", "datasets[0].path"),
        ("data/photos", "list.csv", "datasets[0].path"),
        ("owner/name", ".cache/models", "model.base"),
        ("data/photos}", "data/photos, follow_links: true}", "datasets[0].follow_links"),
        ("data/photos", "data/photos/a.tar", "datasets[0].path"),
        ("data/photos}", "data/photos/a.parquet, image_column: image}", "datasets[0].image_column"),
        ("adamw}", "adamw, trackers: [tensorboard, wandb]}", "training.trackers[1]"),
        (
            "adamw}",
            "adamw, tracker_arguments: {tensorboard: {filename_suffix: /../../../a}}}",
            "training.tracker_arguments.tensorboard.filename_suffix",
        ),
        ("outputs/small", ".git/hooks", "output_dir"),
        ("outputs/small", ".github/workflows", "output_dir"),
        ("outputs/small", "outputs/../pipeline/recipe", "output_dir"),
        ("outputs/small", ".venv/lib", "output_dir"),
        ("outputs/small", "outputs", "output_dir"),
        ("outputs/small", "configs/small", "output_dir"),
        ("outputs/small", "new", "output_dir"),
        ("output_dir", "cache_dir: .dagster/cache\noutput_dir", "cache_dir"),
        ("output_dir", "cache_dir: resources\noutput_dir", "cache_dir"),
        ("output_dir", "cache_dir: .cache\noutput_dir", "cache_dir"),
        ("output_dir", "cache_dir: .cache/huggingface\noutput_dir", "cache_dir"),
    ],
)
def test_what_leaves_the_project_or_runs_code_is_a_mistake_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, key: str
) -> None:
    file = write(tmp_path, RECIPE.replace(old, new))
    with pytest.raises(RecipeError, match="because LATENTLINE_UNTRUSTED is set") as excinfo:
        load_recipe(file)
    assert excinfo.value.where.endswith(key)
    assert ".yaml:" in excinfo.value.where
    assert excinfo.value.fix

    monkeypatch.setenv("LATENTLINE_UNTRUSTED", "0")
    load_recipe(file)


@pytest.mark.parametrize(
    ("link", "target", "key"),
    [
        ("data/photos", "{outside}", "datasets[0].path"),
        ("data/photos/deep/a.png", "{outside}/a.png", "datasets[0].path"),
        ("data/photos/a.txt", "../../.git/config", "datasets[0].path"),
        ("data/photos/all", "../..", "datasets[0].path"),
        ("data/masks/a.png", "/nothing/there.png", "datasets[0].mask.path"),
        ("models/small/unet/config.json", "{outside}/a.json", "model.base"),
        ("outputs/small", "../.git", "output_dir"),
        ("outputs/small/tables", "../../pipeline", "output_dir"),
        ("outputs/small/runs/1/lora", "../../../other", "output_dir"),
        (".cache/latentline", "../.github", "cache_dir"),
        (".cache/latentline/ab", "../../pipeline", "cache_dir"),
    ],
)
def test_links_out_of_a_folder_of_the_recipe_are_refused(
    tmp_path: Path, link: str, target: str, key: str
) -> None:
    root, outside = tmp_path / "project", tmp_path / "outside"
    outside.mkdir()
    path = root / link
    path.parent.mkdir(parents=True)
    path.symlink_to(target.format(outside=outside))
    data = {
        "datasets": [{"path": "data/photos", "mask": {"path": "data/masks"}}],
        "output_dir": "outputs/small",
        "model": {"base": "models/small"},
    }
    mistakes = untrusted_mistakes(data, root, cache_dir=".cache/latentline")
    assert [dotted(each.path) for each in mistakes] == [key]
    assert mistakes[0].fix

    path.unlink()
    assert untrusted_mistakes(data, root, cache_dir=".cache/latentline") == []


def test_links_inside_the_folders_are_accepted(tmp_path: Path) -> None:
    for folder in ("data/photos", "data/more", "outputs/small/runs/1"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data/photos/a.png").symlink_to("../more/a.png")
    (tmp_path / "outputs/small/last").symlink_to("runs/1")
    data = {"datasets": [{"path": "data/photos"}], "output_dir": "outputs/small", "model": {"base": "a/b"}}
    assert untrusted_mistakes(data, tmp_path, cache_dir=".cache/latentline") == []


def test_the_table_of_keys_has_each_key_of_the_schema_once() -> None:
    known = list(dict.fromkeys(all_keys()))
    values = [key for key in known if not any(other.startswith(f"{key}.") for other in known)]
    classified = [key for keys in KEYS.values() for key in keys]
    assert sorted(classified) == sorted(values), "classify the new key in pipeline/recipe/untrusted.py"


def test_a_key_whose_type_is_a_path_is_classified_as_a_path() -> None:
    harmless = {*KEYS["none"], *KEYS["evaluates an expression"]}
    assert [key for key in harmless if "Path" in str(field_below(RecipeFile, tuple(key.split("."))))] == []


def test_a_recipe_that_links_to_another_file_is_refused_without_showing_it(tmp_path: Path) -> None:
    secret = tmp_path / "netrc"
    secret.write_text("machine host login me password s3cr3t\n")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small.yaml").symlink_to(secret)
    (broken,) = load_recipe_folder(tmp_path / "configs").broken
    assert "a link out of it" in str(broken.error)
    assert "s3cr3t" not in str(broken.error)


def test_the_other_recipes_load(tmp_path: Path) -> None:
    write(tmp_path, RECIPE)
    write(tmp_path, RECIPE.replace("outputs/small", "outputs/own").replace("adamw", "os.abort"), "own")
    folder = load_recipe_folder(tmp_path)
    assert [each.name for each in folder.recipes] == ["small"]
    assert [each.name for each in folder.broken] == ["own"]


def test_the_command_exits_with_an_error_that_names_the_variable(tmp_path: Path) -> None:
    file = write(tmp_path, RECIPE.replace("adamw", "os.abort"))
    command = [sys.executable, "-c", "from pipeline.cli.main import main; main()", "validate", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(project_root())}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "got the import path os.abort, because LATENTLINE_UNTRUSTED is set" in result.stderr
    assert "fix:" in result.stderr


@pytest.mark.parametrize("name", ["pytorch_model.bin", "diffusion_pytorch_model.fp16.bin"])
def test_pickled_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match="got a pickle") as excinfo:
        weight_files(tmp_path)
    assert excinfo.value.where.endswith(name)
    monkeypatch.delenv("LATENTLINE_UNTRUSTED")
    assert [path.name for path in weight_files(tmp_path)] == [name]
