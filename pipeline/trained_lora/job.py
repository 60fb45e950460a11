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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from pipeline.cache.store import EntrySpec
from pipeline.errors import TrainingError, counted
from pipeline.recipe import Recipe
from pipeline.storage.atomic import write_bytes, write_text
from pipeline.storage.tables import only
from pipeline.trained_lora.plan.plan import PlanSettings, TrainingPlan
from pipeline.trained_lora.plan.samples import PlanSamples
from pipeline.trained_lora.run_folder import run_folder
from pipeline.trained_lora.samples import TrainingInputs, tensors_json, tensors_of

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
        inputs: The samples, sorted by sample_id, those held out among them.
        empty_text: The empty caption's entry, for caption dropout and guidance.
        prompts: What sample pictures are drawn for.
        provenance: Goes into each file of the result; JSON-serialisable.
        elsewhere: Folders of the model's components that are not taken from `base`.
    """

    recipe: Recipe
    base: Path
    run: str
    inputs: TrainingInputs
    empty_text: EntrySpec
    prompts: tuple[Prompt, ...]
    provenance: dict[str, Any] = field(default_factory=dict[str, Any])
    elsewhere: Mapping[str, Path] = field(default_factory=dict[str, Path])

    @property
    def folder(self) -> Path:
        """`output_dir/runs/<run>`."""
        return run_folder(self.recipe.output_dir, self.run)

    def plan(self) -> TrainingPlan:
        """The run's plan; the same in every process.

        Raises:
            TrainingError: There is no sample.
        """
        return TrainingPlan(plan_samples(self.inputs), plan_settings(self.recipe))

    def write(self) -> Path:
        """Write order and inputs into the run's folder.

        Returns:
            The order file's path.
        """
        buffer = io.BytesIO()
        self.inputs.table.write_parquet(buffer)
        write_bytes(self.folder / INPUTS_FILE, buffer.getvalue())
        order = {
            "recipe": self.recipe.model_dump(mode="json"),
            "base": str(self.base),
            "elsewhere": {role: str(place) for role, place in self.elsewhere.items()},
            "run": self.run,
            "provenance": self.provenance,
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
        rows = [
            (epoch, name, times)
            for epoch in range(plan.num_epochs)
            for name, times in plan.dropped(epoch).items()
        ]
        schema = {"epoch": pl.Int32, "sample_id": pl.String, "times": pl.Int32}
        buffer = io.BytesIO()
        pl.DataFrame(rows, schema=schema, orient="row").write_parquet(buffer)
        write_bytes(self.folder / DROPPED_FILE, buffer.getvalue())


def plan_samples(inputs: TrainingInputs) -> PlanSamples:
    """The samples that are trained on, as the plan sees them."""
    variants, views = pl.col("captions").list.len(), pl.col("latents").list.len()
    columns = inputs.table.select(
        *("sample_id", "bucket", "repeats", "dataset", "held_out"), variants=variants, views=views
    )
    return PlanSamples(only(columns, ~columns["held_out"]))


def plan_settings(recipe: Recipe, *, steps: int | None = None) -> PlanSettings:
    """What the recipe says of its plan; `steps` stands in where the recipe counts epochs."""
    training = recipe.training
    return PlanSettings(
        steps=training.num_steps if steps is None else steps,
        batch_size=training.batch_size,
        gradient_accumulation=training.gradient_accumulation,
        num_processes=recipe.accelerate.num_processes,
        caption_dropout=recipe.text.caption_dropout,
        seed=training.seed,
        underfilled=recipe.buckets.underfilled,
        weights={each.name: each.weight for each in recipe.datasets if each.weight is not None},
        exhausted=training.exhausted,
    )


def with_steps(recipe: Recipe, inputs: TrainingInputs) -> Recipe:
    """The recipe with its epochs counted in steps; itself when it counts steps already.

    Raises:
        TrainingError: Warm-up and decay take more steps than the epochs have.
    """
    training = recipe.training
    if training.epochs is None:
        return recipe
    steps = TrainingPlan.steps_in(plan_samples(inputs), plan_settings(recipe, steps=1), training.epochs)
    if training.warmup_steps + training.decay_steps > steps:
        epochs = counted(training.epochs, "epoch is", "epochs are")
        raise TrainingError(
            f"{epochs} {counted(steps, 'step')}, and warmup_steps {training.warmup_steps} and "
            f"decay_steps {training.decay_steps} together are more",
            where="training.epochs",
            fix=f"raise epochs, or let both together be at most {steps}",
        )
    settled = training.model_copy(update={"steps": steps, "epochs": None})
    return recipe.model_copy(update={"training": settled})


def read_order(path: Path) -> TrainingOrder:
    """What `TrainingOrder.write` wrote to `path` and beside it."""
    order = json.loads(path.read_text(encoding="utf-8"))
    inputs = pl.read_parquet(path.with_name(INPUTS_FILE))
    return TrainingOrder(
        recipe=Recipe.model_validate_json(json.dumps(order["recipe"])),
        base=Path(order["base"]),
        elsewhere={role: Path(place) for role, place in order.get("elsewhere", {}).items()},
        run=order["run"],
        provenance=order["provenance"],
        inputs=TrainingInputs(inputs),
        empty_text=_spec(order["empty_text"]),
        prompts=tuple(
            Prompt(item["caption"], _spec(item["text"]), _pair(*item["size_hw"])) for item in order["prompts"]
        ),
    )


def _spec_json(spec: EntrySpec) -> dict[str, Any]:
    return {"kind": spec.kind, "key": spec.key, "tensors": json.loads(tensors_json(spec.tensors))}


def _spec(value: Mapping[str, Any]) -> EntrySpec:
    """The inverse of `_spec_json`."""
    return EntrySpec(value["kind"], value["key"], tensors_of(value["tensors"]))


def _pair(first: int, second: int) -> tuple[int, int]:
    return first, second
