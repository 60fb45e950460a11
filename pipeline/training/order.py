"""What a launched training process is told: an order file, and beside it the inputs as a table.

    runs/<run>/
        order.json        recipe, base model, run id, entries of the empty caption and of the sample prompts
        inputs.parquet    one row a sample: bucket, repeats, geometry, and its two store entries
        result.json       what comes back

Torch-free; written by the launching process, read by each launched one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pipeline.atomic import write_bytes, write_text
from pipeline.recipe import Recipe
from pipeline.runs import run_folder
from pipeline.store import EntrySpec, TensorSpec
from pipeline.training.plan import PlanSample, PlanSettings, TrainingPlan

ORDER_FILE = "order.json"
INPUTS_FILE = "inputs.parquet"
DROPPED_FILE = "dropped.parquet"
"""Of runs that drop what does not fill a batch: epoch, sample_id, times."""


@dataclass(frozen=True, slots=True)
class TrainingInput:
    """One sample as training sees it; sizes and positions are (height, width) or (top, left) in pixels."""

    sample_id: str
    bucket: str
    repeats: int
    caption: str
    latent: EntrySpec
    text: EntrySpec
    original_size_hw: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size_hw: tuple[int, int]


@dataclass(frozen=True)
class Prompt:
    """A caption to draw, with its store entry and the picture's (height, width) in pixels."""

    caption: str
    text: EntrySpec
    size_hw: tuple[int, int]


@dataclass(frozen=True)
class TrainingOrder:
    """Everything that a launched process needs to know.

    Attributes:
        recipe: With absolute paths.
        base: The base model's local folder.
        run: The run's id, its fingerprint.
        inputs: The samples, sorted by sample_id.
        empty_text: The empty caption's entry, for caption dropout and guidance.
        prompts: What sample pictures are drawn for.
    """

    recipe: Recipe
    base: Path
    run: str
    inputs: tuple[TrainingInput, ...]
    empty_text: EntrySpec
    prompts: tuple[Prompt, ...]

    @property
    def folder(self) -> Path:
        """`output_dir/runs/<run>`."""
        return run_folder(self.recipe.output_dir, self.run)

    def plan(self) -> TrainingPlan:
        """The run's plan; the same in every process.

        Raises:
            TrainingError: There is no sample.
        """
        training = self.recipe.training
        settings = PlanSettings(
            steps=training.steps,
            batch_size=training.batch_size,
            gradient_accumulation=training.gradient_accumulation,
            num_processes=self.recipe.accelerate.num_processes,
            caption_dropout=self.recipe.text.caption_dropout,
            seed=training.seed,
            underfilled=self.recipe.buckets.underfilled,
        )
        samples = [PlanSample(row.sample_id, row.bucket, row.repeats) for row in self.inputs]
        return TrainingPlan(samples, settings)

    def write(self) -> Path:
        """Write order and inputs into the run's folder.

        Returns:
            The order file's path.
        """
        buffer = io.BytesIO()
        pl.DataFrame([_row(item) for item in self.inputs], schema=_INPUT_COLUMNS).write_parquet(buffer)
        write_bytes(self.folder / INPUTS_FILE, buffer.getvalue())
        order = {
            "recipe": self.recipe.model_dump(mode="json"),
            "base": str(self.base),
            "run": self.run,
            "empty_text": _spec_json(self.empty_text),
            "prompts": [
                {"caption": prompt.caption, "text": _spec_json(prompt.text), "size_hw": prompt.size_hw}
                for prompt in self.prompts
            ],
        }
        self._write_dropped()
        path = self.folder / ORDER_FILE
        write_text(path, json.dumps(order, indent=2, ensure_ascii=False) + "\n")
        return path

    def _write_dropped(self) -> None:
        """What the plan leaves out, if its policy is to drop: one row a sample and epoch."""
        plan = self.plan()
        if plan.settings.underfilled != "drop":
            return
        epochs = range(-(-len(plan) // plan.steps_per_epoch))
        rows = [(epoch, name, times) for epoch in epochs for name, times in plan.dropped(epoch).items()]
        schema = {"epoch": pl.Int32, "sample_id": pl.String, "times": pl.Int32}
        buffer = io.BytesIO()
        pl.DataFrame(rows, schema=schema, orient="row").write_parquet(buffer)
        write_bytes(self.folder / DROPPED_FILE, buffer.getvalue())


def read_order(path: Path) -> TrainingOrder:
    """What `TrainingOrder.write` wrote to `path` and beside it."""
    order = json.loads(path.read_text(encoding="utf-8"))
    inputs = pl.read_parquet(path.with_name(INPUTS_FILE))
    return TrainingOrder(
        recipe=Recipe.model_validate_json(json.dumps(order["recipe"])),
        base=Path(order["base"]),
        run=order["run"],
        inputs=tuple(_input(row) for row in inputs.iter_rows(named=True)),
        empty_text=_spec(order["empty_text"]),
        prompts=tuple(
            Prompt(item["caption"], _spec(item["text"]), _pair(item["size_hw"])) for item in order["prompts"]
        ),
    )


_INPUT_COLUMNS: dict[str, Any] = {
    "sample_id": pl.String,
    "bucket": pl.String,
    "repeats": pl.Int32,
    "caption": pl.String,
    "latent": pl.String,
    "latent_tensors": pl.String,
    "text": pl.String,
    "text_tensors": pl.String,
    "original_size_hw": pl.List(pl.Int32),
    "crop_top_left": pl.List(pl.Int32),
    "target_size_hw": pl.List(pl.Int32),
}
"""`latent` and `text` are keys; `*_tensors` are JSON, the same for many rows."""


def _row(item: TrainingInput) -> dict[str, Any]:
    return {
        "sample_id": item.sample_id,
        "bucket": item.bucket,
        "repeats": item.repeats,
        "caption": item.caption,
        "latent": item.latent.key,
        "latent_tensors": _tensors_json(item.latent),
        "text": item.text.key,
        "text_tensors": _tensors_json(item.text),
        "original_size_hw": item.original_size_hw,
        "crop_top_left": item.crop_top_left,
        "target_size_hw": item.target_size_hw,
    }


def _input(row: Mapping[str, Any]) -> TrainingInput:
    return TrainingInput(
        sample_id=row["sample_id"],
        bucket=row["bucket"],
        repeats=row["repeats"],
        caption=row["caption"],
        latent=_spec({"kind": "latents", "key": row["latent"], "tensors": json.loads(row["latent_tensors"])}),
        text=_spec({"kind": "text", "key": row["text"], "tensors": json.loads(row["text_tensors"])}),
        original_size_hw=_pair(row["original_size_hw"]),
        crop_top_left=_pair(row["crop_top_left"]),
        target_size_hw=_pair(row["target_size_hw"]),
    )


def _pair(values: list[int]) -> tuple[int, int]:
    first, second = values
    return first, second


def _tensors_json(spec: EntrySpec) -> str:
    return json.dumps({name: [tensor.dtype, tensor.shape] for name, tensor in spec.tensors.items()})


def _spec_json(spec: EntrySpec) -> dict[str, Any]:
    return {"kind": spec.kind, "key": spec.key, "tensors": json.loads(_tensors_json(spec))}


def _spec(value: Mapping[str, Any]) -> EntrySpec:
    tensors = {name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in value["tensors"].items()}
    return EntrySpec(kind=value["kind"], key=value["key"], tensors=tensors)
