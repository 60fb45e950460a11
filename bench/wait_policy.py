"""Steps with several wait policies of OpenMP, in three minutes on an idle machine.

python -m bench.wait_policy

Threads that wait can sleep at once (`OMP_WAIT_POLICY=PASSIVE`) or spin first (`GOMP_SPINCOUNT`). The loads
are training steps of the race's model in one process and in two, and small steps in four processes, as in
parallel tests. Each process has two threads.

`pipeline.processes.launch` lets threads spin if each has a core of its own. The spin count is the smallest
with which one process is about as fast as with libgomp's default: it costs the least if other work runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bare import learner
from bench.peers.base import make_base
from demo.tiny_models.sd import make_tiny
from pipeline.processes.launch import CPU_THREADS_PER_PROCESS, WAIT_VARIABLES, python_path

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
POLICIES: dict[str, Mapping[str, str]] = {
    "PASSIVE": PASSIVE,
    **{f"{count:,} spins": {"GOMP_SPINCOUNT": str(count)} for count in (5_000, 300_000)},
}

LOADS = {
    "one process": ("race", 1),
    "two processes": ("race", 2),
    "four processes, small steps": ("tiny", 4),
}
"""Model and number of processes of each load."""

_EDGES = {"race": 32, "tiny": 8}
"""Edge of each model's latents."""

_WORKER = "worker"


@dataclass(frozen=True)
class Taken:
    """Seconds of a step: `wall_s` per process, and `cpu_s` of all threads."""

    wall_s: float
    cpu_s: float


def main() -> None:
    """Measure all policies in alternation, and print the table."""
    if sys.argv[1:2] == [_WORKER]:
        _work(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(prog="python -m bench.wait_policy")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds")
    options = parser.parse_args()
    measured: dict[str, dict[str, list[Taken]]] = {
        load: {policy: [] for policy in POLICIES} for load in LOADS
    }
    with tempfile.TemporaryDirectory(prefix="latentline-bench-") as name:
        make_base(Path(name) / "race")
        make_tiny(Path(name) / "tiny")
        most = max(number for _, number in LOADS.values())
        # All at once, because most of the time is their imports; those that are not measured sleep.
        workers = {policy: [_Worker(Path(name), policy) for _ in range(most)] for policy in POLICIES}
        try:
            for number in range(options.rounds):
                for load, (model, num_processes) in LOADS.items():
                    for policy in POLICIES if number % 2 else reversed(POLICIES):
                        print(f"round {number + 1} of {options.rounds}: {load}, {policy}", flush=True)
                        steps = measure(workers[policy][:num_processes], model, options.seconds)
                        measured[load][policy].append(steps)
        finally:
            for each in (worker for group in workers.values() for worker in group):
                each.end()
    print("\n".join(table(measured)))


def measure(workers: Sequence[_Worker], model: str, seconds: float) -> Taken:
    """Let workers train at the same time, and return the mean of their steps."""
    for worker in workers:
        worker.begin(model, seconds)
    results = [worker.result() for worker in workers]
    return Taken(
        statistics.mean(each.wall_s for each in results), statistics.mean(each.cpu_s for each in results)
    )


def table(measured: Mapping[str, Mapping[str, Sequence[Taken]]]) -> list[str]:
    """Return the median seconds of a step, and in parentheses its CPU seconds, as lines of Markdown."""
    lines = [f"| load | {' | '.join(POLICIES)} |", f"|---|{'---|' * len(POLICIES)}"]
    for load, of_policy in measured.items():
        cells = [
            f"{_wall_s(each):.4f} s ({statistics.median(one.cpu_s for one in each):.4f})"
            for each in of_policy.values()
        ]
        lines.append(f"| {load} | {' | '.join(cells)} |")
    return lines


def _wall_s(steps: Sequence[Taken]) -> float:
    return statistics.median(each.wall_s for each in steps)


class _Worker:
    def __init__(self, models: Path, policy: str) -> None:
        plain = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
        variables = {
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": str(CPU_THREADS_PER_PROCESS),
            **POLICIES[policy],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.wait_policy", _WORKER, str(models)],
            env=plain | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, model: str, seconds: float) -> None:
        assert self._process.stdin is not None
        print(model, seconds, file=self._process.stdin, flush=True)

    def result(self) -> Taken:
        assert self._process.stdout is not None
        return Taken(*map(float, self._process.stdout.readline().split()))

    def end(self) -> None:
        with self._process as process:
            process.kill()


def _work(models: Path) -> None:
    """Train for as long as each line of standard input says, and print the seconds of a step."""
    import torch

    from pipeline.models.worker.loading import keep_quiet

    keep_quiet()
    torch.set_num_threads(CPU_THREADS_PER_PROCESS)
    steps = {model: _step(models / model, edge) for model, edge in _EDGES.items()}
    for line in sys.stdin:
        model, seconds = line.split()
        start_s, start_cpu_s, number = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() < start_s + float(seconds):
            steps[model]()
            number += 1
        taken = (time.perf_counter() - start_s, time.process_time() - start_cpu_s)
        print(*(each / number for each in taken), flush=True)


def _step(model: Path, edge: int) -> Callable[[], None]:
    import torch

    width = json.loads((model / "unet" / "config.json").read_text("utf-8"))["cross_attention_dim"]
    learn = learner(model, 16)
    latent, text = torch.randn(1, 4, edge, edge), torch.randn(1, 77, width)

    def step() -> None:
        learn(latent, text)

    step()  # the first one takes longer
    return step


if __name__ == "__main__":
    main()
