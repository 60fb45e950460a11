"""The LoRA files in a run's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from pipeline.models.worker.family import load_family
from pipeline.trained_lora.export.lora_files import LAYOUTS, layout_file, read_lora_file
from pipeline.trained_lora.run_folder import RunLayout, lora_steps
from pipeline.trained_lora.worker import loop
from pipeline.trained_lora.worker.adapter.lora import adapter_state
from pipeline.trained_lora.worker.checkpoint import load_checkpoint
from tests.pipeline.trained_lora.adapters import delta_weights, unet_pipeline
from tests.pipeline.trained_lora.runs import bits, run_until, steps_kept
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def test_every_checkpoint_loads_in_diffusers_as_the_lora_of_its_step(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(steps=5, checkpoint_every=2, keep_checkpoints=1).job()
    assert run_until(job)[0]
    layout = RunLayout(job.folder)
    folders = lora_steps(layout)
    assert list(folders) == [2, 4, 5]
    assert steps_kept(job) == [5]

    loaded: dict[int, dict[str, torch.Tensor]] = {}
    for step, folder in folders.items():
        assert {layout_file(each, "demo") for each in LAYOUTS} <= {path.name for path in folder.iterdir()}
        for each in LAYOUTS:
            metadata = read_lora_file(folder / layout_file(each, "demo")).metadata
            assert (metadata["ss_steps"], metadata["ss_max_train_steps"]) == (str(step), "5")
        pipe = unet_pipeline(job.base)
        pipe.load_lora_weights(folder)
        loaded[step] = delta_weights(pipe.unet, "default_0")

    state = load_checkpoint(folders[5], job.run).adapter
    name = next(iter(loaded[5]))
    expected = 0.5 * state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
    torch.testing.assert_close(loaded[5][name], expected)
    assert not torch.equal(loaded[2][name], loaded[4][name])
    for each in LAYOUTS:
        file = layout_file(each, "demo")
        assert bits(load_file(folders[5] / file)) == bits(load_file(layout.exported / file))


def test_a_checkpoint_holds_the_averaged_lora_and_training_starts_from_it(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(steps=3, checkpoint_every=2, ema_decay=0.5)
    job = project.job()
    assert run_until(job)[0]
    folders = lora_steps(RunLayout(job.folder))
    state = load_checkpoint(folders[2], job.run)
    file = folders[2] / layout_file("diffusers", "demo")
    averaged = {key.removeprefix("unet."): tensor for key, tensor in load_file(file).items()}
    assert set(averaged) == set(state.adapter)
    assert differing_tensors(averaged, state.adapter), "the average must differ from the last weights"

    lora = project.recipe.training.lora
    for each in LAYOUTS:
        start_from = folders[2] / layout_file(each, "demo")
        lora = lora.model_copy(update={"start_from": start_from})
        started = loop.Engine(project.changed(f"from_{each}", lora=lora).job(), load_family(job.base))
        assert bits(adapter_state(started.denoiser)) == bits(averaged)


def test_R12_a_run_whose_checkpoints_have_no_lora_files_resumes(make_project: Callable[..., Project]) -> None:
    """Earlier versions of Latentline saved such checkpoints."""
    job = make_project(steps=4, checkpoint_every=2).job()
    assert not run_until(job, 3)[0]
    for folder in lora_steps(RunLayout(job.folder)).values():
        for path in [*folder.glob("*demo_*"), folder / layout_file("diffusers", ""), folder / "lora.json"]:
            path.unlink()
    finished, lines = run_until(job)
    assert finished
    assert "resuming from the checkpoint of step" in "\n".join(lines)
    assert list(lora_steps(RunLayout(job.folder))) == [4]
