"""The training loop of one launched process: resume, train, checkpoint, validate, preview and export."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pipeline.errors import LatentlineError, TrainingError, counted
from pipeline.models.worker.family import load_family
from pipeline.models.worker.offload.streamed_blocks import streamed_blocks
from pipeline.processes.cluster_variables import scheduler_job
from pipeline.processes.machines import machines_of_this_process
from pipeline.processes.pipes import rank
from pipeline.processes.worker.devices import out_of_memory_as
from pipeline.storage.atomic import write_text
from pipeline.storage.os_errors import attach_path
from pipeline.trained_lora.export.metadata import header_metadata, native_metadata
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.plan.steps import StepPlan, plan_text
from pipeline.trained_lora.run_folder import RunLayout, hold_training
from pipeline.trained_lora.supported_settings import training_warnings
from pipeline.trained_lora.worker import startup
from pipeline.trained_lora.worker.before_training import (
    probe_input,
    require_agreement,
    run_tests_before_training,
)
from pipeline.trained_lora.worker.checkpoint import (
    TrainingState,
    checkpoint_path,
    newest_checkpoint,
    prune_checkpoints,
    remove_leftovers,
    save_checkpoint,
)
from pipeline.trained_lora.worker.collective import run_on_main
from pipeline.trained_lora.worker.compiled import fallbacks_reported
from pipeline.trained_lora.worker.distributed import COLLECTIVE_TIMEOUT, STEP_TIMEOUT, wait_at_most
from pipeline.trained_lora.worker.draw_previews import draw_divided_previews, draw_previews
from pipeline.trained_lora.worker.engine import Engine, StepOutcome, UnreadSteps
from pipeline.trained_lora.worker.export.exporter import ExportedFile, Exporter
from pipeline.trained_lora.worker.export.modules import describe_networks
from pipeline.trained_lora.worker.loader import MicroBatchMaker, micro_inputs
from pipeline.trained_lora.worker.metrics import MetricsLog
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.out_of_memory import out_of_memory_error, with_precision
from pipeline.trained_lora.worker.paired_validation import PairedValidation
from pipeline.trained_lora.worker.sent_checkpoint import shared_checkpoint
from pipeline.trained_lora.worker.sharding import share_bytes
from pipeline.trained_lora.worker.startup import Startup
from pipeline.trained_lora.worker.stop_request import StopRequest
from pipeline.trained_lora.worker.trackers import Trackers
from pipeline.trained_lora.worker.validation import (
    ALL_MISSING,
    MissingResults,
    Validation,
    missing_results,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.trained_lora.worker.memory.resident_blocks import ResidentBlocks


MEAN_STEPS = 50
"""Maximum number of steps over which the progress shows the mean loss."""


class Report(Protocol):
    """Receiver of log lines and progress."""

    def info(self, text: str) -> None:
        """Log a line."""
        ...

    def phase(self, text: str) -> None:
        """Report work that cannot be counted."""
        ...

    def progress(self, done: int, total: int, text: str, *, unit: str = "", note: str = "") -> None:
        """Report how much of the work is done."""
        ...


def train(job: TrainingJob, report: Report, stop: StopRequest) -> bool:
    """Train to the last step of the plan and write the exported files and `result.json`.

    Every rank calls it. A run with checkpoints resumes from the newest valid one. A job with `stop_after`
    ends there with a checkpoint, without the exported files and the result. Returns False if the run stopped
    on request, with a checkpoint.

    Raises:
        TrainingError: The loss is not finite, a saved file does not read back, or a setting cannot be
            satisfied.
        StoreError: A cache entry is missing or damaged.
    """
    # Held before the model is loaded, which may take minutes, because `latentline gc` deletes idle runs.
    with hold_training(RunLayout(job.folder)) if rank() == 0 else nullcontext():
        run = _TrainingRun(job, report)
        finished = run.train(stop)

    # Ranks that have nothing to export arrive first, and must not close the process group of rank 0.
    run.engine.accelerator.wait_for_everyone()
    run.engine.accelerator.end_training()
    return finished


class _TrainingRun:
    """One rank's part of a training run.

    Attributes:
        main: Whether this rank writes the files.
        end: Number of steps after which this process ends: all of the plan, or the job's `stop_after`.
        metrics: None on ranks other than 0 and before training starts.
        warnings: Warnings for the result file.
        resumed_from: Steps that were done when this process started.
    """

    def __init__(self, job: TrainingJob, report: Report) -> None:
        self.job = job
        self.report = report
        self.plan = job.plan()
        self.end = min(len(self.plan), job.stop_after or len(self.plan))
        self.paths = RunLayout(job.folder)
        self.family = load_family(job.base, job.component_folders)

        self.startup = Startup(job, report.phase)
        self.startup.begin(self.startup.base)
        with out_of_memory_as(self._memory_error("while the base model was loaded")):
            self.engine = Engine(job, self.family, self.startup.begin)
        self.main = self.engine.accelerator.is_main_process

        self.exporter = Exporter(
            self.family,
            job.recipe.name,
            header_metadata(job, self.family),
            save_dtype=job.recipe.training.lora.save_dtype,
            native=native_metadata(job.recipe.training.lora),
        )

        holdout = job.inputs.held_out
        self.validation = Validation(job, self.family, holdout) if holdout else None
        self.pairs = PairedValidation(job, self.family)
        self.metrics: MetricsLog | None = None
        self.warnings: list[str] = []
        self.started_at_s = 0.0
        self.resumed_from = 0
        self._losses: deque[float] = deque(maxlen=MEAN_STEPS)
        self._saved_files: dict[int, list[ExportedFile]] = {}  # of the newest checkpoint, by its step
        self._unread = UnreadSteps(self.engine, self._log_step)

    def train(self, stop: StopRequest) -> bool:
        # Before the checkpoint is shared: machines with different jobs would wait for each other forever.
        require_agreement(self.job, self.family)
        start = self._resume()
        self.started_at_s = time.time()
        with ExitStack() as stack:
            stack.enter_context(fallbacks_reported(self._warn))

            # Closed after an error too, which ends the threads of the loader.
            inputs = stack.enter_context(closing(self._inputs(start)))
            if self.main:
                # Finished after an error too, so that no tracker shows the run as running.
                trackers = stack.enter_context(closing(Trackers(self.job, start=start, warn=self._warn)))

                # One writer of the files; all other ranks compute the same numbers and drop them.
                metrics = MetricsLog(self.paths, self.job.inputs, trackers)
                self.metrics = stack.enter_context(closing(metrics))

            # Results before the first step, or results that a killed process left missing.
            self._validate_and_draw(start, missing_results(self.job, start, is_main=self.main))
            steps_done = self._run_steps(start, inputs, stop)

        if steps_done == len(self.plan):
            run_on_main(self.engine, self._finish)
        return steps_done >= self.end

    def _resume(self) -> int:
        """Load the newest valid checkpoint of the main process; return its step, or 0 without one."""
        step = self._newest_step() if self.main else None
        if step is not None:
            self._log_start(step)
            self.startup.begin(startup.RESUME)
        state = shared_checkpoint(self.engine.accelerator, self.paths.checkpoints, self.job.run, step=step)
        if state is None:
            run_tests_before_training(
                self.engine,
                self.job,
                self.family,
                startup=self.startup,
                memory_error=self._memory_error("in the trial step before training", self.engine.resident),
                export=partial(self.exporter.export, self.engine.networks),
            )
            self._log_start(None)
            return 0
        self.engine.restore(state)
        self.resumed_from = state.step
        return state.step

    def _newest_step(self) -> int | None:
        # The lock of the run excludes any process that could still be writing one.
        remove_leftovers(self.paths.checkpoints)
        newest = newest_checkpoint(
            self.paths.checkpoints, self.job.run, last_step=len(self.plan), log=self._warn
        )
        return newest.step if newest else None

    def _memory_error(
        self, when: str, resident: ResidentBlocks | None = None
    ) -> Callable[..., TrainingError]:
        recipe = with_precision(self.job.recipe, self.family)
        return partial(out_of_memory_error, recipe, when, resident=resident)

    def _log_start(self, resumed_step: int | None) -> None:
        if not self.main:
            return
        device = self.engine.accelerator.device
        for reason in filter(None, (self.engine.resident.reason, self.engine.compiled.reason)):
            self.report.info(reason)
        if (streamed := streamed_blocks(self.engine.denoiser)) is not None:
            memory = streamed.store.memory
            log = self._warn if memory.refusal else self.report.info
            log(f"training.offload: {memory.text()}")
        if self.engine.is_sharded:
            share = f"{share_bytes(self.engine.denoiser) / 2**30:.1f} GiB of the base model's weights"
            num_processes = self.engine.accelerator.num_processes
            self.report.info(f"accelerate.shard: each of {num_processes} processes holds {share}")
        self.report.info(
            f"training {self._num_weights():,} LoRA weights on {device}: {plan_text(self.plan.numbers())}"
        )
        for warning in training_warnings(self.job.recipe, self.family):
            self._warn(warning)
        if resumed_step:
            self.report.info(f"resuming from the checkpoint of step {resumed_step}")

    def _inputs(self, start: int) -> Generator[tuple[StepPlan, MicroInput]]:
        maker = MicroBatchMaker(self.job, self.family, self.engine.noise_scheduler)
        accelerator = self.engine.accelerator

        # Only copies from pinned memory run while the GPU computes.
        pin = accelerator.device.type == "cuda"
        return micro_inputs(self.plan, maker, rank=accelerator.process_index, start=start, pin=pin)

    def _run_steps(
        self, start: int, inputs: Generator[tuple[StepPlan, MicroInput]], stop: StopRequest
    ) -> int:
        """Train from step `start` to `end` or a stop request; return the steps done."""
        self.startup.begin(self.startup.first_step)

        # A stop request may have arrived while the model was loaded.
        steps_done, stopping = start, self._any_rank_stops(stop)
        main_worked_alone = True
        for number, batch in self.plan.iterate(start):
            if stopping or steps_done >= self.end:
                break

            # A process that hangs, such as one with a broken GPU or disk, must not occupy all GPUs for long.
            wait_at_most(COLLECTIVE_TIMEOUT if main_worked_alone else STEP_TIMEOUT)

            # After memory ran out, the step may be half done and must not be saved.
            with out_of_memory_as(self._memory_error(f"in step {number}", self.engine.resident)):
                stopping = self._step(batch, inputs, stop)
            steps_done = number + 1

            # The main process may export or draw alone now, so it comes late to the next step, too.
            main_worked_alone = stopping or self._is_saved_or_shown(steps_done)
            wait_at_most(COLLECTIVE_TIMEOUT)
            self._checkpoint(steps_done, stopping=stopping)
            self._validate_and_draw(steps_done)

        if steps_done < len(self.plan) and self.main:
            total = counted(len(self.plan), "step")
            source = "on request" if stop.requested else "on request of another process"
            source = "as planned" if steps_done >= self.end else source
            self.report.info(f"stopped {source} after {steps_done} of {total}; a checkpoint is saved")
        return steps_done

    def _step(
        self, batch: StepPlan, inputs: Generator[tuple[StepPlan, MicroInput]], stop: StopRequest
    ) -> bool:
        """Start a step and log the steps with known numbers; return whether any rank requested a stop."""
        started_s = time.perf_counter()
        try:
            step = self.engine.start(batch, inputs, stop=stop.poll())
            self._unread.add(step, started_s)

            # Numbers that are not finite must end the run before the step is saved, measured or drawn.
            return self._unread.read(at_once=self._is_saved_or_shown(batch.step + 1))
        except TrainingError as err:
            # The numbers lag behind: the failed step is the oldest unread one, and may not be the one just
            # started.
            oldest = self._unread.oldest
            raise self._keep_last_good(err, batch.step if oldest is None else oldest) from err

    def _any_rank_stops(self, stop: StopRequest) -> bool:
        # Ranks that do not stop together would wait for each other forever.
        flag = torch.tensor(float(stop.poll()), device=self.engine.accelerator.device)
        num_requests: Any = self.engine.accelerator.reduce(flag, reduction="sum")
        return bool(num_requests > 0)

    def _log_step(self, batch: StepPlan, outcome: StepOutcome, seconds: float) -> None:
        if self.metrics is None:
            return
        self.metrics.step(batch, outcome, seconds)
        # A single step's loss depends on its noise levels far more than on what the LoRA has learned.
        self._losses.append(outcome.loss)
        loss = fmean(self._losses)
        note = f"loss {loss:.4f} (mean of {counted(len(self._losses), 'step')}), "
        note += f"learning rate {outcome.learning_rate:.3g}"
        self.report.progress(batch.step + 1, len(self.plan), "training", unit="step", note=note)

    def _checkpoint(self, steps_done: int, *, stopping: bool) -> None:
        # Only the main process has metrics. All ranks have the same weights, so it saves them alone.
        if self.metrics is not None and (stopping or self._checkpoint_due(steps_done)):
            self.report.phase(f"saving the checkpoint of step {steps_done}")

            # Lines of the log must be on the disk before the checkpoint that a resume continues from.
            self.metrics.sync()
            self._save(self.engine.state(steps_done))

    def _save(self, state: TrainingState) -> None:
        # The state was read before, since `result_weights` may replace the weights by their average.
        def export(folder: Path) -> None:
            self._saved_files = {state.step: self._export_result(folder, step=state.step)}

        save_checkpoint(self.paths.checkpoints, self.job.run, state, export=export)
        keep = self.job.recipe.training.keep_checkpoints
        if keep is not None:
            prune_checkpoints(self.paths.checkpoints, keep=keep, newest=state.step)

    def _keep_last_good(self, err: TrainingError, steps_done: int) -> TrainingError:
        """Save and export the weights from before a failed step; return the error with their location."""
        if not self.main:
            return err
        try:
            # Earlier updates may have made weights infinite already. Such a LoRA is not worth saving.
            if not self.engine.weights_finite():
                return err
            self._save(self.engine.state(steps_done))
            self._export_result(self.paths.last_good, step=steps_done)
        except Exception as failure:  # the error that stopped the run matters more than any error here
            reason = failure.what if isinstance(failure, LatentlineError) else str(failure)
            outcome = f"could not be saved: {reason}"
        else:
            outcome = f"is in {self.paths.last_good}"
        what = f"{err.what}; the LoRA after {counted(steps_done, 'step')} {outcome}"
        return TrainingError(what, where=err.where, fix=err.fix)

    def _validate_and_draw(self, steps_done: int, missing: MissingResults = ALL_MISSING) -> None:
        settings = self.job.recipe.training
        if self.validation and missing.validation and self._due(settings.validate_every, steps_done):
            self._begin_after(steps_done, startup.VALIDATION, "measuring the validation loss")

            # Measured with the weights that are exported, which may be an average.
            with self.engine.result_weights():
                loss = self.validation.loss(self.engine)
                paired = self.pairs.loss(self.engine, loss)
            if self.metrics is not None:
                self.metrics.validation(steps_done, loss, paired)
                self.report.info(f"validation loss after {counted(steps_done, 'step')}: {loss.mean:.4f}")

        if missing.previews and self._due(settings.sample_every, steps_done):
            # Machines may not see each other's files, and a sharded denoiser draws one picture at a time.
            is_divided = machines_of_this_process().number == 1 and not self.engine.is_sharded
            if is_divided:
                self._draw(steps_done, draw_divided_previews)
            else:
                run_on_main(self.engine, partial(self._draw, steps_done, draw_previews))

    def _draw(self, steps_done: int, draw: Callable[..., list[Path]]) -> None:
        self._begin_after(steps_done, startup.PREVIEWS, "drawing previews")
        with self.engine.result_weights():
            files = draw(self.job, self.family, self.engine, step=steps_done, warn=self._warn)
        if self.metrics is not None:
            self.metrics.previews(steps_done, files)

    def _begin_after(self, steps_done: int, startup_phase: str, text: str) -> None:
        if steps_done == 0:
            self.startup.begin(startup_phase)
        else:
            self.report.phase(f"{text} after step {steps_done}")

    def _checkpoint_due(self, steps_done: int) -> bool:
        return self._due(self.job.recipe.training.checkpoint_every, steps_done)

    def _is_saved_or_shown(self, steps_done: int) -> bool:
        settings = self.job.recipe.training
        others = (settings.validate_every if self.validation else 0, settings.sample_every)
        return self._checkpoint_due(steps_done) or any(self._due(every, steps_done) for every in others)

    def _due(self, every: int, steps_done: int) -> bool:
        return every > 0 and (steps_done % every == 0 or steps_done == self.end)

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.report.info(f"warning: {text}")

    def _export_result(self, folder: Path, *, step: int) -> list[ExportedFile]:
        with self.engine.result_weights():
            return self.exporter.export(self.engine.networks, folder, step=step)

    def _finish(self) -> None:
        self.report.phase("exporting and verifying the LoRA")

        # The finished LoRA replaces what an earlier failure had saved.
        shutil.rmtree(self.paths.last_good, ignore_errors=True)
        files = self._export_last_step()
        with self.engine.result_weights():
            output_change = self.engine.objective.output_change(
                probe_input(self.job, self.family, self.engine)
            )
        self.report.info(f"exported and verified {', '.join(file.name for file in files)}")
        result = {**self._result(files), "output_change": output_change}
        write_text(self.paths.result, json.dumps(result, indent=2) + "\n")

    def _export_last_step(self) -> list[ExportedFile]:
        step, folder = len(self.plan), self.paths.exported
        files = self._saved_files.get(step)
        if files is None:
            return self._export_result(folder, step=step)

        # The checkpoint of this step has the same files, and they are verified.
        with attach_path(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for file in files:
                shutil.copy(checkpoint_path(self.paths.checkpoints, step) / file.name, folder)
        return files

    def _num_weights(self) -> int:
        return sum(weight.numel() for weight in self.engine.weights)

    def _result(self, files: list[ExportedFile]) -> dict[str, Any]:
        engine = self.engine
        device = engine.accelerator.device
        return {
            "run": self.job.run,
            "steps": len(self.plan),
            "resumed_from": self.resumed_from,
            "started_at_s": self.started_at_s,
            "ended_at_s": time.time(),
            "device": str(device),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "node": platform.node(),
            "num_nodes": machines_of_this_process().number,
            "scheduler_job": scheduler_job(os.environ),
            "offload": engine.resident.offload,
            "compile": engine.compiled.applies,
            "num_weights": self._num_weights(),
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
            "files": [asdict(file) for file in files],
            "modules": [asdict(module) for module in describe_networks(self.family, engine.networks)],
            "warnings": self.warnings,
        }
