"""Complete jobs with full-size base models: caching and training in launched processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.gpu import bare
from bench.gpu.experiment import Experiment, Pair, Part, Reading
from bench.gpu.models import MODELS, BaseModel
from bench.gpu.rig import Bench, Rig
from bench.gpu.training import inputs_of
from bench.gpu.watch import Watch, release

if TYPE_CHECKING:
    from pipeline.reporting.reports import Report


@contextmanager
def _complete_job(bench: Bench, model: BaseModel) -> Generator[Pair]:
    rig = bench.rig(model, "job", steps=bench.scale.job_steps)
    rig.prepare()
    captions = ["", *sorted(set(rig.project.tables.read("validated_dataset")["caption"]))]
    notes: dict[str, Any] = {}

    def ours(watch: Watch) -> Reading:
        shutil.rmtree(rig.recipe.cache_dir, ignore_errors=True)
        shutil.rmtree(rig.recipe.output_dir / "runs", ignore_errors=True)
        project = rig.project
        stages = {"latents": project.latents, "text": project.text, "training": project.training}
        reports = {name: stage().report for name, stage in stages.items()}
        units = {"latents": bench.scale.images, "text": len(captions), "training": bench.scale.job_steps}
        notes.update({name: _note(report, units[name]) for name, report in reports.items()})
        seconds = {name: float(report["seconds"]) for name, report in reports.items()}
        peak_bytes = reports["training"]["peak_memory_bytes"]
        return {**seconds, **({"bytes": float(peak_bytes)} if peak_bytes else {})}

    def limit(watch: Watch) -> Reading:
        return {
            "latents": _alone(bench, partial(_bare_latents, rig)),
            "text": _alone(bench, partial(bare.text_forward, rig, captions, bench.device)),
            "training": _alone(bench, partial(_bare_training, rig), watch),
            **watch.reading,
        }

    yield Pair(1, ours, limit, notes)


def _alone(bench: Bench, load: Callable[[], Callable[[], object]], watch: Watch | None = None) -> float:
    """Load the work, run it, free its memory, and return its seconds."""
    watch = watch or Watch(bench.device)
    work = load()
    with watch.work():
        work()
    del work
    release()
    return watch.reading["seconds"]


def _bare_latents(rig: Rig) -> Callable[[], None]:
    bench = rig.bench
    network = bare.vae(rig.family.model.component("vae"), "bfloat16", bench.device)
    images = bare.pixels(network, 4 if bench.scale.full else 2, bench.scale.resolution)
    return partial(bare.encode, network, images, bench.scale.images)


def _bare_training(rig: Rig) -> Callable[[], None]:
    cached = rig.bench.rig(rig.model, "cached", steps=rig.bench.scale.job_steps)
    return bare.BareTraining(rig, inputs_of(cached), rig.bench.device).steps


def _note(report: Report, units: int) -> dict[str, float | None]:
    return {
        "per_s": round(units / max(report["seconds"], 1e-9), 3),
        "startup_s": report["startup_seconds"],
        "peak_bytes": report.get("peak_memory_bytes"),
    }


EXPERIMENTS = [
    Experiment(
        f"{model.name} job",
        "launched stages, from an empty cache; without starting processes and loading the model",
        "VAE, text encoders and training steps by themselves, on tensors on the device",
        (
            Part("latents", "latents", "jobs"),
            Part("text", "text", "jobs"),
            Part("training", "training", "jobs"),
            Part("training memory", "bytes", "peak", "bytes"),
        ),
        30.0,
        partial(_complete_job, model=model),
        warm=False,
    )
    for model in MODELS
]
