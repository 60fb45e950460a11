"""A launched training process from its order to its result: resume, train, keep, draw, export."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate.utils import broadcast_object_list

from pipeline.errors import TrainingError, counted, verb
from pipeline.models.worker.family import load_family
from pipeline.processes.worker.devices import out_of_memory_as, why_no_gpu
from pipeline.storage.atomic import write_text
from pipeline.trained_lora.export.metadata import header_metadata
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.plan.steps import Slot, StepPlan
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.checkpoint import (
    TrainingState,
    checkpoint_path,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    remove_leftovers,
    save_checkpoint,
)
from pipeline.trained_lora.worker.engine import Engine, StepOutcome
from pipeline.trained_lora.worker.export.exporter import ExportedFile, Exporter
from pipeline.trained_lora.worker.loader import MicroBatchMaker, MicroInput, micro_inputs
from pipeline.trained_lora.worker.metrics import MetricsLog
from pipeline.trained_lora.worker.out_of_memory import out_of_memory_error
from pipeline.trained_lora.worker.preflight import run_preflight
from pipeline.trained_lora.worker.previews import draw_previews
from pipeline.trained_lora.worker.trackers import open_trackers
from pipeline.trained_lora.worker.validation import Validation

if TYPE_CHECKING:
    from pathlib import Path

STOPPED_STATUS = 128 + signal.SIGTERM
"""Exit status of a run that was asked to stop, and left a checkpoint."""


class StopRequest:
    """Becomes true when the process is asked to end, as often as it is asked."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.requested = False

    def request(self) -> None:
        """Ask."""
        self.requested = True


@contextmanager
def stop_on_signals() -> Generator[StopRequest]:
    """A `StopRequest` that SIGTERM and SIGINT raise while the body runs; afterwards they do what they did.

    To be used in the main thread.
    """
    stop = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        stop.request()

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Report(Protocol):
    """Takes what there is to say while it runs."""

    def info(self, text: str) -> None:
        """Say `text`."""
        ...

    def progress(self, done: int, total: int, text: str) -> None:
        """Say how far the work is."""
        ...


def train(order: TrainingJob, report: Report, stop: StopRequest) -> bool:
    """Train to the plan's last step and leave the exported files and `result.json`, or stop when asked to.

    Every rank runs it. What lies in the run's folder is gone on from.

    Returns:
        True when the plan is done; False when it stopped, leaving a checkpoint.

    Raises:
        TrainingError: The loss is not finite, a file does not read back, or a setting cannot be met.
        StoreError: An entry of the cache is missing or damaged.
    """
    return _Run(order, report).train(stop)


