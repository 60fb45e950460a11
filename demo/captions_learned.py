"""What the demo's LoRA learns from captions of the captioner, from true captions, and from a trigger word.

    python -m demo.captions_learned outputs/captions_learned --seeds 0 1 2

It trains the runs that are missing in demo/results/captions_learned.jsonl with the settings of
configs/demo.yaml, and prints the table in docs/captions.md. The sources of captions share the output folder
of a seed, so captions that are equal lead to one run, which is trained once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from demo.checks import right_captions
from demo.experiments import changed_demo, teach
from demo.world import CONCEPT
from pipeline.recipe.project import project_root
from pipeline.reporting.reports import read_report
from pipeline.storage.tables import Tables

RESULTS = project_root() / "demo" / "results" / "captions_learned.jsonl"

TRUE, TRIGGER, MODEL = "true captions", "only the trigger word", "captions of the model"
SOURCES = (TRUE, TRIGGER, MODEL)

Row = Mapping[str, Any]


def main() -> None:
    """Train and score the missing runs, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the runs, created if it is missing")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    for seed in arguments.seeds:
        for source in SOURCES:
            if not any(
                (row["seed"], row["source"]) == (seed, source) for row in read_rows(arguments.results)
            ):
                row = measured(arguments.folder.absolute(), seed, source)
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(read_rows(arguments.results)))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the stored results, sorted by seed and source."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return sorted(rows, key=lambda row: (row["seed"], SOURCES.index(row["source"])))


def measured(folder: Path, seed: int, source: str, **training: Any) -> dict[str, Any]:
    """Train with one source of captions, unless an equal run exists in the folder, and return its scores."""
    place = folder / str(seed) / source.replace(" ", "_")
    place.mkdir(parents=True)
    recipe = changed_demo(
        place,
        datasets=_datasets(place / "pictures", source),
        cache_dir=str(folder / "cache"),
        output_dir=str(folder / str(seed) / "out"),
        training={"seed": seed, "sample_every": 0, **training},
    )
    learned = teach(recipe)
    right, number = right_captions(Tables(recipe.output_dir).read("validated_dataset"))
    run = (read_report(recipe.output_dir, "trained_lora") or {})["run"]
    captions = {"right_captions": right, "captions": number}
    return {"seed": seed, "source": source, "run": run, **captions, **asdict(learned)}


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of the scores, with the share of the score that true captions reach."""
    scores = {(row["seed"], row["source"]): row["concept_after"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        "| captions | right | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | share |",
        "|---|---|" + "---|" * len(seeds) + "---|---|",
    ]
    best = mean(scores[seed, TRUE] for seed in seeds)
    for source in SOURCES:
        of_source = [row for row in rows if row["source"] == source]
        average = mean(row["concept_after"] for row in of_source)
        right, number = (sum(row[key] for row in of_source) for key in ("right_captions", "captions"))
        cells = [f"{scores[seed, source]:.2f}" for seed in seeds]
        cells = [source, f"{right} of {number}", *cells, f"{average:.2f}", f"{average / best:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _datasets(pictures: Path, source: str) -> list[dict[str, Any]]:
    """Return the datasets of configs/demo_captions.yaml with their captions from this source."""
    file = project_root() / "configs" / "demo_captions.yaml"
    datasets = yaml.safe_load(file.read_text(encoding="utf-8"))["datasets"]
    named = {each["name"]: {"name": each["name"], "path": str(pictures / each["name"])} for each in datasets}
    captions: dict[str, dict[str, Any]] = {name: {"from": "sidecar", "suffix": ".txt"} for name in named}
    if source == MODEL:
        captions = {each["name"]: {**each["captions"], "when": "always"} for each in datasets}
    elif source == TRIGGER:
        captions["concept"] = {"from": "fixed", "text": CONCEPT}
    return [{**each, "captions": captions[name]} for name, each in named.items()]


if __name__ == "__main__":
    main()
