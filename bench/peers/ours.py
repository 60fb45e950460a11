"""Latentline, and the plain process of bench/bare.py that does only the work itself."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import bare
from bench.peers.trainer import Place, Start, Task, steps_by

ROOT = Path(__file__).parents[2]

RECIPE = """\
datasets: [{{name: photos, path: {photos}}}]
cache_dir: {folder}/cache
output_dir: {folder}/out
model: {{base: {base}}}
buckets: {{resolution: {edge}, step: 64}}
accelerate: {{mixed_precision: "no"}}
training:
  steps: 1000
  batch_size: 1
  seed: {seed}
  sample_every: 0
  lora: {{rank: {rank}, alpha: {rank}}}
"""


def plain(task: Task, place: Place, seed: int) -> Start:
    """Return the command of the plain process, which has no seed."""
    arguments = [task.base, place.photos, place.folder / "cache", task.edge, task.rank, task.steps]
    return Start(bare.command("train", *arguments), steps_by(r"step (\d+)"), ROOT)


def latentline(task: Task, place: Place, seed: int) -> Start:
    """Write the recipe, and return the command. Another seed is another run with the same caches."""
    configs, out = place.folder / "configs", place.folder / "out"
    configs.mkdir(exist_ok=True)
    text = RECIPE.format(
        photos=place.photos, folder=place.folder, base=task.base, edge=task.edge, rank=task.rank, seed=seed
    )
    (configs / "race.yaml").write_text(text, encoding="utf-8")
    earlier = set(out.glob("runs/*"))

    def steps(output: str) -> int:
        runs = [run / "logs" / "metrics.jsonl" for run in set(out.glob("runs/*")) - earlier]
        return sum(metrics.read_bytes().count(b"\n") for metrics in runs if metrics.exists())

    variables = {
        "LATENTLINE_CONFIGS": str(configs),
        "DAGSTER_HOME": str(place.kept),
        "DAGSTER_DISABLE_TELEMETRY": "1",
    }
    command = [str(Path(sys.executable).with_name("latentline")), "run", "race"]
    return Start(command, steps, ROOT, variables)
