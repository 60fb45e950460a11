"""A context LoRA is part of the base model in training, previews and pictures, and of no exported file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file

from pipeline.errors import RecipeError, TrainingError
from pipeline.recipe import recipe_from_mapping
from pipeline.recipe.isolation import check_isolation
from pipeline.recipe.schema import ContextLoraSettings
from pipeline.trained_lora.context_file import require_context_file
from pipeline.trained_lora.joining import require_local_files
from pipeline.trained_lora.pictures.prepare import Request, prepare_drawing
from pipeline.trained_lora.previews import preview_file
from pipeline.trained_lora.run_folder import RunLayout
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.pictures.drawings import drawn, pixels
from tests.pipeline.trained_lora.runs import outcome, run, run_folders, run_until
from tests.pipeline.trained_lora.worker.test_training_adapter import (
    KINDS,
    drawn_by_diffusers,
    engine_of,
    input_of,
    trained_and_evaluated,
    write_adapter,
)

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

# numpy 2 deprecates how diffusers' Euler schedule converts a tensor to an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SCALE = 0.5


@pytest.fixture
def context_file(tmp_path: Path, tiny_bases: dict[str, Path]) -> Path:
    (tmp_path / "context").mkdir()
    return write_adapter(tiny_bases["epsilon"], tmp_path / "context" / "style.safetensors")


def with_context(project: Project, file: Path, scale: float = SCALE) -> Project:
    """Give the project's recipe a context LoRA."""
    context = ContextLoraSettings(path=file, scale=scale)
    model = project.recipe.model.model_copy(update={"context_lora": context})
    project.recipe = project.recipe.model_copy(update={"model": model})
    return project


def fused_base(base: Path, file: Path, folder: Path) -> Path:
    """Write the base model with the context LoRA in its weights, by diffusers alone."""
    pipe: Any = StableDiffusionPipeline.from_pretrained(base, safety_checker=None)
    pipe.load_lora_weights(file.parent, weight_name=file.name)
    pipe.fuse_lora(lora_scale=SCALE)
    pipe.unload_lora_weights()
    pipe.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["lora", "rslora", "loha", "lokr"])
def test_training_and_evaluation_predict_as_with_the_context_in_the_base_weights(
    make_project: Callable[..., Project], tmp_path: Path, context_file: Path, kind: str
) -> None:
    project = make_project(lora={"rank": 4, "alpha": 2.0, **KINDS[kind]})
    plain = project.job()
    fused = fused_base(plain.base, context_file, tmp_path / "fused")
    model = project.recipe.model.model_copy(update={"base": str(fused)})
    oracle_recipe = project.recipe.model_copy(update={"model": model})
    job = with_context(project, context_file).job()

    engine = engine_of(job)
    micro = input_of(engine, job)
    losses = trained_and_evaluated(engine, micro)
    expected = trained_and_evaluated(engine_of(replace(plain, base=fused, recipe=oracle_recipe)), micro)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-6)
    without = trained_and_evaluated(engine_of(plain), micro)
    assert not torch.allclose(losses[1], without[1], rtol=1e-3)


def test_files_hold_the_trained_lora_alone_and_pictures_show_both(
    make_project: Callable[..., Project], tmp_path: Path, context_file: Path
) -> None:
    prompts = [{"prompt": "a cat", "steps": 3}]
    project = make_project(steps=2, sample_every=2, sample_prompts=prompts, learning_rate=3e-2)
    with_context(project, context_file)
    run(project, InProcessLaunch())
    (folder,) = run_folders(project)
    layout = RunLayout(folder)
    trained = load_file(layout.exported / "pytorch_lora_weights.safetensors")

    # Previews, pictures of `latentline sample`, and diffusers with both files show the same.
    preview = preview_file(layout.previews, 2, 0)
    (picture,) = drawn(project).cells()
    assert np.array_equal(pixels(picture.path), pixels(preview))
    job = project.job()
    fused = replace(job, base=fused_base(job.base, context_file, tmp_path / "fused"))
    both = drawn_by_diffusers(fused, layout.exported)
    np.testing.assert_allclose(pixels(preview) / 255, both, atol=0.6 / 255)
    assert np.abs(both - drawn_by_diffusers(job, layout.exported)).max() > 2 / 255

    plain = make_project(steps=2, learning_rate=3e-2).changed("plain").job()
    run_until(plain)
    exported = load_file(RunLayout(plain.folder).exported / "pytorch_lora_weights.safetensors")
    assert {key: each.shape for key, each in trained.items()} == {
        key: each.shape for key, each in exported.items()
    }
    assert any(not torch.equal(each, exported[key]) for key, each in trained.items())

    record = json.loads((project.recipe.output_dir / "lora" / "provenance.json").read_text())
    facts = {"sha256": hashlib.sha256(context_file.read_bytes()).hexdigest(), "scale": SCALE}
    assert record["facts"]["model"]["context_lora"] == facts
    assert record["model"]["context_lora"] == {"name": "style.safetensors", **facts}
    card = (project.recipe.output_dir / "lora" / "README.md").read_text()
    assert "trained together with" in card
    assert "`style.safetensors` at strength 0.5, not in this file" in card

    # A picture with another context would show neither what was trained nor what the recipe states.
    save_file({key: 2 * each for key, each in load_file(context_file).items()}, context_file)
    with pytest.raises(TrainingError, match=f"it has changed since run {folder.name} was trained"):
        prepare_drawing(project.recipe, Request())


