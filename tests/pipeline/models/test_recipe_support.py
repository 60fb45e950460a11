"""Prompts and references that the base model of a recipe does not support."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from diffusers import DDPMScheduler
from PIL import Image

from demo.tiny_models import (
    make_tiny,
    make_tiny_flux,
    make_tiny_flux2_dev,
    make_tiny_flux2_klein,
    make_tiny_flux_kontext,
    make_tiny_ideogram4,
    make_tiny_lumina2,
    make_tiny_qwen_image21,
    make_tiny_sana,
    make_tiny_sd3,
)
from pipeline.errors import RecipeError
from pipeline.models.families import detect
from pipeline.models.families.parts.noise import BetaNoise
from pipeline.models.recipe_support import (
    require_preview_prompts,
    require_references,
    require_training_settings,
)
from pipeline.recipe import Recipe, load_recipe, recipe_from_mapping
from pipeline.storage.atomic import write_text
from tests.pipeline.reference_family import with_references


def recipe(folder: Path, base: Path | str, prompt: str) -> Recipe:
    file = folder / "one.yaml"
    file.write_text(
        f"datasets: [{{name: d, path: {folder}/photos}}]\noutput_dir: {folder}/one\n"
        f"cache_dir: {folder}/cache\nmodel:\n  base: {base}\ntraining:\n  sample_prompts:\n"
        f"    - a cat\n    - {{prompt: a dog, {prompt}}}\n",
        encoding="utf-8",
    )
    return load_recipe(file)


def problem(recipe: Recipe) -> RecipeError:
    with pytest.raises(RecipeError) as raised:
        require_preview_prompts(recipe)
    return raised.value


def test_a_size_that_is_not_a_multiple_is_an_error_with_line_and_nearest_size(tmp_path: Path) -> None:
    make_tiny_flux(tmp_path / "flux")
    error = problem(recipe(tmp_path, tmp_path / "flux", "height: 72, width: 1000"))
    assert error.where == f"{tmp_path / 'one.yaml'}:9, training.sample_prompts[1].height"
    assert "must be multiples of 16" in error.what
    assert "got 72x1000" in error.what
    assert error.fix == "use height: 64 and width: 992, or remove both"
    require_preview_prompts(recipe(tmp_path, tmp_path / "flux", "height: 80, width: 992"))


def test_a_size_beyond_the_position_table_is_an_error(tmp_path: Path) -> None:
    make_tiny_sd3(tmp_path / "sd3")
    assert "is too large for" in problem(recipe(tmp_path, tmp_path / "sd3", "height: 64, width: 8192")).what
    require_preview_prompts(recipe(tmp_path, tmp_path / "sd3", "height: 64, width: 64"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_tiny_flux, "its guidance is distilled"),
        (make_tiny_flux2_dev, "its guidance is distilled"),
        (make_tiny_ideogram4, "its guidance uses a second transformer, which sees no text"),
        (make_tiny_sana, "its pipeline encodes negative prompts in another way than captions"),
        (make_tiny_lumina2, "its pipeline encodes negative prompts in another way than captions"),
    ],
)
def test_a_negative_prompt_of_a_model_that_would_ignore_or_misread_it_is_an_error(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    make(tmp_path / "base")
    error = problem(recipe(tmp_path, tmp_path / "base", "negative_prompt: blurry"))
    assert error.where == f"{tmp_path / 'one.yaml'}:9, training.sample_prompts[1].negative_prompt"
    assert error.what.endswith(f"cannot have a negative_prompt, because {reason}")
    assert error.fix == "remove negative_prompt"
    require_preview_prompts(recipe(tmp_path, tmp_path / "base", "guidance_scale: 2.0"))


def test_only_distilled_klein_refuses_negative_prompts(tmp_path: Path) -> None:
    make_tiny_flux2_klein(tmp_path / "base")
    require_preview_prompts(recipe(tmp_path, tmp_path / "base", "negative_prompt: blurry"))
    index = tmp_path / "base" / "model_index.json"
    write_text(index, index.read_text("utf-8").replace('"is_distilled": false', '"is_distilled": true'))
    assert "distilled" in problem(recipe(tmp_path, tmp_path / "base", "negative_prompt: blurry")).what


def test_a_negative_prompt_of_a_model_that_is_drawn_without_guidance_needs_a_guidance_scale(
    tmp_path: Path,
) -> None:
    make_tiny_qwen_image21(tmp_path / "base")
    error = problem(recipe(tmp_path, tmp_path / "base", "negative_prompt: blurry"))
    assert error.where == f"{tmp_path / 'one.yaml'}:9, training.sample_prompts[1].negative_prompt"
    assert "has no effect, because the base model" in error.what
    assert error.fix == "add a guidance_scale above 1 to this prompt, or remove negative_prompt"
    require_preview_prompts(recipe(tmp_path, tmp_path / "base", "negative_prompt: blurry, guidance_scale: 4"))


def test_a_model_of_the_hub_is_checked_when_its_family_is_known(tmp_path: Path) -> None:
    make_tiny_flux(tmp_path / "flux")
    hub = recipe(tmp_path, "black-forest-labs/FLUX.1-dev", "negative_prompt: blurry")
    require_preview_prompts(hub)
    with pytest.raises(RecipeError, match="cannot have a negative_prompt"):
        require_preview_prompts(hub, detect(tmp_path / "flux"))


def picture(folder: Path, name: str, size: tuple[int, int] = (64, 64)) -> Path:
    Image.new("RGB", size).save(folder / name)
    return folder / name


def test_references_that_cannot_be_read_or_that_the_model_refuses_are_errors(tmp_path: Path) -> None:
    make_tiny_flux2_klein(tmp_path / "base")
    good, tiny = picture(tmp_path, "good.png"), picture(tmp_path, "tiny.png", (60, 64))
    (tmp_path / "text.png").write_text("no image", encoding="utf-8")
    for file, expected in (
        (tmp_path / "absent.png", "absent.png cannot be read"),
        (tmp_path / "text.png", "text.png cannot be read"),
        (tiny, "the edges of a reference must be at least 64 px long, got 64x60 (height x width)"),
    ):
        error = problem(recipe(tmp_path, tmp_path / "base", f"references: [{good}, {file}]"))
        assert error.where == f"{tmp_path / 'one.yaml'}:9, training.sample_prompts[1].references[1]"
        assert expected in error.what
    require_preview_prompts(recipe(tmp_path, tmp_path / "base", f"references: [{good}, {good}]"))


def test_an_absent_reference_is_an_error_although_the_family_is_not_known(tmp_path: Path) -> None:
    hub = recipe(tmp_path, "black-forest-labs/FLUX.1-Kontext-dev", f"references: [{tmp_path / 'absent.png'}]")
    assert "absent.png cannot be read" in problem(hub).what


def test_the_number_of_references_is_that_of_the_base_model(tmp_path: Path) -> None:
    good = picture(tmp_path, "good.png")
    make_tiny_flux_kontext(tmp_path / "kontext")
    require_preview_prompts(recipe(tmp_path, tmp_path / "kontext", f"references: [{good}]"))
    error = problem(recipe(tmp_path, tmp_path / "kontext", f"references: [{good}, {good}]"))
    assert error.where == f"{tmp_path / 'one.yaml'}:9, training.sample_prompts[1].references"
    assert "accepts at most 1 reference image, got 2" in error.what

    make_tiny_flux(tmp_path / "flux")
    error = problem(recipe(tmp_path, tmp_path / "flux", f"references: [{good}]"))
    assert "(FLUX.1) accepts no reference images, got 1" in error.what


def recipe_of(base: Path, *numbers: int) -> Recipe:
    """Return a recipe with one dataset per number, which has that many references."""
    datasets: list[dict[str, Any]] = [
        {
            "name": f"d{index}",
            "path": f"/data/{index}",
            "references": [{"path": f"/data/{index}-{each}"} for each in range(number)],
        }
        for index, number in enumerate(numbers)
    ]
    return recipe_from_mapping(
        "x", {"datasets": datasets, "output_dir": "/out", "model": {"base": str(base)}}
    )


def test_references_of_a_family_that_sees_none_are_an_error_that_names_families_that_do(
    tiny_sd: Path,
) -> None:
    require_references(recipe_of(tiny_sd, 0, 0))
    with pytest.raises(RecipeError, match="accepts no reference images, got 1 reference") as excinfo:
        require_references(recipe_of(tiny_sd, 0, 1))
    assert excinfo.value.where.endswith("datasets[1].references")
    assert "FLUX.2" in excinfo.value.fix


def test_each_dataset_may_have_as_many_references_as_the_model_sees(
    tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_references(monkeypatch, max_number=2)
    require_references(recipe_of(tiny_sd, 0, 1, 2), detect(tiny_sd))
    with pytest.raises(RecipeError, match="accepts at most 2 reference images, got 3") as excinfo:
        require_references(recipe_of(tiny_sd, 3, 2))
    assert excinfo.value.fix == "keep at most 2 of them"


def test_a_model_that_requires_references_needs_them_in_each_dataset(
    tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_references(monkeypatch, required=True)
    require_references(recipe_of(tiny_sd, 1, 2))
    with pytest.raises(RecipeError, match="requires a reference image for each image, got none") as excinfo:
        require_references(recipe_of(tiny_sd, 1, 0))
    assert excinfo.value.where.endswith("datasets[1].references")


def test_a_base_model_that_is_not_local_is_checked_when_it_is_known(
    tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(Path("owner/name"), 1)
    require_references(recipe)
    with pytest.raises(RecipeError, match="accepts no reference images"):
        require_references(recipe, detect(tiny_sd))


STABLE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}

SCHEDULES: dict[str, tuple[dict[str, Any], bool]] = {
    "as published": ({"_class_name": "PNDMScheduler", **STABLE}, True),
    "rescaled, DDIM": ({"_class_name": "DDIMScheduler", **STABLE, "rescale_betas_zero_snr": True}, False),
    "rescaled, Euler": (
        {"_class_name": "EulerDiscreteScheduler", **STABLE, "rescale_betas_zero_snr": True},
        False,
    ),
    # PNDM has no such setting, but DDPM, which trains, reads it.
    "rescaled, PNDM": ({"_class_name": "PNDMScheduler", **STABLE, "rescale_betas_zero_snr": True}, False),
    "rescaled, 50 timesteps": ({**STABLE, "num_train_timesteps": 50, "rescale_betas_zero_snr": True}, False),
    "beta_end of 1": ({"beta_schedule": "linear", "beta_end": 1.0}, False),
    "product that underflows": ({"beta_schedule": "sigmoid", "beta_end": 0.99}, False),
    "trained betas": ({"num_train_timesteps": 3, "trained_betas": [0.1, 0.5, 1.0]}, False),
    "trained betas below 1": ({"num_train_timesteps": 3, "trained_betas": [0.1, 0.5, 0.9]}, True),
    "cosine": ({"beta_schedule": "squaredcos_cap_v2"}, True),
    "defaults": ({}, True),
}
"""Configurations of schedulers, and whether each timestep has signal."""


def with_schedule(folder: Path, tiny_sd: Path, schedule: dict[str, Any], prediction: str = "epsilon") -> Path:
    """Copy a Stable Diffusion model into a folder, with this scheduler configuration, and return it."""
    base = folder / "sd"
    shutil.copytree(tiny_sd, base, copy_function=os.link)
    config = {"_class_name": "DDPMScheduler", "prediction_type": prediction, **schedule}
    write_text(base / "scheduler" / "scheduler_config.json", json.dumps(config))
    return base


def weighted(base: Path, weighting: str, **timesteps: float) -> Recipe:
    training = {"loss": {"weighting": weighting}, "timesteps": timesteps}
    values = {"datasets": [{"name": "d", "path": "/data"}], "output_dir": "/out", "training": training}
    return recipe_from_mapping("x", {**values, "model": {"base": str(base)}})


@pytest.mark.parametrize("name", SCHEDULES)
def test_R13_the_last_timestep_with_signal_is_that_of_the_scheduler_that_trains(
    tmp_path: Path, tiny_sd: Path, name: str
) -> None:
    config, all_have_signal = SCHEDULES[name]
    base = with_schedule(tmp_path, tiny_sd, config)
    alphas_bar = DDPMScheduler.from_pretrained(base / "scheduler").alphas_cumprod
    noise = detect(base).spec.noise
    assert isinstance(noise, BetaNoise)
    last = noise.last_timestep_with_signal(detect(base).model)
    assert last == int(alphas_bar.nonzero().max())
    assert (last == len(alphas_bar) - 1) is all_have_signal


@pytest.mark.parametrize("weighting", ["min_snr", "soft_min_snr", "debiased"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_R05_a_weighting_that_divides_by_an_snr_of_zero_is_a_mistake_before_training(
    tmp_path: Path, tiny_sd: Path, name: str, weighting: str
) -> None:
    config, all_have_signal = SCHEDULES[name]
    base = with_schedule(tmp_path, tiny_sd, config)
    if all_have_signal:
        require_training_settings(weighted(base, weighting))
        return
    with pytest.raises(RecipeError, match="which is 0 at timestep") as raised:
        require_training_settings(weighted(base, weighting))
    assert "training.loss.weighting" in raised.value.where

    # The fix leaves out the timesteps without signal, and only those.
    found = re.search(r"timesteps\.max to ([0-9.e-]+),", raised.value.fix)
    assert found is not None
    highest = float(found[1])
    require_training_settings(weighted(base, weighting, max=highest))
    with pytest.raises(RecipeError):
        require_training_settings(weighted(base, weighting, max=min(1.0, highest * 1.0001)))


def test_a_weighting_is_accepted_where_no_weight_is_divided_by_the_snr(tmp_path: Path, tiny_sd: Path) -> None:
    rescaled = {**STABLE, "rescale_betas_zero_snr": True}
    require_training_settings(weighted(with_schedule(tmp_path, tiny_sd, rescaled), "none"))
    velocity = with_schedule(tmp_path / "velocity", tiny_sd, rescaled, prediction="v_prediction")
    require_training_settings(weighted(velocity, "min_snr"))
    require_training_settings(weighted(Path("owner/of-the-hub"), "min_snr"))


@pytest.mark.parametrize(
    ("make", "takes_guidance"),
    [
        (make_tiny_flux, True),
        (make_tiny_flux_kontext, True),
        (make_tiny_flux2_dev, True),
        pytest.param(partial(make_tiny_flux, schnell=True), False, id="schnell"),
        (make_tiny_flux2_klein, False),
        (make_tiny, False),
        (make_tiny_ideogram4, False),
    ],
)
def test_the_guidance_of_training_is_a_mistake_for_a_model_that_does_not_read_it(
    tmp_path: Path, make: Callable[[Path], object], takes_guidance: bool
) -> None:
    make(tmp_path / "base")

    def recipe_with(guidance: float) -> Recipe:
        values = {"datasets": [{"name": "d", "path": "/data"}], "output_dir": "/out"}
        values |= {"model": {"base": str(tmp_path / "base")}, "training": {"guidance": guidance}}
        return recipe_from_mapping("x", values)

    require_training_settings(recipe_with(1.0))
    if takes_guidance:
        require_training_settings(recipe_with(3.5))
        return
    with pytest.raises(RecipeError, match=r"takes no guidance scale, got 3\.5") as raised:
        require_training_settings(recipe_with(3.5))
    assert "training.guidance" in raised.value.where
