"""Tests before the first step: what would otherwise fail after hours fails in the first minute.

agreement    the machines of a training have the same job, base model and packages
trial step   memory suffices for the largest step
adapter      the training adapter changes the loss
pre-flight   a checkpoint is saved and reloaded, and the adapter exported and verified
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from torch import nn

from pipeline.errors import LatentlineError, TrainingError
from pipeline.models.diffusers_folder import weight_files
from pipeline.processes.machines import machines_of_this_process
from pipeline.processes.worker.devices import out_of_memory_as
from pipeline.trained_lora.plan.steps import Slot
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.checkpoint import load_checkpoint, save_checkpoint
from pipeline.trained_lora.worker.ema import restored_afterwards
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.startup import PREFLIGHT, Startup
from pipeline.trained_lora.worker.training_adapter import refused_adapter

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.inputs import TrainingInputs
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.plan.steps import StepPlan, TrainingPlan
    from pipeline.trained_lora.worker.engine import Engine
    from pipeline.trained_lora.worker.micro_input import MicroInput

_PACKAGES = ("latentline", "accelerate", "diffusers", "peft", "torch", "transformers")

_FIX = (
    "use the same environment, base model and order on all machines, for example from a shared disk, and "
    "start the same commands again"
)

_NUM_STEPS = 1000
"""Number of steps from the start of the plan among which the largest is tried."""

_PERTURBATION_STD = 0.01
"""Standard deviation of the perturbation; trained LoRA weights have about this size."""


def run_tests_before_training(
    engine: Engine,
    job: TrainingJob,
    family: WorkerFamily,
    *,
    startup: Startup,
    memory_error: Callable[[str], LatentlineError],
    export: Callable[[Path], object],
) -> None:
    """Run one step and undo it, then save, reload and export on the main process.

    The engine has not trained yet. `memory_error` returns the error for memory that runs out, from a
    description of the memory in use. `export` writes the adapter's files into a folder and verifies them.

    Raises:
        TrainingError: Memory is missing, the training adapter has no effect, or a file does not read back.
    """
    startup.begin(startup.trial)
    with out_of_memory_as(memory_error):
        maker = MicroBatchMaker(job, family, engine.noise_scheduler)
        run_trial_step(engine, largest_step(job.plan(), job.inputs), maker.make)
    require_adapter_effect(engine, probe_input(job, family, engine), job.training_adapter)
    if engine.accelerator.is_main_process:
        startup.begin(PREFLIGHT)
        run_preflight(engine, RunLayout(job.folder), job.run, export)


def require_agreement(job: TrainingJob, family: WorkerFamily) -> None:
    """Raise TrainingError if a machine trains another run, or with other packages or weights.

    Every rank calls it.
    """
    machines = machines_of_this_process()
    if machines.number == 1:
        return

    # Each machine reads its own job, base model and packages. If they differed, the processes would compute
    # different gradients, or wait for each other forever.
    gathered: list[tuple[int, dict[str, str]]] = gather_object([(machines.rank, _machine_facts(job, family))])
    _, expected = gathered[0]
    for rank, facts in gathered:
        for name, value in facts.items():
            if value != expected[name]:
                raise TrainingError(
                    f"{name} on machine {rank} must be {expected[name]}, as on machine 0, got {value}",
                    where=f"machine {rank} of {machines.number}",
                    fix=_FIX,
                )


def _machine_facts(job: TrainingJob, family: WorkerFamily) -> dict[str, str]:
    weights = weight_files(family.model.component(family.spec.denoiser_name))
    sizes = [f"{path.name} ({path.stat().st_size} bytes)" for path in weights]
    return {
        "the run": job.run,
        "the number of steps": str(job.recipe.training.num_steps),
        f"the {family.spec.denoiser_name}": ", ".join(sizes),
        **{f"the version of {name}": version(name) for name in _PACKAGES},
    }


def largest_step(plan: TrainingPlan, inputs: TrainingInputs) -> StepPlan:
    """Return the first step with the most latent values in one micro-batch of one rank.

    Values of all images that the denoiser sees count too. Only the first `_NUM_STEPS` steps are compared.
    """

    def num_values(share: tuple[Slot, ...]) -> int:
        # All samples of a micro-batch are from one bucket, and their references have the same shapes.
        view = inputs.named(share[0].variant_id).views[share[0].view]
        return len(share) * sum(
            max(math.prod(tensor.shape) for tensor in entry.tensors.values())
            for entry in (view.entry, *view.images)
        )

    def largest_share(step: StepPlan) -> int:
        return max(num_values(share) for micro in step.micro_batches for share in micro)

    # Each epoch is shuffled for this, so a long plan is not compared completely.
    return max((plan[number] for number in range(min(len(plan), _NUM_STEPS))), key=largest_share)


def run_trial_step(
    engine: Engine, step: StepPlan, make_input: Callable[[int, tuple[Slot, ...]], MicroInput]
) -> None:
    """Run one optimizer step and undo it bit for bit; every rank calls it with the same step."""
    before = engine.state(0)

    # `Engine.state` does not copy the optimizer's tensors, and the step below changes them in place.
    before = replace(before, optimizer=copy.deepcopy(before.optimizer))

    def inputs() -> Iterator[tuple[StepPlan, MicroInput]]:
        for micro in step.micro_batches:
            yield step, make_input(step.step, micro[engine.accelerator.process_index])

    # Only missing memory ends the run here. Training meets any other error of the step again, and then keeps
    # the weights from before it.
    with suppress(TrainingError):
        engine.step(step, inputs(), stop=False)
    for weight in engine.weights:
        weight.grad = None  # a step that failed leaves its gradients
    engine.restore(before)


def require_adapter_effect(engine: Engine, micro: MicroInput, training_adapter: Path | None) -> None:
    """Raise TrainingError if the training adapter does not change the loss (FAILURES E05)."""
    if training_adapter is None:
        return
    micro = micro.to(engine.accelerator.device)
    with engine.objective.evaluation():
        plain = engine.objective.losses(micro, engine.joint_model)
    with engine.objective.evaluation(), engine.training_adapter.applied():
        adapted = engine.objective.losses(micro, engine.joint_model)
    if torch.equal(plain, adapted):
        raise refused_adapter(training_adapter, "it does not change the model's prediction")


def run_preflight(engine: Engine, layout: RunLayout, run: str, export: Callable[[Path], object]) -> None:
    """Save a checkpoint, reload it, and export the adapter (FAILURES R08)."""
    state = engine.state(0)
    path = save_checkpoint(layout.checkpoints, run, state)
    reloaded = load_checkpoint(path, run)
    if set(state.adapter) != set(reloaded.adapter) or not all(
        torch.equal(weight, reloaded.adapter[name]) for name, weight in state.adapter.items()
    ):
        raise TrainingError(
            "a checkpoint does not read back as it was saved",
            where=str(path),
            fix="check the disk that holds output_dir",
        )

    # A fresh adapter is zero, and zeros pass verification at any scale: verify nonzero weights.
    folder = layout.exported.with_name("lora.preflight")
    with perturbed_weights(engine.weights):
        export(folder)
    shutil.rmtree(folder)


@contextmanager
def perturbed_weights(weights: Sequence[nn.Parameter]) -> Generator[None]:
    """Add small random numbers to all weights within the context, and restore them bit for bit."""
    # A generator of its own, so that the pre-flight does not change the training's random numbers.
    random = torch.Generator().manual_seed(0)
    with restored_afterwards(weights):
        with torch.no_grad():
            for weight in weights:
                noise = torch.randn(weight.shape, generator=random).to(weight.device)
                weight.add_(noise, alpha=_PERTURBATION_STD)
        yield


def probe_input(job: TrainingJob, family: WorkerFamily, engine: Engine) -> MicroInput:
    """Return the first sample at noise level 0.5."""
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    slot = Slot(job.inputs[0].variant_id, 0, epoch=0, occurrence=0, drop_caption=False)
    return maker.make_fixed((slot,), [0.5])
