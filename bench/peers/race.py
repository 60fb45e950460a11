"""Run the trainers in turn, and measure the time to the first step, the step, and the memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from bench.figures.scan import SETTLE_S
from bench.peers.trainer import Place, Start, Task, Trainer
from bench.workload import photographs
from pipeline.processes.tree import ProcessTree

MAX_FILL_S = 1800.0
"""Longest time of the run that fills the caches of many images, which is not measured."""

CACHED_EDGE, CACHED_PX = 64, 400_000
"""Resolution and largest photographs of the full caches of many images, which are filled once."""

POLL_S = 0.02
MEMORY_EVERY_S = 1.0
"""Seconds between two readings of the memory, which take 15 ms for each process."""
TAIL_BYTES = 4096
NUM_FAILED_LINES = 12


class TrainerError(Exception):
    """A trainer ended or stopped progressing before its last step. The message has its last lines."""


@dataclass(frozen=True)
class Run:
    """Measurements of one run.

    Attributes:
        first_s: Seconds from the start of the command to the end of its first step.
        last_s: Seconds from the start of the command to the end of its last step.
        step_s: Seconds per step after the first.
        peak_bytes: Peak memory of all processes, with shared pages divided by the number of their users.
    """

    first_s: float
    last_s: float
    step_s: float
    peak_bytes: int


def race(
    trainers: Sequence[Trainer], task: Task, folder: Path, *, rounds: int, num_cached: int
) -> dict[str, Any]:
    """Run each trainer with empty and with full caches in each round, and return the measurements by trainer.

    In the same rounds, they also start with full caches of `num_cached` small photographs. The order changes
    each round, and the first round is discarded. A trainer that fails gets no further runs.
    """
    photos, many = folder / "photos", replace(task, num_photographs=num_cached, edge=CACHED_EDGE)
    photographs(photos, task.num_photographs, max_px=4_000_000)
    photographs(folder / "many", num_cached, max_px=CACHED_PX)
    measured: dict[str, Any] = {
        each.name: {"version": each.version, "note": each.note, "cold": [], "warm": [], "cached": []}
        for each in trainers
    }
    full = dict[str, Place]()
    for number in range(-1, rounds):
        for trainer in trainers if number % 2 else reversed(trainers):
            entry = measured[trainer.name]
            if "failed" in entry:
                continue
            place = _new_place(folder / trainer.name, photos)
            runs = [("cold", task, place, 0), ("warm", task, place, 1)]
            if trainer.name not in full:
                full[trainer.name] = _new_place(folder / f"{trainer.name}-many", folder / "many")
                runs.append(("filled", many, full[trainer.name], -2))
            runs.append(("cached", many, full[trainer.name], number))
            for caches, work, where, seed in runs:
                print(f"round {number + 1} of {rounds}: {trainer.name}, {caches}", flush=True)
                try:
                    start = trainer.start(work, where, seed + 2)
                    if caches == "filled":
                        start = replace(start, max_s=MAX_FILL_S)
                    run = run_once(start, task.steps, folder / f"{trainer.name}.log")
                except (TrainerError, OSError) as error:
                    entry["failed"] = str(error)
                    print(f"{trainer.name} failed:\n{error}", flush=True)
                    break
                if number >= 0:
                    entry[caches].append(vars(run))
    return measured


def _new_place(folder: Path, photos: Path) -> Place:
    place = Place(folder / "work", folder / "photos", folder / "kept")
    for old in (place.folder, place.photos):
        shutil.rmtree(old, ignore_errors=True)
    place.folder.mkdir(parents=True)
    place.kept.mkdir(exist_ok=True)
    shutil.copytree(photos, place.photos)
    time.sleep(SETTLE_S)
    return place


def run_once(start: Start, steps: int, log: Path) -> Run:
    """Start the command, stop it after `steps` steps, and return its measurements.

    Raises:
        TrainerError: If the command ends before, or takes longer than `start.max_s`.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **start.variables}
    with log.open("wb") as out:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            start.command, cwd=start.cwd, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    tree = ProcessTree(process.pid)
    try:
        return _watch(process, tree, start, steps, log, start_s)
    finally:
        tree.stop(grace_s=20.0)
        process.wait()


def _watch(
    process: subprocess.Popen[bytes], tree: ProcessTree, start: Start, steps: int, log: Path, start_s: float
) -> Run:
    first_s, num_first, peak_bytes, memory_s = 0.0, 0, 0, 0.0
    while (taken_s := time.perf_counter() - start_s) < start.max_s:
        ended = process.poll() is not None
        if taken_s >= memory_s:
            peak_bytes = max(peak_bytes, sum(map(_memory_bytes, tree.members())))
            memory_s = taken_s + MEMORY_EVERY_S
        num_steps = start.steps(_tail(log))
        if num_steps and not first_s:
            first_s, num_first = taken_s, num_steps
        if num_steps >= steps:
            # A bar may be drawn first after several quick steps.
            step_s = (taken_s - first_s) / max(1, num_steps - num_first)
            return Run(first_s, taken_s, step_s, peak_bytes)
        if ended:
            raise TrainerError(f"exit status {process.returncode}\n{_last_lines(log)}")
        time.sleep(POLL_S)
    raise TrainerError(f"not at step {steps} after {start.max_s:.0f} s\n{_last_lines(log)}")


def _memory_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return process.memory_full_info().pss
    return 0


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _last_lines(log: Path) -> str:
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in _tail(log).splitlines()]
    return "\n".join([line for line in lines if line][-NUM_FAILED_LINES:])
