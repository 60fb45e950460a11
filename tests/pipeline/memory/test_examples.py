"""The card that each example recipe states, against the forecast."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.gpu.configurations import PUBLISHED
from pipeline.memory.forecast import forecast_folder
from pipeline.memory.job import MemoryForecast, MemoryJob
from pipeline.memory.worker.stages import forecast_stages
from pipeline.recipe import Recipe, load_recipe

GIB = 2**30
EXAMPLES = Path(__file__).resolve().parents[3] / "configs" / "examples"
PROMISE = re.compile(r"^# Fits a GPU of (\d+) GB", re.MULTILINE)
BASE = re.compile(r"^  base: (\S+)", re.MULTILINE)
EDITING = {"edits_flux_kontext", "edits_qwen_image21", "edits_qwen_image_edit"}
"""Examples whose memory depends on the reference images; they state no GPU."""

BY_BASE = {each.hub_id: each for each in PUBLISHED}
FAST = ("flowers_sd15",)
NAMES = [
    pytest.param(path.stem, marks=[] if path.stem in FAST else [pytest.mark.slow])
    for path in sorted(EXAMPLES.glob("*.yaml"))
    if path.stem not in EDITING
    and not BY_BASE.keys().isdisjoint(BASE.findall(path.read_text(encoding="utf-8")))
]


def test_an_example_of_every_published_model_is_compared() -> None:
    assert len(NAMES) == len(PUBLISHED)
    compared = {each.values[0] if hasattr(each, "values") else each for each in NAMES}
    assert compared | EDITING == {path.stem for path in EXAMPLES.glob("*.yaml")}


def forecast(recipe: Recipe, folder: Path, card_bytes: int) -> MemoryForecast:
    if "Kolors" in recipe.model.base:
        # The code of its text encoder runs on the meta device only in a process that compiles nothing.
        return forecast_folder(recipe, folder, {}, card_bytes=card_bytes)
    return forecast_stages(MemoryJob(recipe, folder, {}, card_bytes))


# diffusers' Chroma imports a class from a deprecated path.
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_an_example_fits_the_card_that_it_states(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / f"{name}.yaml"
    promise = PROMISE.search(path.read_text(encoding="utf-8"))
    assert promise is not None, f"{path.name} states no GPU"

    recipe = load_recipe(path)
    folder = BY_BASE[recipe.model.base].write(tmp_path / "model")
    memory = forecast(recipe, folder, int(promise[1]) * GIB)
    assert memory.usable_bytes is not None
    # Latents are encoded in smaller batches if memory runs out; the other stages cannot adapt.
    needed = {stage.stage: stage.device_bytes for stage in memory.stages if stage.stage != "encode latents"}
    assert {stage: size for stage, size in needed.items() if size > memory.usable_bytes} == {}
