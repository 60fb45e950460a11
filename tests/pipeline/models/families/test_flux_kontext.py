from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import FluxKontextPipeline

from demo.tiny_models import make_tiny_flux_kontext
from pipeline.models.worker.family import WorkerFamily, load_family
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.flux_case import FluxCase
from tests.pipeline.models.families.references_case import (
    check_calls,
    check_encoding,
    check_loss,
    check_order,
    check_preview,
)


class AnySizePipeline(FluxKontextPipeline):
    """The pipeline with the area of the requested size, instead of a megapixel."""

    def __call__(self, *args: Any, height: int, width: int, **options: Any) -> Any:
        return super().__call__(*args, height=height, width=width, max_area=height * width, **options)


class KontextCase(FluxCase):
    pipeline_class = AnySizePipeline

    def make(self, folder: Path) -> None:
        make_tiny_flux_kontext(folder)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[WorkerFamily, Any]:
    """Return the tiny model and its complete pipeline."""
    folder = tmp_path_factory.mktemp("base")
    make_tiny_flux_kontext(folder)
    pipe = KontextCase().pipeline(folder)
    pipe.set_progress_bar_config(disable=True)
    return load_family(folder), pipe


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(KontextCase())


def test_the_latent_of_a_reference_is_that_of_the_pipeline(loaded: tuple[WorkerFamily, Any]) -> None:
    check_encoding(*loaded, _auto_resize=False)


@pytest.mark.parametrize("number", [0, 1])
def test_training_calls_the_transformer_as_each_step_of_the_pipeline_does(
    loaded: tuple[WorkerFamily, Any], number: int
) -> None:
    check_calls(*loaded, number=number, _auto_resize=False)


def test_the_loss_ignores_the_predictions_for_a_reference(loaded: tuple[WorkerFamily, Any]) -> None:
    check_loss(*loaded)


def test_height_and_width_of_a_reference_change_the_prediction(loaded: tuple[WorkerFamily, Any]) -> None:
    check_order(*loaded, number=1)


def test_a_preview_with_a_reference_equals_the_picture_of_the_pipeline(
    loaded: tuple[WorkerFamily, Any],
) -> None:
    check_preview(KontextCase(), *loaded, number=1)


def test_length_of_captions_and_architecture_are_those_of_flux_dev(loaded: tuple[WorkerFamily, Any]) -> None:
    family, _ = loaded
    assert family.max_length() == 512
    assert family.size_multiple() == 16
    assert family.modelspec_architecture() == "flux-1-dev"
