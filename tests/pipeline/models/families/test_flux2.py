from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

from demo.tiny_models import make_tiny_flux2_dev, make_tiny_flux2_klein
from pipeline.models.worker.family import WorkerFamily, load_family
from tests.pipeline.models.families.complete_job import Case
from tests.pipeline.models.families.flux2_case import DevCase, KleinCase
from tests.pipeline.models.families.references_case import (
    check_calls,
    check_encoding,
    check_loss,
    check_order,
    check_preview,
)


def test_the_complete_job_of_klein_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(KleinCase())


@pytest.mark.parametrize("make", [make_tiny_flux2_klein, make_tiny_flux2_dev])
def test_E08_training_uses_the_shift_of_the_schedule_and_not_that_of_50_steps(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path)
    family = load_family(tmp_path)
    scheduler = family.noise.load_scheduler()
    half = torch.tensor([0.5], dtype=torch.float64)
    for edge, mu in ((16, 0.5), (64, 1.15)):  # 256 and 1024 px
        actual = family.noise.timesteps(scheduler, half, (32, edge, edge)).item()
        assert actual == pytest.approx(1000 / (1 + math.exp(-mu)), abs=1e-2)
        drawn = 1000 / (1 + math.exp(-compute_empirical_mu(edge * edge, num_steps=50)))
        assert drawn - actual > 100


@pytest.fixture(scope="module", params=[KleinCase(), DevCase()], ids=["klein", "dev"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def loaded(case: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[WorkerFamily, Any]:
    """Return the tiny model and its complete pipeline."""
    folder = tmp_path_factory.mktemp("base")
    case.make(folder)
    pipe = case.pipeline(folder)
    pipe.set_progress_bar_config(disable=True)
    return load_family(folder), pipe


def test_the_latents_of_references_are_those_of_the_pipeline(loaded: tuple[WorkerFamily, Any]) -> None:
    check_encoding(*loaded)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_training_calls_the_transformer_as_each_step_of_the_pipeline_does(
    loaded: tuple[WorkerFamily, Any], number: int
) -> None:
    check_calls(*loaded, number=number)


def test_the_loss_ignores_the_predictions_for_references(loaded: tuple[WorkerFamily, Any]) -> None:
    check_loss(*loaded)


def test_order_height_and_width_of_references_change_the_prediction(
    loaded: tuple[WorkerFamily, Any],
) -> None:
    check_order(*loaded, number=2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_preview_with_references_equals_the_picture_of_the_pipeline(
    case: Case, loaded: tuple[WorkerFamily, Any], number: int
) -> None:
    check_preview(case, *loaded, number=number)
