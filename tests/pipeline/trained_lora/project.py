"""A small project with a complete cache, written directly so that tests exercise training alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pipeline.cache.recipe_entries import STAT_COLUMNS, RecipeEntries
from pipeline.cache.store import EntrySpec
from pipeline.images.geometry import Placement, Size, ladder
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.side_inputs import MASKS, REFERENCES
from pipeline.storage.tables import SCHEMAS, Tables, columns_in, row_names
from pipeline.trained_lora.inputs import training_inputs
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.prompts import preview_prompts

SIZES = {"64x64": 5, "32x96": 3}
"""Number of samples per bucket. With batches of 2, both buckets end in a partial batch."""


UNETS = ("epsilon", "v_prediction", "sdxl")
"""Base models that `FEW_MODULES` fits."""

ALL_MODULES = {"rank": 4, "alpha": 2.0}
"""Adapter of all modules that are trained by default."""

FEW_MODULES = {"rank": 4, "alpha": 2.0, "modules": ["mid_block.*.attn?.to_?", "mid_block.*.attn?.to_out.0"]}
"""Adapter of 8 modules of a UNet instead of 32.

Half of the time of a run with all modules is spent on files that are written and read back.
"""

INFERENCE_STEPS = 3
"""Denoising steps of pictures; 20, the default, would give the same comparison in six times the time."""

PROMPTS = tuple({"prompt": prompt, "steps": INFERENCE_STEPS} for prompt in ("a red cat", "a blue rocket"))
"""Prompts of previews."""

WRITTEN = ("raw_images", "validated_dataset", "aspect_buckets", "vae_latents", "text_embeddings")
"""Tables of a project."""

PLACEMENT = Placement((ladder(64, 32, 3.0),))


@dataclass
class Project:
    """A recipe with a complete cache, and its two cache tables."""

    recipe: Recipe
    latents: pl.DataFrame
    text: pl.DataFrame

    def job(self, run: str = "0123456789abcdef") -> TrainingJob:
        entries = RecipeEntries(self.recipe)
        inputs = training_inputs(self.recipe, entries, self.latents, self.text)
        prompts = preview_prompts(self.recipe, entries, inputs, self.latents)
        return TrainingJob(self.recipe, entries.model_folder, run, inputs, entries.text_spec(""), prompts)

    def changed(
        self,
        output: str,
        *,
        num_processes: int = 1,
        shard: bool = False,
        mixed_precision: str = "no",
        **training: Any,
    ) -> Project:
        """Return a project with the same cache but other training settings and another output folder."""
        settings = self.recipe.training.model_copy(update=training)
        launch_settings = {
            "num_processes": num_processes,
            "shard": shard,
            "mixed_precision": mixed_precision,
        }
        accelerate = self.recipe.accelerate.model_copy(update=launch_settings)
        update = {
            "training": settings,
            "accelerate": accelerate,
            "output_dir": self.recipe.output_dir.with_name(output),
        }
        other = Project(self.recipe.model_copy(update=update), self.latents, self.text)
        before, after = (Tables(each.recipe.output_dir) for each in (self, other))
        for asset in WRITTEN:
            if not after.path(asset).exists():
                after.path(asset).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(before.path(asset), after.path(asset))
        return other


@pytest.fixture(scope="session")
def tiny_bases(tmp_path_factory: pytest.TempPathFactory, tiny_sdxl: Path) -> dict[str, Path]:
    """Return tiny base models by name: Stable Diffusion per prediction type, SDXL and FLUX.2 klein."""
    from demo.tiny_models import make_tiny, make_tiny_flux2_klein

    folder = tmp_path_factory.mktemp("bases")
    for kind in ("epsilon", "v_prediction"):
        make_tiny(folder / kind, prediction_type=kind)
    make_tiny_flux2_klein(folder / "klein")
    return {"sdxl": tiny_sdxl, **{kind: folder / kind for kind in ("epsilon", "v_prediction", "klein")}}


@pytest.fixture
def make_project(tmp_path: Path, tiny_bases: dict[str, Path]) -> Callable[..., Project]:
    """Return `project_in` for the test's folder."""
    return partial(project_in, tmp_path, tiny_bases)


