"""trained_lora: its steps compared with a bare loop, and its loader compared with reading the files."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.figures.instead import BATCH_SIZE, LEARNING_RATE, RANK, square_project
from bench.measure import Figure, Side, Sides, Workplace, side_in_process, timed
from bench.peers.base import make_base
from bench.workload import photographs
from demo.tiny_models import make_tiny
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.processes.launch import CPU_THREADS_PER_PROCESS, worker_variables
from pipeline.trained_lora.inputs import training_inputs
from pipeline.trained_lora.job import TrainingJob, read_job

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pipeline.trained_lora.worker.micro_input import MicroInput

COUNT = 24


@dataclass(frozen=True)
class Size:
    """Base model, edge of the squares, and number of squares per batch of a measured training."""

    make_base: Callable[[Path], object]
    resolution: int
    batch_size: int


TINY = Size(make_tiny, 256, BATCH_SIZE)


def prepared_job(folder: Path, *, steps: int, size: Size = TINY) -> TrainingJob:
    """Return a job of `steps` batches of squares, after the stages have filled its cache."""
    size.make_base(folder / "tiny")
    photographs(folder / "photos", COUNT, max_px=400_000)
    project = square_project(folder, resolution=size.resolution, steps=steps, batch_size=size.batch_size)
    for stage in (project.scan, project.validate, project.buckets, project.latents, project.text):
        stage()
    recipe, tables, entries = project.recipe, project.tables, RecipeEntries(project.recipe)
    inputs = training_inputs(recipe, entries, tables.read("vae_latents"), tables.read("text_embeddings"))
    return TrainingJob(recipe, entries.model_folder, "bench", inputs, entries.text_spec(""), prompts=())


def bare_steps(
    unet: Any, optimizer: torch.optim.Optimizer, scheduler: Any, batches: list[MicroInput]
) -> None:
    """Run only forward, backward and AdamW, on tensors in memory."""
    from torch.nn.functional import mse_loss

    for batch in batches:
        noisy = scheduler.add_noise(batch.latent, batch.noise, batch.timesteps)
        answer = unet(noisy, batch.timesteps, encoder_hidden_states=batch.conditions["text_embedding"])
        mse_loss(answer.sample, batch.noise).backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def launched_steps(order: Path) -> Generator[Side]:
    """Prepare the steps of a written job as a launched process runs them."""
    import torch

    from pipeline.models.worker.family import load_family
    from pipeline.processes.launch import cpu_threads
    from pipeline.trained_lora.worker.engine import Engine
    from pipeline.trained_lora.worker.loader import MicroBatchMaker, micro_inputs

    torch.set_num_threads(cpu_threads())
    job = read_job(order)
    plan, family = job.plan(), load_family(job.base)
    engine = Engine(job, family)
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    pin = engine.accelerator.device.type == "cuda"

    def steps() -> None:
        inputs = micro_inputs(plan, maker, rank=0, start=0, pin=pin)
        for _, batch in plan.iterate():
            engine.step(batch, inputs, stop=False)
        inputs.close()

    yield timed(steps)


@contextmanager
def _steps(
    place: Workplace, *, size: Size = TINY, steps: int = 30, full_steps: int = 200
) -> Generator[Sides]:
    import torch
    from diffusers import UNet2DConditionModel
    from peft import LoraConfig

    from pipeline.models.worker.family import load_family
    from pipeline.processes.worker.devices import own_device
    from pipeline.trained_lora.worker.loader import MicroBatchMaker
    from pipeline.trained_lora.worker.noise import make_noise_scheduler

    torch.set_num_threads(CPU_THREADS_PER_PROCESS)
    job = prepared_job(place.folder, steps=full_steps if place.full else steps, size=size)
    plan, family, device = job.plan(), load_family(job.base), torch.device(own_device())
    scheduler = make_noise_scheduler(family, job.recipe.training)
    maker = MicroBatchMaker(job, family, scheduler)
    batches = [maker.make(step, batch.micro_batches[0][0]).to(device) for step, batch in plan.iterate()]
    unet: Any = UNet2DConditionModel.from_pretrained(job.base / "unet")
    unet.to(device).train().requires_grad_(False)
    unet.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=family.lora_targets()))
    weights = [weight for weight in unet.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)

    def limit() -> None:
        bare_steps(unet, optimizer, scheduler, batches)
        # Wait for the GPU, which works asynchronously.
        weights[0].sum().item()

    # The limit runs in this process, with OpenMP's default settings.
    variables = worker_variables(job.recipe.accelerate)
    with side_in_process(launched_steps, job.write(), variables) as ours:
        yield Sides(len(plan), ours, timed(limit))


@contextmanager
def _loader(place: Workplace) -> Generator[Sides]:
    from safetensors.torch import load_file

    from pipeline.cache.store import Store
    from pipeline.models.worker.family import load_family
    from pipeline.trained_lora.worker.loader import MicroBatchMaker, micro_inputs
    from pipeline.trained_lora.worker.noise import make_noise_scheduler

    job = prepared_job(place.folder, steps=2000 if place.full else 400)
    plan, family, store = job.plan(), load_family(job.base), Store(job.recipe.cache_dir)
    scheduler = make_noise_scheduler(family, job.recipe.training)
    maker = MicroBatchMaker(job, family, scheduler)
    entries = {item.variant_id: (item.views[0].entry, item.variants[0].entry) for item in job.inputs}
    slots = [slot for _, batch in plan.iterate() for slot in batch.slots()]
    paths = [store.path(spec) for slot in slots for spec in entries[slot.variant_id]]

    def ours() -> None:
        for _ in micro_inputs(plan, maker, rank=0, start=0, pin=False):
            pass

    def limit() -> None:
        for path in paths:
            load_file(path)

    yield Sides(len(slots), timed(ours), timed(limit))


FIGURES = [
    Figure(
        "training step",
        "steps",
        "complete step in a launched process: read, add noise, forward, backward, AdamW",
        "forward, backward and AdamW, tensors already in memory, in a plain process",
        1.05,
        _steps,
    ),
    Figure(
        "training step, SD 1.5",
        "steps",
        "the same at 256 px and batch size 1, with Stable Diffusion 1.5's UNet at a fifth of its channels",
        "forward, backward and AdamW, tensors already in memory, in a plain process",
        1.05,
        partial(_steps, size=Size(make_base, 256, 1), steps=20, full_steps=40),
    ),
    Figure(
        "training step, SD 1.5 at 512 px",
        "steps",
        "the same at 512 px and batch size 4",
        "forward, backward and AdamW, tensors already in memory, in a plain process",
        1.05,
        partial(_steps, size=Size(make_base, 512, 4), steps=2, full_steps=4),
    ),
    Figure(
        "training loader",
        "samples",
        "read batches and draw noise and timesteps, without training",
        "safetensors.torch.load_file of both cache entries",
        None,
        _loader,
    ),
]
