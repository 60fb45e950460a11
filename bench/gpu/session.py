"""Run the experiments one after another, and store the results after each."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench import results
from bench.gpu import encoding, jobs, previews, training
from bench.gpu.experiment import Experiment, run
from bench.gpu.rig import FULL, TINY, Bench

EXPERIMENTS: list[Experiment] = [
    *encoding.EXPERIMENTS,
    *training.EXPERIMENTS,
    *previews.EXPERIMENTS,
    *jobs.EXPERIMENTS,
]
"""All experiments. Complete jobs come last because they take longest and show the least detail."""


def measure_all(names: list[str], *, tiny: bool, rounds: int, out: Path, folder: Path | None = None) -> int:
    """Measure experiments and store their results in one file.

    Args:
        names: Prefixes of the names of experiments; empty for all.
        tiny: Use tiny models, on any device, to test the code.
        rounds: Maximum number of rounds per side, within the budget of each experiment.
        out: JSON file. Results are added to an existing run of the same commit and GPU.
        folder: Folder for models, photographs and caches, which later calls use again; None for a temporary
            one.

    Returns:
        The exit status: 1 if an experiment failed.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        sys.exit("--gpu needs a CUDA device, but none is available; add --tiny to test the code on the CPU")
    chosen = [each for each in EXPERIMENTS if not names or any(each.name.startswith(name) for name in names)]
    if not chosen:
        sys.exit(
            f"no experiment name starts with any of {names}; available: {[each.name for each in EXPERIMENTS]}"
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # All models are created locally.
    scale = TINY if tiny else FULL
    # Tiny models must not replace those of full size.
    kept = None if folder is None else folder / ("full" if scale.full else "tiny")
    with nullcontext(kept) if kept else tempfile.TemporaryDirectory(prefix="latentline-bench-") as work:
        bench = Bench(Path(work), device, scale)
        bench.folder.mkdir(parents=True, exist_ok=True)
        return 1 if measured_into(out, chosen, bench, rounds=rounds) else 0


def measured_into(out: Path, chosen: list[Experiment], bench: Bench, *, rounds: int) -> dict[str, str]:
    """Measure the chosen experiments, and write the run after each.

    Returns:
        Error messages by name of the failed experiments.
    """
    stored = _existing_run(out, full=bench.scale.full)
    failed: dict[str, str] = {}
    for number, experiment in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {experiment.name}", flush=True)
        start_s = time.monotonic()
        ended = run(experiment, bench, rounds=rounds)
        part = results.as_json(ended.measured, full=bench.scale.full)
        stored["figures"] |= part["figures"]
        stored["missing"].pop(experiment.name, None)
        if ended.missing is not None:
            failed[experiment.name] = stored["missing"][experiment.name] = ended.missing
            print(f"  not measured: {ended.missing}", flush=True)
        notes = {**ended.notes, "took_s": round(time.monotonic() - start_s, 1)}
        stored["notes"][experiment.name] = notes
        results.save(stored, out)
        if ended.measured:
            print(results.table(part), flush=True)
    print(f"stored in {out}")
    return failed


def _existing_run(out: Path, *, full: bool) -> dict[str, Any]:
    """Return the run in the file if it has this commit and GPU, or else an empty run."""
    new: dict[str, Any] = {**results.as_json([], full=full), "notes": {}, "missing": {}}
    if out.is_file():
        old = results.load(out)
        same = all(old.get(key) == new[key] for key in ("commit", "full"))
        # Only the GPU is compared, because the memory of a virtual machine may change.
        if same and old["machine"]["gpu"] == new["machine"]["gpu"] and "notes" in old:
            return old
    return new