def project_in(
    folder: Path,
    bases: dict[str, Path],
    *,
    prediction: str = "epsilon",
    sizes: dict[str, int] | None = None,
    dropout: float = 0.25,
    datasets: dict[str, dict[str, Any]] | None = None,
    **training: Any,
) -> Project:
    """Create a project. Extra arguments are settings of `training`; datasets get samples in rotation."""
    settings = {"steps": 6, "batch_size": 2, "gradient_accumulation": 2, "seed": 7, "learning_rate": 1e-2}
    settings |= {
        "sample_every": 0,
        "checkpoint_every": 100,
        "lora": FEW_MODULES if prediction in UNETS else ALL_MODULES,
        **training,
    }
    values = {
        "datasets": [
            {"name": name, "path": folder / name, **own} for name, own in (datasets or {"photos": {}}).items()
        ],
        "cache_dir": folder / "cache",
        "output_dir": folder / "output",
        "model": {"base": str(bases[prediction])},
        "buckets": {"resolution": 64, "step": 32},
        "text": {"caption_dropout": dropout},
        "accelerate": {"mixed_precision": "no"},
        "training": settings,
    }
    recipe = recipe_from_mapping("demo", values)
    project = Project(recipe, *fill_cache(recipe, sizes or SIZES))
    write_tables(project)
    return project


