from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker import before_training
from pipeline.trained_lora.worker.before_training import perturbed_weights
from pipeline.trained_lora.worker.checkpoint import load_checkpoint
from pipeline.trained_lora.worker.export import exporter
from tests.pipeline.trained_lora.project import PROMPTS
from tests.pipeline.trained_lora.runs import run_until
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def test_R08_saving_reloading_and_exporting_are_checked_before_the_first_step(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_project(sample_every=4, sample_prompts=PROMPTS).job()

    def broken(path: Path, run: str) -> Any:
        state = load_checkpoint(path, run)
        first = next(iter(state.adapter))
        return replace(state, adapter={**state.adapter, first: state.adapter[first] + 1})

    monkeypatch.setattr(before_training, "load_checkpoint", broken)
    with pytest.raises(TrainingError, match="does not read back"):
        run_until(job)
    monkeypatch.undo()
    assert not RunLayout(job.folder).metrics.exists()
    shutil.rmtree(job.folder)
    assert run_until(job)[0]
    drawn = sorted(path.name for path in (job.folder / "samples").iterdir())
    assert [name[5:13] for name in drawn[::2]] == ["00000000", "00000004", "00000006"]
    assert json.loads(RunLayout(job.folder).result.read_text())["warnings"] == []


def test_R08_a_file_with_another_scale_is_detected_before_the_first_step(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delta weights of a fresh adapter are zero at any scale, so preflight perturbs them."""
    tensors_of = exporter.layout_tensors

    def doubled(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors = tensors_of(*arguments)
        return {name: each * 2 if name.endswith(".alpha") else each for name, each in tensors.items()}

    monkeypatch.setattr(exporter, "layout_tensors", doubled)
    job = make_project().job()
    with pytest.raises(TrainingError, match="in the file differs from the trained one"):
        run_until(job)
    assert not RunLayout(job.folder).metrics.exists()


def test_perturbed_weights_are_restored_bit_for_bit_even_after_a_failure() -> None:
    weights = [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.randn(5))]
    before, random = [weight.detach().clone() for weight in weights], torch.get_rng_state()

    def fail_inside() -> None:
        with perturbed_weights(weights):
            equal_values = [int((weight == was).sum()) for weight, was in zip(weights, before, strict=True)]
            assert equal_values == [0, 0], "values of each weight that are not perturbed"
            raise RuntimeError("while exporting")

    with pytest.raises(RuntimeError, match="while exporting"):
        fail_inside()
    assert differing_tensors(weights, before) == []
    assert torch.equal(torch.get_rng_state(), random)
