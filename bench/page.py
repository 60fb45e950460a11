"""Generate docs/benchmarks.md from the runs in bench/results: `python -m bench.page`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, cast

from bench import results
from bench.growth import measure as growth
from pipeline.storage.atomic import write_text

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"

_TOP = """\
# Benchmarks

Each figure compares Latentline with a limit: the same work in as little code as the machine needs for it.
Both sides are measured in turns within one run. The **ratio** is the time of Latentline divided by that of
the limit. The table shows the median of the rounds, the smallest and the largest; 1 is perfect. `at most`
is the bound that the project sets itself. Seconds depend on the machine and its load, ratios much less.

`make bench` measures again in minutes, `make bench BENCH=full` at larger sizes, and `make bench-compare`
lists what became slower. `python -m bench.page` generates this page from the JSON files named below, so no
number in its tables is written by hand.

`python -m bench --gpu` measures the figures that need a GPU. It needs CUDA, one GPU with at least 80 GB,
about 20 minutes and 50 GB below `TMPDIR`. Stable Diffusion XL and FLUX.1 run at full size with random
weights made from their published configurations, so nothing is downloaded. To measure some experiments
only, give the beginning of their names, such as `python -m bench --gpu "SDXL VAE" "FLUX.1 LoRA"`. Results
of one commit and GPU are collected in `bench/results/gpu.json`, from which `python -m bench.page` adds
them to this page. `bitsandbytes` and `torchao` (`pip install 'latentline[gpu]'`) add quantized weights and
the 8-bit optimizer. `--tiny` runs the same code with tiny models, also on a CPU.
"""

_NO_GPU = "`bench/results` contains no run on a GPU yet.\n"

WHY = {
    "geometry": "81 of 148 ns choose the bucket, 39 of these by comparing integer products, where the "
    "limit's logarithms may round either way. The rest computes the resized size and the crop.",
    "scan cold": "sha256 of such a file (183 kB) takes 174 us of a core, its header 21 us. Files are hashed "
    "in the threads that read them.",
    "start: recipes": "of 14 ms of CPU time per recipe, 1.3 ms read it and 1.5 ms build its six assets with "
    "their checks. Dagster spends the rest resolving, checking and describing three jobs.",
    "text cold": "of 3.7 ms, 1.9 are the forward pass with its Python overhead and 0.9 the tokenizer, which "
    "runs four times: in the pipeline of diffusers and to count the tokens. The rest finds, verifies and "
    "durably writes the entry. Next to an encoder of CLIP-L's size all this is small.",
    "training loader": "of 270 us in one thread, 120 read and verify the two entries and convert them to "
    "float32, 58 draw the noise of 4,096 values, 10 the timestep, and 28 find the sample and its position in "
    "the plan. Another 170 us pass the interpreter lock between the reading and the training thread. A step "
    "of the tiny model takes two hundred times as long.",
    "validation unchanged": "each image and its caption need a stat, while the limit has only the image. Two "
    "indexes and a table are read and compared, and nothing is written.",
}
"""Explanations of figures that exceed their bound, or that have no bound and are far from their limit."""

FAR = 2.0
"""Ratio above which a figure without a bound is explained."""


_GROWTH = """\
Growth of time and memory with the number of samples. Each stage runs in its own process. `a sample` is the
increase per sample between the second largest and the largest number. `in all` is the total at the largest
number divided by it, including fixed costs such as the start of Polars, its threads and buffers. Memory is
the peak resident memory of the process; `in all` does not include imports. `above` lists the bounds
exceeded by the increase per sample."""


def page_text(folder: Path = RESULTS) -> str:
    """Return the Markdown page of all runs in the folder, sorted by file name."""
    runs = {file.name: results.load(file) for file in sorted(folder.glob("*.json"))}
    parts = [_TOP] if any(run["machine"]["gpu"] for run in runs.values()) else [_TOP, _NO_GPU]
    return "\n".join([*parts, *(_run(name, run) for name, run in runs.items())])


def _run(name: str, run: dict[str, Any]) -> str:
    machine = run["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in sorted(machine["packages"].items()))
    lines = [
        f"## {name}",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['gpu'] or 'no GPU'}, {machine['system']}, Python {machine['python']}, {versions}; "
        f"commit {run['commit']}{', full sizes' if run['full'] else ''}.",
        "",
    ]
    if run["figures"]:
        lines += ["```", results.table(run), "```", ""]
        lines += _explained(run["figures"])
    lines += _note_lines(run)
    if "growth" in run:
        lines += [
            _GROWTH,
            "",
            "```",
            growth.table(run["growth"]),
            "```",
            "",
        ]
    return "\n".join(lines)


def _note_lines(run: dict[str, Any]) -> list[str]:
    """Return the notes of the experiments on a GPU, and those that could not be measured."""
    lines: list[str] = []
    for name, notes in sorted(run.get("notes", {}).items()):
        notes_text = [f"{key} {_note(value)}" for key, value in notes.items() if key != "took_s"]
        lines += [f"- {name}: {'; '.join(notes_text)}"] if notes_text else []
    lines += [f"- {name}: not measured, {why}" for name, why in sorted(run.get("missing", {}).items())]
    return [*lines, ""] if lines else []


def _note(value: Any) -> str:
    """Return the text of a note: named values in brackets, several measurements as their median."""
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        return "(" + ", ".join(f"{key}: {_note(each)}" for key, each in named.items()) + ")"
    if isinstance(value, list):
        return f"{statistics.median(cast('list[float]', value)):g}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _explained(figures: dict[str, Any]) -> list[str]:
    lines = ["| figure | ours | the limit |", "|---|---|---|"]
    lines += [f"| {name} | {figure['ours']} | {figure['limit']} |" for name, figure in figures.items()]
    exceeding = [
        f"{name} ({figure['ratio'][1]:.2f}, at most {figure['most']:.2f})"
        for name, figure in figures.items()
        if _is_above(figure)
    ]
    lines += ["", f"Above the bound: {', '.join(exceeding) or 'nothing'}.", ""]
    reasons = [f"- {name}: {WHY[name]}" for name in figures if name in WHY and _is_far(figures[name])]
    return [*lines, "Explanations of figures far from their limit:", "", *reasons, ""] if reasons else lines


def _is_above(figure: dict[str, Any]) -> bool:
    return bool(figure["most"]) and figure["ratio"][1] > figure["most"]


def _is_far(figure: dict[str, Any]) -> bool:
    return _is_above(figure) or (not figure["most"] and figure["ratio"][1] > FAR)


if __name__ == "__main__":
    write_text(PAGE, page_text())
