"""The step of raw_images: what it checks before it reads an image, and how it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dagster import AssetSelection, materialize, validate_run_config
from PIL import Image

from assets.definitions import build_definitions
from assets.location import Location
from assets.names import GPU_POOL
from assets.raw_images import training_overrides
from assets.recipe_graph import recipe_assets
from pipeline.recipe import Recipe
from tests.small_recipe import small_recipe


def recipe_of(folder: Path, base: Path, **values: Any) -> Recipe:
    (folder / "data").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "data" / "photo.png")
    dataset = {"name": "photos", "path": folder / "data", **values.pop("dataset", {})}
    model = {"base": base, **values.pop("model", {})}
    return small_recipe(folder, datasets=[dataset], model=model, **values)


def failure_of(recipe: Recipe) -> str:
    """Materialize raw_images alone, which must fail, and return the error."""
    resources = build_definitions([recipe]).resources
    assert resources is not None
    result = materialize(
        recipe_assets(recipe, Location(GPU_POOL)),
        selection=AssetSelection.assets(["flowers", "raw_images"]).without_checks(),
        resources=resources,
        raise_on_error=False,
    )
    return "\n".join(str(event.event_specific_data) for event in result.all_events if event.is_step_failure)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "preview prompts": (
        {"training": {"sample_prompts": [{"prompt": "a", "height": 61, "width": 64}]}},
        "height and width must be multiples of",
    ),
    "references": ({"dataset": {"references": [{"path": "/before"}]}}, "accepts no reference images"),
    "masks": ({"dataset": {"mask": {"path": "/gone/masks"}}}, "correct datasets[].mask.path in the recipe"),
    "component": ({"model": {"components": {"vae": "models/no_vae"}}}, "models/no_vae does not exist"),
    "training adapter": ({"model": {"training_adapter": "gone.safetensors"}}, "gone.safetensors does not"),
    "modules": ({"training": {"lora": {"modules": ["*.to_qq"]}}}, "the pattern *.to_qq matches no layer"),
    "objective": ({"training": {"timesteps": {"shift": 3.0}}}, "training.timesteps.shift"),
    "start file": ({"training": {"lora": {"start_from": "/gone.safetensors"}}}, "/gone.safetensors"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_settings_that_do_not_suit_the_base_model_fail_before_an_image_is_read(
    tmp_path: Path, tiny_sd: Path, name: str
) -> None:
    values, message = MISTAKES[name]
    assert message in failure_of(recipe_of(tmp_path, tiny_sd, **values))
    assert not (tmp_path / "out" / "tables").exists()


def test_a_base_model_without_one_of_its_files_fails_before_an_image_is_read(
    tmp_path: Path, tiny_sd: Path
) -> None:
    base = tmp_path / "base"
    for file in tiny_sd.rglob("*"):
        target = base / file.relative_to(tiny_sd)
        if file.is_file() and file.suffix != ".safetensors":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    assert str(base) in failure_of(recipe_of(tmp_path, base))
    assert not (tmp_path / "out" / "tables").exists()


def test_settings_that_suit_the_base_model_are_scanned(tmp_path: Path, tiny_sd: Path) -> None:
    recipe = recipe_of(tmp_path, tiny_sd)
    assert failure_of(recipe) == ""
    assert (tmp_path / "out" / "tables" / "raw_images.parquet").is_file()


def test_overrides_from_environment_variables_are_left_to_trained_lora(tmp_path: Path) -> None:
    """Dagster accepts them in a run's configuration, and has not resolved them for this step."""
    recipe = small_recipe(tmp_path)
    config = {"rank": {"env": "RANK"}, "steps": 4}
    run_config = {"ops": {"flowers__trained_lora": {"config": config}}}
    job = build_definitions([recipe]).resolve_job_def("flowers_train")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANK", "4")
        validate_run_config(job, run_config)
    assert training_overrides(run_config, recipe) == {"steps": 4}


def test_the_asset_is_described(tmp_path: Path) -> None:
    graph = build_definitions([recipe_of(tmp_path, tmp_path)]).get_repository_def().asset_graph
    key = next(key for key in graph.materializable_asset_keys if key.path[-1] == "raw_images")
    assert str(graph.get(key).description).startswith("Every image file of the datasets: ")