class _Run:
    """One process's training of one run."""

    def __init__(self, order: TrainingJob, report: Report) -> None:
        self.order = order
        self.plan = order.plan()
        self.family = load_family(order.base, order.component_folders)
        with out_of_memory_as(partial(out_of_memory_error, order.recipe, "while the base model was loaded")):
            self.engine = Engine(order, self.family)
        self.main = self.engine.accelerator.is_main_process
        self.report = report
        self.paths = RunLayout(order.folder)
        self.exporter = Exporter(self.family, order.recipe.name, header_metadata(order, self.family))
        self.journal: MetricsLog | None = None
        held_out = order.inputs.held_out
        self.validation = Validation(order, self.family, held_out) if held_out else None
        self.warnings: list[str] = []
        self.started_at_s = 0.0
        self.resumed_from = 0

    def train(self, stop: StopRequest) -> bool:
        start = self._resume()
        self.started_at_s = time.time()
        with ExitStack() as open_files:
            inputs = open_files.enter_context(closing(self._inputs(start)))
            if self.main:
                trackers = open_trackers(self.order, self.paths.metrics.parent, start)
                self.journal = open_files.enter_context(MetricsLog(self.paths, self.order.inputs, trackers))
            if start == 0:
                self._look(0)
            done = self._steps(start, inputs, stop)
        finished = done == len(self.plan)
        if finished and self.main:
            self._finish()
        self.engine.accelerator.wait_for_everyone()
        self.engine.accelerator.end_training()
        return finished

    def _inputs(self, start: int) -> Generator[tuple[StepPlan, MicroInput]]:
        maker = MicroBatchMaker(self.order, self.family, self.engine.scheduler)
        accelerator = self.engine.accelerator
        pin = accelerator.device.type == "cuda"
        return micro_inputs(self.plan, maker, rank=accelerator.process_index, start=start, pin=pin)

    def _steps(
        self,
        start: int,
        inputs: Generator[tuple[StepPlan, MicroInput]],
        stop: StopRequest,
    ) -> int:
        """Train from `start`; the number of steps done by the end, fewer than planned when asked to stop."""
        done = start
        for number, batch in self.plan.iterate(start):
            if done == start and self._anyone_stops(stop):
                break
            begun_s = time.perf_counter()
            # Where memory ran out, saving and exporting would need more of it, and the step may be half done.
            with out_of_memory_as(partial(out_of_memory_error, self.order.recipe, f"in step {number}")):
                try:
                    outcome = self.engine.step(batch, inputs, stop=stop.requested)
                except TrainingError as err:
                    raise self._with_last_good(err, done) from err
            done = number + 1
            self._note(batch, outcome, time.perf_counter() - begun_s)
            self._keep(done, stopping=outcome.stop)
            self._look(done)
            if outcome.stop:
                break
        if done < len(self.plan) and self.main:
            steps = f"{done} of {counted(len(self.plan), 'step')} {verb(done, 'is', 'are')}"
            self.report.info(f"asked to stop: {steps} done and kept")
        return done

    def _anyone_stops(self, stop: StopRequest) -> bool:
        """Whether any rank was asked to stop already; all are asked, so that none waits alone."""
        flag = torch.tensor(float(stop.requested), device=self.engine.accelerator.device)
        summed: Any = self.engine.accelerator.reduce(flag, reduction="sum")
        return bool(summed > 0)

    def _resume(self) -> int:
        """Steps done already: those of the newest valid checkpoint, chosen by the first rank for all."""
        choice: list[int | None] = [None]
        if self.main:
            remove_leftovers(self.paths.checkpoints)
            found = newest_checkpoint(
                self.paths.checkpoints, self.order.run, last_step=len(self.plan), log=self._warn
            )
            choice = [found.step if found else None]
            if found is None:
                run_preflight(self.engine, self.paths, self.order.run, self._export)
        broadcast_object_list(choice)
        self._say_start(choice[0])
        if choice[0] is None:
            return 0
        path = checkpoint_path(self.paths.checkpoints, choice[0])
        self.engine.restore(load_checkpoint(path, self.order.run))
        self.resumed_from = choice[0]
        return choice[0]

    def _say_start(self, resumed: int | None) -> None:
        if not self.main:
            return
        numbers = ", ".join(f"{name} {value}" for name, value in self.plan.numbers().items())
        weights = sum(weight.numel() for weight in self.engine.weights)
        device = self.engine.accelerator.device
        self.report.info(f"training {weights} LoRA weights on {device}: {numbers}")
        if (reason := why_no_gpu()) is not None:
            self._warn(reason)
        if resumed:
            self.report.info(f"going on after step {resumed}, from its checkpoint")

    def _export(self, folder: Path) -> list[ExportedFile]:
        return self.exporter.export(self.engine.denoiser, folder, self.engine.text_networks)

    def _with_last_good(self, err: TrainingError, done: int) -> TrainingError:
        """The error, saying where the LoRA from before the step lies; one of finite weights is kept.

        It is raised before the optimizer's part of a step, so that the weights are those from before.
        """
        if not self.main:
            return err
        try:
            if not self.engine.weights_finite():
                return err
            self._save(self.engine.state(done))
            with self.engine.result_weights():
                self._export(self.paths.last_good)
        except Exception as failed:  # whatever it dies of, the first error is the one to be told
            added = f"could not be kept: {failed}"
        else:
            added = f"is kept in {self.paths.last_good}"
        what = f"{err.what}; the LoRA of {counted(done, 'step')} {added}"
        return TrainingError(what, where=err.where, fix=err.fix)

    def _save(self, state: TrainingState) -> None:
        save_checkpoint(self.paths.checkpoints, self.order.run, state)
        keep = self.order.recipe.training.keep_checkpoints
        if keep is not None:
            prune_checkpoints(self.paths.checkpoints, keep=keep, newest=state.step)

    def _keep(self, done: int, *, stopping: bool) -> None:
        due = done % self.order.recipe.training.checkpoint_every == 0
        if self.journal is not None and (due or stopping or done == len(self.plan)):
            self.journal.sync()
            self._save(self.engine.state(done))

    def _note(self, batch: StepPlan, outcome: StepOutcome, seconds: float) -> None:
        if self.journal is None:
            return
        self.journal.step(batch, outcome, seconds)
        text = f"steps, loss {outcome.loss:.4f}, learning rate {outcome.learning_rate:.3g}"
        self.report.progress(batch.step + 1, len(self.plan), text)

    def _look(self, done: int) -> None:
        """Measure the loss on what is held out, and draw the sample pictures, if it is time for either."""
        settings = self.order.recipe.training
        if self.validation is not None and self._due(settings.validate_every, done):
            with self.engine.result_weights():
                loss = self.validation.loss(self.engine)
            if self.journal is not None:
                self.journal.validation(done, loss)
                self.report.info(f"validation loss after {counted(done, 'step')}: {loss.mean:.4f}")
        if self.journal is not None and self._due(settings.sample_every, done):
            with self.engine.result_weights():
                drawn = draw_previews(self.order, self.family, self.engine, step=done, warn=self._warn)
            self.journal.pictures(done, drawn)

    def _due(self, every: int, done: int) -> bool:
        return every > 0 and (done % every == 0 or done == len(self.plan))

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.report.info(f"warning: {text}")

    def _finish(self) -> None:
        shutil.rmtree(self.paths.last_good, ignore_errors=True)
        with self.engine.result_weights():
            files = self._export(self.paths.exported)
            change = self.engine.output_change(self._one_sample())
        self.report.info(f"exported and read back: {', '.join(file.name for file in files)}")
        write_text(
            self.paths.result, json.dumps({**self._result(files), "output_change": change}, indent=2) + "\n"
        )

    def _one_sample(self) -> MicroInput:
        """The first of the samples, half noise."""
        maker = MicroBatchMaker(self.order, self.family, self.engine.scheduler)
        slot = Slot(self.order.inputs[0].variant_id, 0, epoch=0, occurrence=0, drop_caption=False)
        return maker.make_fixed((slot,), [0.5])

    def _result(self, files: list[ExportedFile]) -> dict[str, Any]:
        device = self.engine.accelerator.device
        peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        return {
            "run": self.order.run,
            "steps": len(self.plan),
            "resumed_from": self.resumed_from,
            "started_at_s": self.started_at_s,
            "ended_at_s": time.time(),
            "device": str(device),
            "num_weights": sum(weight.numel() for weight in self.engine.weights),
            "peak_memory_bytes": peak_bytes,
            "files": [asdict(file) for file in files],
            "modules": [
                module.as_json()
                for module in self.exporter.modules(self.engine.denoiser, self.engine.text_networks)
            ],
            "warnings": self.warnings,
        }