def fill_cache(recipe: Recipe, sizes: dict[str, int]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Write random latents and text embeddings, including the empty caption, and return the two tables."""
    entries = RecipeEntries(recipe)
    latents: list[dict[str, Any]] = []
    text: list[dict[str, Any]] = []
    masks: list[dict[str, Any]] = []
    for caption in ("", *recipe.preview_captions):
        put(entries, entries.text_spec(caption))
    for bucket, number in sizes.items():
        for index in range(number):
            dataset = recipe.datasets[index % len(recipe.datasets)].name
            row = geometry_row(bucket, index, dataset)
            ids = {name: row[name] for name in ("sample_id", "dataset", "path")}
            spec = entries.latent_spec(row)
            channels, height, width = spec.tensors["latent"].shape
            shape = {
                "latent_channels": channels,
                "latent_height": height,
                "latent_width": width,
                "flipped": False,
            }
            latents.append(as_row("vae_latents", {**row, **shape, **put(entries, spec)}))
            if recipe.datasets[index % len(recipe.datasets)].mask is not None:
                masks.append(
                    {**{name: row[name] for name in ("sample_id", "bucket")}, **put_mask(entries, row)}
                )
            caption = f"photograph {index} of {bucket}"
            spec = entries.text_spec(caption)
            length = next(iter(spec.tensors.values())).shape[0]
            counts = {"variant": 0, "num_tokens": 7, "num_cut": 0, "text_length": length}
            text.append({**ids, "caption": caption, **counts, **put(entries, spec)})
    table = unchecked("vae_latents", latents)
    if any(dataset.references for dataset in recipe.datasets):
        table = put_references(entries, table)
    if masks:
        table = table.join(pl.DataFrame(masks), on=["sample_id", "bucket"], how="left", maintain_order="left")
        table = table.select(
            pl.col(name).cast(kind) for name, kind in columns_in("vae_latents", table).items()
        )
    return table, unchecked("text_embeddings", text)


def geometry_row(bucket: str, index: int, dataset: str) -> dict[str, Any]:
    """Return a sample that is assigned to the bucket, with a few pixel rows cropped."""
    height, width = (int(edge) for edge in bucket.split("x"))
    geometry = PLACEMENT.assign(Size(2 * height + 8, 2 * width))
    assert geometry is not None
    assert geometry.bucket == bucket
    path = f"{bucket}-{index}.jpg"
    return {
        "sample_id": f"{dataset}/{path}",
        "dataset": dataset,
        "path": path,
        "content_hash": hashlib.sha256(path.encode()).hexdigest(),
        "duplicate_group": hashlib.sha256(path.encode()).hexdigest(),
        "height": geometry.original_size.height,
        "width": geometry.original_size.width,
        "bucket": bucket,
        "resized_height": geometry.resized_size.height,
        "resized_width": geometry.resized_size.width,
        "crop_top": geometry.crop.top,
        "crop_left": geometry.crop.left,
        "target_height": height,
        "target_width": width,
    }


def put_mask(entries: RecipeEntries, row: dict[str, Any]) -> dict[str, Any]:
    """Write a mask entry that is white in a random part, and return the table columns that describe it."""
    row = {**row, "mask_path": row["path"], "mask_hash": row["content_hash"][::-1], "flipped": False}
    spec = MASKS.spec(entries, MASKS.entry_rows(entries, pl.DataFrame([row])).row(0, named=True))
    weights = np.random.default_rng(int(spec.key[:8], 16)).random(spec.tensors["mask"].shape)
    entries.store.write(spec, {"mask": np.round(weights).astype(np.float16)}, {"made_by": "a test"})
    stat = entries.store.check(spec).stat
    assert stat is not None
    columns = dict(zip([f"mask_{name}" for name in STAT_COLUMNS], astuple(stat), strict=True))
    names = ("mask_path", "mask_hash")
    return (
        {name: row[name] for name in names}
        | {"mask_mean": 0.5, "mask_key": spec.key, "mask_ppm": 500_000}
        | columns
    )


def put_references(entries: RecipeEntries, table: pl.DataFrame) -> pl.DataFrame:
    """Write the references of all samples, and return the table with the columns that describe them.

    References have a size of their own; the first one of every third sample is larger than the others.
    """
    numbers = {dataset.name: len(dataset.references) for dataset in entries.recipe.datasets}
    images: list[str | None] = []
    for index, (dataset, path) in enumerate(table.select("dataset", "path").iter_rows()):
        of_sample: list[dict[str, Any]] = []
        for number in range(numbers[dataset]):
            size = {"height": 64, "width": 96 if number == 0 and index % 3 == 0 else 64}
            digest = hashlib.sha256(f"reference {number} of {path}".encode()).hexdigest()
            of_sample.append({"path": path, "hash": digest, **size})
        images.append(json.dumps(of_sample) if of_sample else None)
    table = table.with_columns(reference_images=pl.Series(images, dtype=pl.String))

    rows = REFERENCES.entry_rows(entries, table)
    written = [put(entries, REFERENCES.spec(entries, row)) for row in rows.iter_rows(named=True)]
    recorded = pl.DataFrame(written).drop("dtype").unique("key")
    return REFERENCES.with_entries(table.with_row_index("row"), rows, recorded).drop("row")


def put(entries: RecipeEntries, spec: EntrySpec) -> dict[str, Any]:
    """Write an entry of random values and return the table columns that describe it."""
    rng = np.random.default_rng(int(spec.key[:8], 16))
    arrays = {
        name: rng.standard_normal(tensor.shape).astype(tensor.dtype) for name, tensor in spec.tensors.items()
    }
    entries.store.write(spec, arrays, {"made_by": "a test"})
    stat = entries.store.check(spec).stat
    assert stat is not None
    dtype = next(iter(spec.tensors.values())).dtype
    return {"key": spec.key, "dtype": dtype, **dict(zip(STAT_COLUMNS, astuple(stat), strict=True))}


def write_tables(project: Project) -> None:
    """Write all tables up to the two caches, as the stages would."""
    tables = Tables(project.recipe.output_dir)
    scanned = {"channels": 3, "file_bytes": 10_000}
    images = [as_row("raw_images", {**row, **scanned}) for row in project.latents.to_dicts()]
    tables.write("raw_images", unchecked("raw_images", images).unique("sample_id"))
    captions = dict(project.text.select("sample_id", "caption").iter_rows())
    rows = [
        {**row, "caption": captions[row["sample_id"]], "more_captions": "[]"}
        for row in project.latents.to_dicts()
    ]
    for asset in ("validated_dataset", "aspect_buckets"):
        tables.write(asset, unchecked(asset, [as_row(asset, row) for row in rows]))
    tables.write("vae_latents", project.latents)
    tables.write("text_embeddings", project.text)


def unchecked(asset: str, rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Return a table in the order of `frame`, without its checks: writing the table checks it."""
    return pl.DataFrame(rows, schema=SCHEMAS[asset]).sort(row_names(asset))


def as_row(asset: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `asset` with the given values and placeholders in all other columns."""
    columns = SCHEMAS[asset].items()
    return {name: known.get(name, "" if kind == pl.String else 0) for name, kind in columns}
