from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import Flux2Pipeline
from transformers import AutoTokenizer

from demo.tiny_models import make_tiny_flux2_dev
from pipeline.models.worker.family import WorkerFamily, load_family
from tests.pipeline.models.families.complete_job import Case
from tests.pipeline.models.families.flux2_case import Flux2Case
from tests.pipeline.models.families.references_case import (
    check_calls,
    check_encoding,
    check_loss,
    check_order,
    check_preview,
)


class DevCase(Flux2Case):
    pipeline_class = Flux2Pipeline
    guidance = 1.0

    def make(self, folder: Path) -> None:
        make_tiny_flux2_dev(folder)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        """Load the pipeline with a tokenizer only; its image processor needs torchvision."""
        pipe = Flux2Pipeline.from_pretrained(folder, tokenizer=None, **parts)
        pipe.register_modules(tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"))
        return pipe


def test_the_complete_job_of_dev_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(DevCase())


def test_cut_tokens_are_counted_after_the_system_message(tmp_path: Path) -> None:
    make_tiny_flux2_dev(tmp_path)
    family = load_family(tmp_path)
    encoders = family.text.load("float32", "cpu")
    short = family.text.encode_caption(encoders, "a cat")
    assert short.num_cut == 0
    assert short.cut_from is None
    before = short.num_tokens - len(["a", " cat", "[/INST]"])
    for extra in (0, 1, 7):
        caption = "a" + " cat" * (512 - before - len(["a", "[/INST]"]) + extra)
        encoded = family.text.encode_caption(encoders, caption)
        assert (encoded.num_tokens, encoded.num_cut) == (512 + extra, extra)
        cut_text = " cat" * (extra - 1) if extra else None  # the first cut token is the end mark
        assert encoded.cut_from == (None if cut_text is None else len(caption) - len(cut_text))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[WorkerFamily, Any]:
    """Return the tiny model and its complete pipeline."""
    folder = tmp_path_factory.mktemp("base")
    make_tiny_flux2_dev(folder)
    pipe = DevCase().pipeline(folder)
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
    loaded: tuple[WorkerFamily, Any], number: int
) -> None:
    check_preview(DevCase(), *loaded, number=number)
