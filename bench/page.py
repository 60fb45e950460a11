"""docs/benchmarks.md: the figures of the runs in bench/results, and of nothing else.

`python -m bench.page` writes it anew.
"""

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

Each figure is ours beside its limit: the least that the machine needs for the same work, written plainly,
measured in turns with ours in one run. What counts is the **ratio**, ours over the limit, the median of the
rounds, with the least and the largest of them; 1 is perfect, and `at most` is what the project asks of
itself. Seconds depend on the machine, and a machine that others share is slow at times; ratios move less.

`make bench` measures again in minutes, `make bench BENCH=full` at larger sizes, and `make bench-compare`
says what got slower. This page is written by `python -m bench.page` from the JSON files it names; no number
in its tables was written by hand.

`python -m bench --gpu` measures what needs a GPU, on a machine with CUDA and one GPU of 80 GB or more, in
about 20 minutes and 50 GB below `TMPDIR`: Stable Diffusion XL and FLUX.1 at full size with random weights,
made from their published configurations, so that nothing is downloaded. The beginning of an experiment's
name measures it alone, such as `python -m bench --gpu "SDXL VAE" "FLUX.1 LoRA"`; numbers of one commit and
GPU are gathered in `bench/results/gpu.json`, and `python -m bench.page` then writes them down here.
With `bitsandbytes` and `torchao` installed (`pip install 'latentline[gpu]'`) packed weights and the 8-bit
optimizer are measured too. `--tiny` runs the same code with tiny models, on a CPU as well.
"""

_NO_GPU = "No run in `bench/results` is from a GPU: no such machine was at hand yet.\n"

WHY = {
    "geometry": "of 148 ns 81 choose the bucket, 39 of them by comparing products of whole numbers, where "
    "the limit's logarithms may round either way; the others make the resized size and the crop.",
    "scan cold": "sha256 of such a file (183 kB) takes 174 us of a core, its header 21 us; it is hashed in "
    "the threads that read it.",
    "start: recipes": "of 14 ms of CPU a recipe 1.3 read it and 1.5 make its six steps with their checks; in "
    "the others Dagster resolves, checks and describes three jobs of them. A process that runs one job "
    "builds only that job's (`start: one of many`).",
    "text cold": "of 3.7 ms 1.9 are the pass with its Python around it, 0.9 the tokenizer, which the "
    "pipeline of diffusers and the count of the tokens ask four times, and the others looking for the entry, "
    "checking it and its durable write; beside an encoder of CLIP-L's size all that is little.",
    "training loader": "of 270 us in one thread 120 read the two entries, checked, as float32; 58 draw the "
    "noise of 4,096 numbers, 10 the timestep, 28 find the sample and its place in the plan. Another 170 are "
    "the interpreter's lock going back and forth between the thread that reads and the one that asks. A step "
    "of the tiny model takes two hundred times as long.",
    "validation unchanged": "the stat of each image and of its caption, where the limit has the image alone; "
    "two indexes and a table are read and compared, and nothing is written.",
}
"""Where the time goes of figures that are above what is asked, or of which nothing is asked and that are far
from their limit: from profiles of these stages."""

FAR = 2.0
"""A ratio from which on it is said why."""


_GROWTH = """\
How time and memory grow with the samples. Each stage runs in a process of its own. `a sample` is what one
more adds, from the second largest to the largest number; `in all` is the whole at the largest number divided
by it, with what is there or done once: Polars' start, its threads, and buffers. Memory is the most that the
process had resident; `in all` counts it from where the imports had left it. `above` is said of what a sample
adds."""


def page_text(folder: Path = RESULTS) -> str:
    """The page, in Markdown, of every run in the folder, by file name."""
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
    lines += _beside(run)
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


def _beside(run: dict[str, Any]) -> list[str]:
    """What a GPU's experiments noted beside their figures, and which of them could not be measured."""
    lines: list[str] = []
    for name, notes in sorted(run.get("notes", {}).items()):
        said = [f"{key} {_note(value)}" for key, value in notes.items() if key != "took_s"]
        lines += [f"- {name}: {'; '.join(said)}"] if said else []
    lines += [f"- {name}: not measured, {why}" for name, why in sorted(run.get("missing", {}).items())]
    return [*lines, ""] if lines else []


def _note(value: Any) -> str:
    """A note's value; of numbers by name each, and of several measurements the median."""
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        return "(" + ", ".join(f"{key}: {_note(each)}" for key, each in named.items()) + ")"
    if isinstance(value, list):
        return f"{statistics.median(cast('list[float]', value)):g}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _explained(figures: dict[str, Any]) -> list[str]:
    lines = ["| figure | ours | the limit |", "|---|---|---|"]
    lines += [f"| {name} | {figure['ours']} | {figure['limit']} |" for name, figure in figures.items()]
    above = [
        f"{name} ({figure['ratio'][1]:.2f}, at most {figure['most']:.2f})"
        for name, figure in figures.items()
        if _is_above(figure)
    ]
    lines += ["", f"Above what is asked: {', '.join(above) or 'nothing'}.", ""]
    reasons = [f"- {name}: {WHY[name]}" for name in figures if name in WHY and _is_far(figures[name])]
    return (
        [*lines, "Where the time goes of what is far from its limit:", "", *reasons, ""] if reasons else lines
    )


def _is_above(figure: dict[str, Any]) -> bool:
    return bool(figure["most"]) and figure["ratio"][1] > figure["most"]


def _is_far(figure: dict[str, Any]) -> bool:
    return _is_above(figure) or (not figure["most"] and figure["ratio"][1] > FAR)


if __name__ == "__main__":
    write_text(PAGE, page_text())
