"""Stages whose growth is measured, and the projects with different numbers of samples."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from bench.figures.scan import SETTLE_S
from bench.workload import Project, tiny_files
from demo.tiny_models import make_tiny
from pipeline.cache.entry_format import EntrySpec
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.reporting.findings import CheckContext
from pipeline.reporting.reports import StageResult, write_report
from pipeline.text_embeddings.stage import needed_captions
from pipeline.trained_lora.inputs import training_inputs
from pipeline.trained_lora.job import TrainingJob

CHECKED = ("raw_images", "validated_dataset", "aspect_buckets", "vae_latents", "text_embeddings")

WARM_US = 30.0
"""Maximum time per unchanged sample, in microseconds."""


@dataclass(frozen=True)
class Stage:
    """One line of the growth table.

    Attributes:
        name: Short, unique and stable name.
        work: Description of the work.
        most_us: Maximum time per sample in microseconds; None if only the growth is of interest.
        run: Does the work, and raises if the stage did anything else.
        before: Prepares the project; not measured.
    """

    name: str
    work: str
    most_us: float | None
    run: Callable[[Project], object]
    before: Callable[[Project], None] = lambda project: None


def project_in(folder: Path) -> Project:
    """Return the project that `prepare` created in `folder`."""
    return Project.at(folder / "project", folder / "photos", base=folder / "tiny", resolution=64)


def prepare(counts: Mapping[Path, int]) -> None:
    """Create a project in each folder: small images with captions, all tables, and both entries of each.

    The files stay in the page cache: a cold scan is a first scan, not a scan of a cold disk. Entries contain
    random values instead of encoded ones, because warm stages do not depend on them.
    """
    for folder, count in counts.items():
        make_tiny(folder / "tiny")
        tiny_files(folder / "photos", count, num_captions=count)
    time.sleep(SETTLE_S)
    for folder in counts:
        _fill(project_in(folder))


def _fill(project: Project) -> None:
    output_dir = project.recipe.output_dir
    write_report(output_dir, "raw_images", project.scan().report)
    write_report(output_dir, "validated_dataset", project.validate().report)
    write_report(output_dir, "aspect_buckets", project.buckets().report)
    _fill_store(project)
    write_report(output_dir, "vae_latents", _warm(project.latents()).report)
    write_report(output_dir, "text_embeddings", _warm(project.text()).report)


def _fill_store(project: Project) -> None:
    entries = RecipeEntries(project.recipe)
    rows = project.tables.read("aspect_buckets").iter_rows(named=True)
    captions = project.tables.read("validated_dataset")["caption"]
    specs = {spec.key: spec for spec in map(entries.latent_spec, rows)}
    specs |= {spec.key: spec for spec in map(entries.text_spec, needed_captions(project.recipe, captions))}
    random = np.random.default_rng(0)

    def write(spec: EntrySpec) -> None:
        tensors = {name: values[tensor.shape] for name, tensor in spec.tensors.items()}
        entries.store.write(spec, tensors, {"num_tokens": 3, "num_cut": 0})

    shapes = {tensor.shape for spec in specs.values() for tensor in spec.tensors.values()}
    values = {shape: random.standard_normal(shape).astype(np.float16) for shape in sorted(shapes)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(write, specs.values()):
            pass


def _warm(result: StageResult) -> StageResult:
    if result.report["encoded"] or result.report["failed"]:
        raise RuntimeError(f"a warm stage must encode nothing, got {result.report}")
    return result


def _forget(asset: str) -> Callable[[Project], None]:
    def forget(project: Project) -> None:
        project.tables.path(asset).unlink(missing_ok=True)
        shutil.rmtree(project.tables.folder / "known", ignore_errors=True)

    return forget


def _checks(project: Project) -> None:
    context = CheckContext(project.recipe, project.tables)
    for asset in CHECKED:
        for finding in import_module(f"pipeline.{asset}.checks").run(context):
            if finding.closes:
                raise RuntimeError(f"{asset}: the gate {finding.name} is closed: {finding.summary}")


def _plan(project: Project) -> None:
    recipe, entries = project.recipe, RecipeEntries(project.recipe)
    latents, text = (project.table(asset, "trained_lora") for asset in ("vae_latents", "text_embeddings"))
    inputs = training_inputs(recipe, entries, latents, text)
    job = TrainingJob(recipe, entries.model_folder, "bench", inputs, entries.text_spec(""), prompts=())
    # The first step shuffles its whole epoch.
    job.plan()[0]


def _cached(stage: Callable[[Project], StageResult]) -> Callable[[Project], None]:
    def run(project: Project) -> None:
        _warm(stage(project))

    return run


STAGES = (
    Stage("scan cold", "first scan", None, Project.scan, _forget("raw_images")),
    Stage("scan unchanged", "scan without changes", WARM_US, Project.scan),
    Stage("validation cold", "first validation", None, Project.validate, _forget("validated_dataset")),
    Stage("validation unchanged", "validation without changes", WARM_US, Project.validate),
    Stage("buckets", "bucket, size and crop of each", WARM_US, Project.buckets),
    Stage("latents warm", "a full cache", WARM_US, _cached(Project.latents)),
    Stage("text warm", "a full cache", WARM_US, _cached(Project.text)),
    Stage("checks", "all of the five assets before training", None, _checks),
    Stage("plan", "the training inputs, and one epoch shuffled", None, _plan),
)
