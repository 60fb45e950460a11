"""All experiments in turn: each one's numbers are kept as soon as they are there."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import results
from bench.gpu import encoding, jobs, training
from bench.gpu.experiment import Experiment, run
from bench.gpu.rig import FULL, TINY, Bench

EXPERIMENTS: list[Experiment] = [*encoding.EXPERIMENTS, *training.EXPERIMENTS, *jobs.EXPERIMENTS]
"""Whole jobs last: they tell least, and take longest."""


def measure_all(names: list[str], *, tiny: bool, rounds: int, out: Path) -> int:
    """Measure the experiments whose names begin so, into one file.

    Args:
        names: None for all.
        tiny: With tiny models, on whatever device there is: to see that all of it works.
        rounds: Of each side at most; each experiment has a budget of seconds besides.
        out: A run in it, of the same commit and GPU, is added to.

    Returns:
        The exit status: 1 if an experiment failed.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        sys.exit("--gpu needs a CUDA device and there is none; add --tiny to see on the CPU that it runs")
    chosen = [each for each in EXPERIMENTS if not names or any(each.name.startswith(name) for name in names)]
    if not chosen:
        sys.exit(f"no experiment begins with {names}; there are: {[each.name for each in EXPERIMENTS]}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are made here
    with tempfile.TemporaryDirectory(prefix="latentline-bench-") as folder:
        bench = Bench(Path(folder), device, TINY if tiny else FULL)
        return 1 if measured_into(out, chosen, bench, rounds=rounds) else 0


def measured_into(out: Path, chosen: list[Experiment], bench: Bench, *, rounds: int) -> dict[str, str]:
    """Measure these, writing the run after each.

    Returns:
        The names of those that failed, and why.
    """
    kept = _begun(out, full=bench.scale.full)
    failed: dict[str, str] = {}
    for number, experiment in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {experiment.name}", flush=True)
        start_s = time.monotonic()
        ended = run(experiment, bench, rounds=rounds)
        part = results.as_json(ended.measured, full=bench.scale.full)
        kept["figures"] |= part["figures"]
        kept["missing"].pop(experiment.name, None)
        if ended.missing is not None:
            failed[experiment.name] = kept["missing"][experiment.name] = ended.missing
            print(f"  not measured: {ended.missing}", flush=True)
        notes = {**ended.notes, "took_s": round(time.monotonic() - start_s, 1)}
        kept["notes"][experiment.name] = notes
        results.save(kept, out)
        if ended.measured:
            print(results.table(part), flush=True)
    print(f"kept in {out}")
    return failed


def _begun(out: Path, *, full: bool) -> dict[str, Any]:
    """The run that is added to: the one in the file, if it is of this commit and GPU."""
    new: dict[str, Any] = {**results.as_json([], full=full), "notes": {}, "missing": {}}
    if out.is_file():
        old = results.load(out)
        same = all(old.get(key) == new[key] for key in ("commit", "full"))
        # A virtual machine's memory may have grown meanwhile.
        if same and old["machine"]["gpu"] == new["machine"]["gpu"] and "notes" in old:
            return old
    return new
