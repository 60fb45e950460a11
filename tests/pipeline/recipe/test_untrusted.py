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


def test_a_folder_that_links_out_of_the_project_is_refused(tmp_path: Path) -> None:
    link = project_root() / "outputs" / "link-of-a-test"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path)
    try:
        with pytest.raises(RecipeError, match="path must be a folder inside the project"):
            load_recipe(write(tmp_path, RECIPE.replace("data/photos", "outputs/link-of-a-test/photos")))
    finally:
        link.unlink()


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