def test_a_stopped_run_resumes_bit_for_bit_and_another_strength_is_another_training(
    make_project: Callable[..., Project], context_file: Path
) -> None:
    project = with_context(make_project(steps=3), context_file)
    whole = project.job()
    run_until(whole)
    stopped = project.changed("stopped").job()
    run_until(stopped, 1)
    run_until(stopped, start=1)
    assert outcome(stopped) == outcome(whole)

    other = with_context(project.changed("other"), context_file, 1.0).job()
    run_until(other)
    assert outcome(other).steps != outcome(whole).steps


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (None, "it is not a file"),
        ({"text_encoder.layer.lora_A.weight": torch.ones(1, 1)}, "it also changes text encoders"),
        ({"lora_te1_layer.lora_down.weight": torch.ones(1, 1)}, "it also changes text encoders"),
    ],
)
def test_a_file_that_cannot_be_a_context_is_refused_before_anything_is_encoded(
    make_project: Callable[..., Project], tmp_path: Path, tensors: Any, reason: str
) -> None:
    file = tmp_path / "other.safetensors"
    if tensors is not None:
        save_file(tensors, file)
    with pytest.raises(TrainingError, match=reason) as excinfo:
        require_context_file(with_context(make_project(), file).recipe)
    assert excinfo.value.where == f"model.context_lora.path: {file}"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"transformer.layer.lora_A.weight": torch.ones(2, 3)}, "it has no layer|diffusers cannot load"),
        ({"lora_unet_layer.hada_w1_a": torch.ones(2, 3)}, "it is not a plain LoRA"),
    ],
)
def test_a_lora_of_another_model_or_kind_is_refused_when_it_is_loaded(
    make_project: Callable[..., Project], tmp_path: Path, tensors: Any, reason: str
) -> None:
    file = tmp_path / "other.safetensors"
    save_file(tensors, file)
    with pytest.raises(TrainingError, match=reason):
        engine_of(with_context(make_project(), file).job())


def test_a_machine_without_the_file_cannot_join(tmp_path: Path) -> None:
    recipe = {"cache_dir": str(tmp_path), "model": {"context_lora": {"path": str(tmp_path / "gone")}}}
    file = tmp_path / "order.json"
    file.write_text(json.dumps({"base": str(tmp_path), "recipe": recipe}))
    with pytest.raises(TrainingError, match="the context LoRA of the training does not exist"):
        require_local_files(file)


@pytest.mark.parametrize("lora", [{"dora": True}, {"kind": "oft"}], ids=str)
def test_kinds_that_depend_on_the_weights_below_them_are_refused(
    tmp_path: Path, lora: dict[str, Any]
) -> None:
    with pytest.raises(RecipeError, match=r"model.context_lora cannot be combined with training.lora"):
        recipe_with_context(tmp_path, tmp_path / "style.safetensors", lora=lora)


def test_a_file_that_a_run_of_the_recipe_replaces_is_refused(tmp_path: Path) -> None:
    recipe = recipe_with_context(tmp_path, tmp_path / "output" / "lora" / "demo_kohya.safetensors")
    (conflict,) = check_isolation(recipe)
    assert "set model.context_lora.path to " in str(conflict.advice)


def recipe_with_context(folder: Path, file: Path, **training: Any) -> Any:
    values = {
        "datasets": [{"name": "photos", "path": folder / "photos"}],
        "cache_dir": folder / "cache",
        "output_dir": folder / "output",
        "model": {"base": "owner/name", "context_lora": {"path": str(file)}},
        "training": training,
    }
    return recipe_from_mapping("demo", values)
