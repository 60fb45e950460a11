"""From a folder of photographs to a trained LoRA: Latentline and the loop of the diffusers documentation."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bench.measure import Figure, Sides, Workplace
from bench.workload import Project, photographs
from demo.tiny_models import make_tiny
from pipeline.models.worker.family import load_family
from pipeline.processes.launch import CPU_THREADS_PER_PROCESS
from pipeline.recipe import recipe_from_mapping

BATCH_SIZE = 4
RANK = 16
LEARNING_RATE = 1e-4


def square_project(folder: Path, *, resolution: int, steps: int, batch_size: int = BATCH_SIZE) -> Project:
    """Return a project that does the loop's work: centre squares, full batches, AdamW, no previews."""
    values = {
        "datasets": [{"name": "photos", "path": str(folder / "photos")}],
        "cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "out"),
        "model": {"base": str(folder / "tiny")},
        "buckets": {"resolution": resolution, "step": 64, "max_aspect_ratio": 1.0},
        "training": {
            "steps": steps,
            "batch_size": batch_size,
            "learning_rate": LEARNING_RATE,
            "checkpoint_every": steps,
            "sample_every": 0,
            "lora": {"rank": RANK, "alpha": float(RANK)},
        },
    }
    return Project(recipe_from_mapping("bench", values))


def whole_job_s(project: Project) -> float:
    """Run all six stages from scratch; return the seconds without process start and model loading."""
    shutil.rmtree(project.recipe.cache_dir, ignore_errors=True)
    shutil.rmtree(project.recipe.output_dir, ignore_errors=True)
    stages = (
        project.scan,
        project.validate,
        project.buckets,
        project.latents,
        project.text,
        project.training,
    )
    return sum(stage().report["seconds"] for stage in stages)


def _instead(*, in_memory: bool) -> Callable[[Workplace], AbstractContextManager[Sides]]:
    @contextmanager
    def opened(place: Workplace) -> Generator[Sides]:
        import torch

        from bench.instead import DiffusersLoop, LoopSettings

        count, epochs, resolution = (120, 20, 256) if place.full else (24, 8, 128)
        make_tiny(place.folder / "tiny")
        paths = photographs(place.folder / "photos", count, max_px=4_000_000)
        project = square_project(place.folder, resolution=resolution, steps=epochs * count // BATCH_SIZE)
        targets = load_family(place.folder / "tiny").lora_targets()
        settings = LoopSettings(resolution, BATCH_SIZE, epochs, LEARNING_RATE, RANK, targets)
        loop = DiffusersLoop(place.folder / "tiny", paths, settings)
        torch.set_num_threads(CPU_THREADS_PER_PROCESS)
        yield Sides(count * epochs, lambda: whole_job_s(project), lambda: loop.seconds(in_memory=in_memory))

    return opened


FIGURES = [
    Figure(
        "encode every step (alternative)",
        "samples",
        "complete job, from an empty cache to an exported LoRA",
        "training loop as in diffusers' script, encoding every batch",
        1.0,
        _instead(in_memory=False),
    ),
    Figure(
        "latents in memory (alternative)",
        "samples",
        "complete job, from an empty cache to an exported LoRA",
        "training loop as in diffusers' script, everything encoded once and kept in memory",
        None,
        _instead(in_memory=True),
    ),
]
