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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pipeline.atomic import write_bytes, write_text
from pipeline.recipe import Recipe
from pipeline.runs import run_folder
from pipeline.store import EntrySpec
from pipeline.training.inputs import TrainingInput, as_frame, from_frame, pair, spec_of, tensors_json
from pipeline.training.plan import PlanSample, PlanSettings, TrainingPlan

ORDER_FILE = "order.json"
INPUTS_FILE = "inputs.parquet"
DROPPED_FILE = "dropped.parquet"
"""Of runs that drop what does not fill a batch: epoch, sample_id, times."""


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
        samples = [
            PlanSample(
                row.sample_id, row.bucket, row.repeats, variants=len(row.variants), views=len(row.views)
            )
            for row in self.inputs
        ]
        return TrainingPlan(samples, settings)

    def write(self) -> Path:
        """Write order and inputs into the run's folder.

        Returns:
            The order file's path.
        """
        buffer = io.BytesIO()
        as_frame(self.inputs).write_parquet(buffer)
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
        inputs=from_frame(inputs),
        empty_text=spec_of(order["empty_text"]),
        prompts=tuple(
            Prompt(item["caption"], spec_of(item["text"]), pair(item["size_hw"])) for item in order["prompts"]
        ),
    )


def _spec_json(spec: EntrySpec) -> dict[str, Any]:
    return {"kind": spec.kind, "key": spec.key, "tensors": json.loads(tensors_json(spec))}
