"""Generate docs/benchmarks.md from the runs in bench/results: `python -m bench.page`."""

from __future__ import annotations

import statistics
from pathlib import Path
from textwrap import fill
from typing import Any, cast

from bench import results
from bench.growth import measure as growth
from bench.peers.table import table as peers_table
from pipeline.storage.atomic import write_text

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"

_TOP = """\
# Benchmarks

How much time does Latentline add to the work that has to be done anyway? Each figure on this page compares
Latentline ("ours") with a limit: the least code that does the same work on the same machine.

- **ours** and **limit** are times per item.
- **ratio** is Latentline's time divided by the limit's. 1 means that it adds nothing; below 1, Latentline is
  faster than the reference program, for example because it does part of the work only once. One run measures
  both in alternating rounds; the table shows the median ratio of the rounds.
- **spread** is the smallest and the largest ratio of the rounds.
- **at most** is the bound that the project sets itself. Figures without a bound are for information.

Times depend on the machine and its load; ratios depend on them much less.

## Repeat the measurements

`make bench` takes a few minutes, and `make bench BENCH=full` uses larger sizes. `make bench-compare` lists
the figures that became slower. `python -m bench.page` generates this page from the JSON files in
`bench/results`.

`python -m bench --gpu` measures the figures that need a GPU. It needs CUDA, one GPU with at least 80 GB,
about 20 minutes, and 50 GB below `TMPDIR`. Stable Diffusion XL and FLUX.1 run at full size, with random
weights that are created from their published configurations, so nothing is downloaded.

- To run only some experiments, pass the beginning of their names, such as
  `python -m bench --gpu "SDXL VAE" "FLUX.1 LoRA"`.
- `--folder` keeps models and caches, so that the next call does not create them again.
- `pip install 'latentline[gpu]'` (`bitsandbytes`, `torchao`) adds quantized weights and the 8-bit optimizer.
- `--tiny` runs the same code with tiny models, also on a CPU.

Results of one commit and GPU are collected in `bench/results/gpu.json`, and appear on this page when it is
generated again.
"""

_NO_GPU = (
    "`bench/results` contains no complete run on a GPU yet; "
    "[hardware.md](hardware.md#measured-on-an-h100) has some figures of one.\n"
)

WHY = {
    "latents cold, SD 1.5": "The ratio varies from run to run: four runs of one day gave 1.00, 1.12, 0.99 "
    "and 0.97, with 67 to 74 ms for the limit.",
    "geometry": "Choosing the bucket takes 55% of the time, almost half of it to compare integer products; "
    "the limit compares logarithms, whose rounding can change the result. The rest computes the resized size "
    "and the crop.",
    "scan cold": "Hashing one of these files (183 kB) with SHA-256 takes 174 us of one core, and reading "
    "its image header 21 us.",
    "start: recipes": "Each recipe takes 14 ms of CPU time: 1.3 ms to read it and 1.5 ms to build its six "
    "assets and their checks. Dagster needs the rest to resolve, validate and describe three jobs.",
    "text cold": "The forward pass of the tiny encoder takes a sixth of the time. The rest does not "
    "depend on the encoder: the tokenizer runs four times, in diffusers' pipeline and to count the "
    "tokens, and the entry is looked up, verified and written. See `text cold, CLIP-L` for an encoder of "
    "the usual size.",
    "latents one new": "Nearly all of the time is the start of a process, which imports torch and "
    "diffusers and loads the VAE.",
    "training loader": "In an earlier run with 494 us per sample, the reading thread took 270 us: 120 us "
    "to read and verify two entries and to convert them to float32, 58 us to draw 4,096 noise values, 10 "
    "us to draw the timestep, and 28 us to find the sample in the plan. Passing Python's interpreter "
    "lock between the reading and the training thread took another 170 us. A training step of the tiny "
    "model takes over a thousand times as long.",
    "validation unchanged": "Latentline calls stat for the image and for its caption, the limit for the "
    "image only. It also reads and compares two indexes and a table.",
}
"""Explanations of figures that exceed their bound, or that have no bound and are far from their limit."""

FAR = 2.0
"""Ratio above which a figure without a bound is explained."""


_GROWTH = """\
The next table shows how time and memory grow with the number of samples. Each stage runs in its own process,
and its memory is the peak resident memory of that process, without that of imported modules.

- `time/sample` and `memory/sample` are the increase per sample from the second largest to the largest number
  of samples. `above` lists the bounds that they exceed.
- `exponent` is the slope of log time over log samples between the smallest and the largest number; 1 means
  that time grows in proportion to the number of samples.
- `total` is the value at the largest number, divided by that number. It includes fixed costs, such as Polars'
  threads and buffers."""


_PEERS = """\
The next table compares whole commands of trainers, each an unmodified checkout with its own environment.
All train a LoRA in float32 with batch size 1 at about 256 x 256 pixels, on the same {photographs}
photographs and the same base model: the layout of Stable Diffusion 1.5 with fewer channels and random
weights. The table shows the medians of {rounds} rounds, in which all trainers ran in turn.
`python -m bench.peers` repeats it.

- `first step` and `step {steps}` are the time from the start of the command to the end of that step.
- `of {cached:,} images` is the same for full caches of as many small photographs, at 64 x 64 pixels.
- `step` is the time of each step after the first, with full caches.
- `ratio` is the median ratio to the bare process in the same round. It imports what it needs, encodes all
  images and captions, and trains, without checks, checkpoints or logs.
- `memory` is the peak memory of all processes of the command."""


_EXPORT_CHECK = """\
At each checkpoint and at the end of a run, the three files of a LoRA are read back, and every number is
compared with the trained one. The table shows the CPU time of this, summed over all threads, for denoisers
with the sizes of the published models. `python -m bench.export_check --save` repeats the measurement."""


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
    if "peers" in run:
        peers = run["peers"]
        lines += [_PEERS.format(**peers), "", *peers_table(peers), ""]
        if "conditions" in peers:
            lines += [fill(peers["conditions"], 110), ""]
    if "export_check" in run:
        lines += [_EXPORT_CHECK, "", *_export_check_table(run["export_check"]), ""]
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


def _export_check_table(timings: list[dict[str, Any]]) -> list[str]:
    rows = [
        f"| {each['model']} | {each['rank']} | {each['num_modules']} | {each['file_bytes'] / 1e6:.0f} MB "
        f"| {each['cpu_s']:.1f} s |"
        for each in timings
    ]
    return ["| model | rank | adapted modules | three files | CPU |", "|---|---|---|---|---|", *rows]


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
    within = "No figure exceeds its bound. Figures without a bound are not judged."
    lines += ["", f"Above the bound: {', '.join(exceeding)}." if exceeding else within, ""]
    reasons = [f"- {name}: {WHY[name]}" for name in figures if name in WHY and _is_far(figures[name])]
    return [*lines, "Explanations of figures far from their limit:", "", *reasons, ""] if reasons else lines


def _is_above(figure: dict[str, Any]) -> bool:
    return bool(figure["most"]) and figure["ratio"][1] > figure["most"]


def _is_far(figure: dict[str, Any]) -> bool:
    return _is_above(figure) or (not figure["most"] and figure["ratio"][1] > FAR)


if __name__ == "__main__":
    write_text(PAGE, page_text())
