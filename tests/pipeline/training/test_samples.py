from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from pipeline.families import detect
from pipeline.store import Store
from pipeline.training.engine import Engine
from pipeline.training.samples import draw_samples

if TYPE_CHECKING:
    from conftest import Project


def test_pictures_are_drawn_from_cached_captions_and_leave_training_as_it_was(
    make_project: Callable[..., Project],
) -> None:
    order = make_project(sample_every=2).order()
    family = detect(order.base)
    engine = Engine(order, family)
    warnings: list[str] = []
    first = draw_samples(order, family, engine, step=2, warn=warnings.append)
    assert warnings == []
    assert [path.name for path in first] == ["step-00000002-00.png", "step-00000002-01.png"]
    assert engine.denoiser.training
    with Image.open(first[0]) as picture:
        assert picture.size == (96, 32)  # PIL: width, height; the first sample's bucket is 32x96
    again = draw_samples(order, family, engine, step=4, warn=warnings.append)
    pixels = [np.asarray(Image.open(path)) for path in (first[0], again[0])]
    assert np.array_equal(*pixels)
    with torch.no_grad():
        for weight in engine.weights:
            weight.add_(0.3)
    adapted = draw_samples(order, family, engine, step=6, warn=warnings.append)
    assert not np.array_equal(pixels[0], np.asarray(Image.open(adapted[0])))


def test_R09_a_picture_that_cannot_be_drawn_is_a_warning(make_project: Callable[..., Project]) -> None:
    order = make_project(sample_every=2).order()
    family = detect(order.base)
    engine = Engine(order, family)
    Store(order.recipe.cache_dir).path(order.prompts[0].text).unlink()
    warnings: list[str] = []
    assert draw_samples(order, family, engine, step=2, warn=warnings.append) == []
    assert len(warnings) == 1
    assert "step 2" in warnings[0]
    assert engine.denoiser.training


def test_the_recipe_s_own_prompts_are_drawn_as_squares(make_project: Callable[..., Project]) -> None:
    order = make_project(sample_every=2, sample_prompts=["a red cat"]).order()
    assert [(prompt.caption, prompt.size_hw) for prompt in order.prompts] == [("a red cat", (64, 64))]
