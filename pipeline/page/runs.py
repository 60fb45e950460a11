"""The trainings on the page: state, curves, previews, published step, and what differs between runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup

from pipeline.page.charts import MAX_LINES, Line, line_chart
from pipeline.reporting.progress import duration_text
from pipeline.trained_lora.differences import describe_difference, samples_of
from pipeline.trained_lora.export.lora_files import LORA_FOLDER, PROVENANCE_FILE
from pipeline.trained_lora.job import JOB_FILE
from pipeline.trained_lora.previews import Preview, read_previews
from pipeline.trained_lora.report import running_mean
from pipeline.trained_lora.run_folder import (
    Metrics,
    RunLayout,
    is_being_trained,
    lora_steps,
    read_metrics,
    read_record,
)

if TYPE_CHECKING:
    from pipeline.trained_lora.recipe_facts import Facts

State = Literal["finished", "training", "stopped"]

_ANY_STEP = 10**9

_RECENT_STEPS = 20
"""Number of steps from which the remaining time is estimated."""


@dataclass(frozen=True)
class LastSteps:
    """The end of a run's curves.

    Attributes:
        step: Number of steps that are done.
        loss: Mean loss of the last steps, as the smoothed curve ends.
        seconds: Mean time of the last steps.
    """

    step: int = 0
    loss: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Run:
    """One training run; its files are read when they are shown.

    Attributes:
        published_step: Step that is in `lora/`; None if it has no file of this run.
    """

    layout: RunLayout
    began_ns: int
    published_step: int | None = None

    @property
    def name(self) -> str:
        """Id of the run, and name of its folder."""
        return self.layout.folder.name

    @property
    def began(self) -> str:
        """Time at which its training began, in UTC."""
        return datetime.fromtimestamp(self.began_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")

    @cached_property
    def num_steps(self) -> int:
        """Planned number of steps."""
        try:
            job = json.loads((self.layout.folder / JOB_FILE).read_text(encoding="utf-8"))
            return int(job["recipe"]["training"]["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            return self.step

    @cached_property
    def metrics(self) -> list[Metrics]:
        """One line per step."""
        return _read_metrics(self.layout.metrics)

    @cached_property
    def validation(self) -> list[Metrics]:
        """One line per measurement."""
        return _read_metrics(self.layout.validation)

    @cached_property
    def previews(self) -> list[Preview]:
        """Pictures that were drawn during the training."""
        return read_previews(self.layout.previews)

    @cached_property
    def last(self) -> LastSteps:
        """What a list of runs shows of the curves."""
        stamp = _stamp(self.layout.metrics)
        return _last_steps(self.layout.metrics, *stamp) if stamp else LastSteps()

    @property
    def step(self) -> int:
        """Number of steps that are done."""
        return self.last.step

    @cached_property
    def state(self) -> State:
        """Whether a process trains it, it has finished, or it waits to be resumed."""
        if self.layout.finished.is_file():
            return "finished"
        return "training" if is_being_trained(self.layout) else "stopped"

    @property
    def progress(self) -> str:
        """State with its steps, such as "training, step 120 of 400, 3:10 left"."""
        if self.state == "finished":
            return f"finished after {self.step:,} steps"
        text = f"{self.state}, step {self.step:,} of {self.num_steps:,}"
        if self.state == "training" and self.last.seconds:
            left_s = self.last.seconds * max(0, self.num_steps - self.step)
            text += f", about {duration_text(left_s)} left"
        return text

    @property
    def saved_steps(self) -> list[int]:
        """Steps with LoRA files."""
        return list(lora_steps(self.layout))

    @property
    def files(self) -> list[tuple[str, str, list[Path]]]:
        """LoRA files of the finished run and of each saved step, the last one first.

        Each list of files comes after its name on the page and its part of a file name.
        """
        folders = [
            (f"step {step:,}", f"step{step}", path)
            for step, path in reversed(lora_steps(self.layout).items())
        ]
        if self.layout.exported.is_dir():
            folders.insert(0, ("end of the run", "end", self.layout.exported))
        files = [
            (name, part, sorted(p for p in folder.glob("*.safetensors") if p.name != "adapter.safetensors"))
            for name, part, folder in folders
        ]
        return [each for each in files if each[2]]

    @property
    def thumbnail(self) -> Preview | None:
        """The first prompt at the published or last step."""
        steps = {each.step for each in self.previews}
        step = self.published_step if self.published_step in steps else max(steps, default=None)
        return next((each for each in self.previews if each.step == step), None)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _read_metrics(path: Path) -> list[Metrics]:
    stamp = _stamp(path)
    return _metrics(path, *stamp) if stamp else []


# For a list of hundreds of runs, whose curves would fill the memory.
@lru_cache(maxsize=2048)
def _last_steps(path: Path, size: int, mtime_ns: int) -> LastSteps:
    del size, mtime_ns
    lines = read_metrics(path, _ANY_STEP)
    recent = [line["seconds"] for line in lines[-_RECENT_STEPS:] if line.get("seconds")]
    return LastSteps(
        lines[-1]["step"] + 1 if lines else 0,
        running_mean([line["loss"] for line in lines])[-1] if lines else None,
        sum(recent) / len(recent) if recent else None,
    )


@lru_cache(maxsize=4 * MAX_LINES)
def _metrics(path: Path, size: int, mtime_ns: int) -> list[Metrics]:
    del size, mtime_ns  # a file that has grown is another argument
    return read_metrics(path, _ANY_STEP)


def read_runs(output_dir: Path) -> list[Run]:
    """Return the runs of an output folder, the one that began last first."""
    published = read_record(output_dir / LORA_FOLDER / PROVENANCE_FILE)
    steps = {published.get("run"): published.get("step", published.get("steps"))}
    runs = [
        Run(RunLayout(path.parent), path.stat().st_mtime_ns, steps.get(path.parent.name))
        for path in (output_dir / "runs").glob("*/run.json")
    ]
    return sorted(runs, key=lambda run: (run.began_ns, run.name), reverse=True)


def difference(run: Run, before: Run | None) -> list[str]:
    """Return what differs from the run before, in words; empty without such a run."""
    if before is None:
        return []
    folders = (before.layout.folder, run.layout.folder)
    return _difference(*folders, _stamp(before.layout.facts), _stamp(run.layout.facts))


@lru_cache(maxsize=2048)
def _difference(before: Path, after: Path, *stamps: tuple[int, int] | None) -> list[str]:
    del stamps
    layouts = RunLayout(before), RunLayout(after)
    facts_before, facts = map(_facts, layouts)
    if not facts_before or not facts:
        return ["unknown: run.json of one of the runs is damaged"]
    return describe_difference(facts_before, facts, *map(samples_of, layouts))


def _facts(layout: RunLayout) -> Facts:
    try:
        facts = json.loads(layout.facts.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def loss_charts(runs: Sequence[Run]) -> dict[str, Markup]:
    """Return the chart of the losses of the newest `MAX_LINES` runs, by the name of its scale."""
    shown = list(islice((run for run in runs if run.step), MAX_LINES))
    lines: list[Line] = []
    for number, run in enumerate(shown):
        steps = [line["step"] + 1 for line in run.metrics]
        losses = [line["loss"] for line in run.metrics]
        if number == 0:
            lines.append(Line("loss of each step", list(zip(steps, losses, strict=True)), None))
        label = "newest run, smoothed" if number == 0 else f"run {run.name[:8]}, smoothed"
        lines.append(Line(label, list(zip(steps, running_mean(losses), strict=True)), number))
    charts = {
        "linear": line_chart(lines, title="Training loss"),
        "logarithmic": line_chart(lines, title="Training loss", logarithmic=True),
    }
    return {name: chart for name, chart in charts.items() if chart}


def more_charts(run: Run) -> list[Markup]:
    """Return the charts of one run: validation, learning rate, speed, gradients and memory."""

    def of(values: Sequence[Metrics], key: str, factor: float = 1.0, offset: int = 1) -> list[Any]:
        return [(line["step"] + offset, line[key] * factor) for line in values if line.get(key) is not None]

    speed = [
        (line["step"] + 1, line["samples"] / line["seconds"]) for line in run.metrics if line.get("seconds")
    ]
    validation = [Line("held-out images", of(run.validation, "loss", offset=0))]
    validation.append(Line("trained images, same noise", of(run.validation, "trained_loss", offset=0), 1))
    charts = [
        line_chart(validation, title="Validation loss"),
        line_chart([Line("learning rate", of(run.metrics, "learning_rate"))], title="Learning rate"),
        line_chart([Line("speed", speed)], title="Images per second"),
        line_chart([Line("gradient norm", of(run.metrics, "grad_norm"))], title="Gradient norm"),
        line_chart([Line("memory", of(run.metrics, "memory_bytes", 2**-30))], title="Memory in GiB"),
    ]
    return [chart for chart in charts if chart]


@dataclass(frozen=True)
class PreviewGrid:
    """Previews as rows of steps and columns of prompts.

    Attributes:
        headings: Prompts of the columns.
        rows: Step, and the preview of each prompt or None.
        num_steps: Number of steps with previews, of which the rows may be some.
        num_prompts: Number of prompts, of which the columns may be the first.
    """

    headings: list[str]
    rows: list[tuple[int, list[Preview | None]]]
    num_steps: int
    num_prompts: int


def preview_grid(previews: Sequence[Preview], *, max_steps: int, max_prompts: int) -> PreviewGrid:
    """Return the grid, with evenly spaced steps if there are more than `max_steps`."""
    from pipeline.reporting.grids import evenly_spaced

    columns = sorted({(each.number, each.heading) for each in previews})
    steps = sorted({each.step for each in previews})
    by_cell = {(each.step, each.number, each.heading): each for each in previews}
    shown = [steps[index] for index in evenly_spaced(len(steps), max_steps)]
    rows = [(step, [by_cell.get((step, *column)) for column in columns[:max_prompts]]) for step in shown]
    return PreviewGrid([text for _, text in columns[:max_prompts]], rows, len(steps), len(columns))
